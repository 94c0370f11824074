/* place.c - see place.h. */
#define _GNU_SOURCE
#include "place.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PLACE_SAMPLES 64u
/* So many of 4 samples on one node make it the region's. */
#define PLACE_MAJORITY 3u
#define PLACE_NODES_MAX 1024

static const char *root_or_default(const char *root)
{
    return root && root[0] ? root : "/sys";
}

static bool number_read(const char *path, long *number)
{
    FILE *file = fopen(path, "re");
    bool good = file && fscanf(file, "%ld", number) == 1;

    if (file)
        fclose(file);
    return good;
}

/* What a link in sysfs leads to: a directory of its device. */
static bool place_read(const char *link, char *real, struct place *place)
{
    char file[PATH_MAX];
    long node;

    *place = (struct place){.numa_node = -1};
    if (!realpath(link, real))
        return false;
    place_parse(real, place);
    if (snprintf(file, sizeof file, "%s/numa_node", real) < (int)sizeof file &&
        number_read(file, &node))
        place->numa_node = node < 0 ? -1 : (int32_t)node;
    return true;
}

void place_of_pci(const char *root, const char *address, struct place *place)
{
    char link[PATH_MAX], real[PATH_MAX];

    snprintf(link, sizeof link, "%s/bus/pci/devices/%s", root_or_default(root), address);
    place_read(link, real, place);
}

void place_of_interface(const char *root, const char *name, char pci[16], struct place *place)
{
    char link[PATH_MAX], real[PATH_MAX];

    pci[0] = '\0';
    snprintf(link, sizeof link, "%s/class/net/%s/device", root_or_default(root), name);
    if (place_read(link, real, place) && place->hop_count > 0) {
        uint64_t address = place->hops[place->hop_count - 1];

        snprintf(pci, 16, "%04x:%02x:%02x.%x", (unsigned)(address >> 32) & 0xffffff,
                 (unsigned)(address >> 16) & 0xff, (unsigned)(address >> 8) & 0xff,
                 (unsigned)address & 0xf);
    }
}

uint64_t place_interface_speed(const char *root, const char *name)
{
    char path[PATH_MAX];
    long megabits;

    snprintf(path, sizeof path, "%s/class/net/%s/speed", root_or_default(root), name);
    return number_read(path, &megabits) && megabits > 0 ? (uint64_t)megabits * 1000000 : 0;
}

int32_t place_node_of_memory(uint64_t address, uint64_t length_bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t first = address & ~(page - 1);
    uint64_t pages = (address + length_bytes - first + page - 1) / page;
    uint64_t count = pages < PLACE_SAMPLES ? pages : PLACE_SAMPLES;
    void *samples[PLACE_SAMPLES];
    int nodes[PLACE_SAMPLES];

    for (uint64_t i = 0; i < count; i++)
        samples[i] = (void *)(uintptr_t)(first + i * pages / count * page);
    /* Without target nodes it moves nothing and tells where each page is; unlike
     * get_mempolicy it does not bring in pages that nobody has touched. */
    if (count == 0 || syscall(SYS_move_pages, 0, (unsigned long)count, samples, NULL, nodes, 0) < 0)
        return -1;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t same = 0;

        for (uint64_t j = 0; j < count; j++)
            same += nodes[j] == nodes[i];
        if (nodes[i] >= 0 && nodes[i] < PLACE_NODES_MAX && same * 4 >= count * PLACE_MAJORITY)
            return nodes[i];
    }
    return -1;
}
