#include "instance.h"

#include <string.h>

/* The addresses of p4d and p5 are those the machines show: behind each switch the NICs, then the
 * GPUs. Of p5en only the first is known, of the p6 types none; the rest follows p5's pattern. */
static const struct instance INSTANCES[] = {
    {"p4d.24xlarge", 4, 1, 2, {0x10, 0x20, 0x90, 0xa0}, 0x1b, 100.0, 4096},
    {"p6-b200.48xlarge", 8, 1, 1, {0x4f, 0x60, 0x71, 0x82, 0x93, 0xa4, 0xb5, 0xc6}, 0, 400.0, 2048},
    {"p5en.48xlarge", 16, 2, 1, {0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc}, 0, 200.0, 4096},
    {"p6-b300.48xlarge",
     16,
     2,
     1,
     {0x4f, 0x60, 0x71, 0x82, 0x93, 0xa4, 0xb5, 0xc6},
     0,
     400.0,
     2048},
    {"p5.48xlarge", 32, 4, 1, {0x4f, 0x60, 0x71, 0x82, 0x93, 0xa4, 0xb5, 0xc6}, 0, 100.0, 4096},
    {"p5e.48xlarge", 32, 4, 1, {0x4f, 0x60, 0x71, 0x82, 0x93, 0xa4, 0xb5, 0xc6}, 0, 100.0, 4096},
};

/* On p5 the root port's bus is eleven below that of the first device behind its switch. */
enum { ROOT_BUS_DISTANCE = 11, INSTANCE_COUNT = sizeof INSTANCES / sizeof INSTANCES[0] };

const struct instance *instance_by_name(const char *name)
{
    for (int i = 0; i < INSTANCE_COUNT; i++)
        if (strcmp(INSTANCES[i].name, name) == 0)
            return &INSTANCES[i];
    return NULL;
}

const struct instance *instance_by_nic_count(int nic_count)
{
    for (int i = 0; i < INSTANCE_COUNT; i++)
        if (nic_count <= INSTANCES[i].nic_count)
            return &INSTANCES[i];
    return NULL;
}

int instance_switch_count(const struct instance *instance)
{
    return instance->nic_count / instance->nics_per_switch;
}

int instance_gpu_count(const struct instance *instance)
{
    return instance_switch_count(instance) * instance->gpus_per_switch;
}

static struct pci_place place_behind_switch(const struct instance *instance, int pci_switch,
                                            int position)
{
    struct pci_place place;
    uint8_t first_bus = instance->switch_bus[pci_switch];

    place.root_bus = (uint8_t)(first_bus - ROOT_BUS_DISTANCE);
    place.bus = first_bus;
    place.slot = instance->device_slot;
    if (instance->device_slot != 0)
        place.slot = (uint8_t)(instance->device_slot + position);
    else
        place.bus = (uint8_t)(first_bus + position);
    place.numa_node = pci_switch < instance_switch_count(instance) / 2 ? 0 : 1;
    return place;
}

struct pci_place instance_nic_place(const struct instance *instance, int nic)
{
    return place_behind_switch(instance, nic / instance->nics_per_switch,
                               nic % instance->nics_per_switch);
}

struct pci_place instance_gpu_place(const struct instance *instance, int gpu)
{
    return place_behind_switch(instance, gpu / instance->gpus_per_switch,
                               instance->nics_per_switch + gpu % instance->gpus_per_switch);
}
