/* The EC2 instance types whose NICs can be played: how many, how fast, where on the PCI bus. */
#ifndef SIMNIC_INSTANCE_H
#define SIMNIC_INSTANCE_H

#include <stddef.h>
#include <stdint.h>

#define SIMNIC_MAX_NICS 32
#define SIMNIC_MAX_SWITCHES 8

struct instance {
    const char *name;
    int nic_count;
    int nics_per_switch;
    int gpus_per_switch;
    uint8_t switch_bus[SIMNIC_MAX_SWITCHES]; /* PCI bus of the first device behind each switch */
    uint8_t device_slot;                     /* PCI device number; devices share a bus when not 0 */
    double speed_gbps;                       /* per NIC */
    size_t transmit_queue_size;
};

/* Where one NIC or GPU sits. */
struct pci_place {
    uint8_t root_bus;
    uint8_t bus;
    uint8_t slot;
    int numa_node;
};

/* NULL when the name is unknown. */
const struct instance *instance_by_name(const char *name);

/* The smallest instance that has this many NICs; NULL when none has. */
const struct instance *instance_by_nic_count(int nic_count);

struct pci_place instance_nic_place(const struct instance *instance, int nic);
struct pci_place instance_gpu_place(const struct instance *instance, int gpu);
int instance_gpu_count(const struct instance *instance);
int instance_switch_count(const struct instance *instance);

#endif
