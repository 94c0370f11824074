/* topology.h - PURE: how far a NIC is from a buffer, and which NICs serve the buffer.
 *
 * A place is what sysfs says of a device: the bridges on its way to the processor and
 * its NUMA node.  Host memory has a node alone. */
#ifndef EKV_TOPOLOGY_H
#define EKV_TOPOLOGY_H

#include <stdbool.h>
#include <stdint.h>

#define TOPOLOGY_HOPS_MAX 16u
#define TOPOLOGY_RAILS_MAX 64u

struct place {
    int32_t numa_node;                /* -1: unknown */
    uint32_t hop_count;               /* 0: not on the PCI bus, or unknown */
    uint64_t root;                    /* the host bridge, e.g. pci0000:44 */
    uint64_t hops[TOPOLOGY_HOPS_MAX]; /* PCI addresses from the root port to the device */
};

/* Distances; smaller is nearer.  Behind a common bridge it counts how many they share:
 * a switch below another is nearer than the upper one. */
#define TOPOLOGY_SAME_SWITCH 0u /* to TOPOLOGY_HOPS_MAX - 1 */
#define TOPOLOGY_SAME_ROOT 32u
#define TOPOLOGY_SAME_NODE 33u
#define TOPOLOGY_UNKNOWN 34u /* nothing known against it: before what is known to be far */
#define TOPOLOGY_OTHER_NODE 35u

/* How the rails stand to one region. */
struct reach {
    bool bound;                        /* to its nearest rails: device memory */
    uint64_t rails;                    /* bit per rail that has a key for it */
    uint32_t count;                    /* bits in rails */
    uint8_t ranks[TOPOLOGY_RAILS_MAX]; /* 0: nearest; equal distances have equal ranks */
    uint8_t seats[TOPOLOGY_RAILS_MAX]; /* place in the order of nearness, then of index */
};

/* Fills hops and root from a device's real path in sysfs; false: no PCI path. */
bool place_parse(const char *path, struct place *place);

uint32_t topology_distance(const struct place *a, const struct place *b);

/* Device memory is registered on its nearest rails, and where that is a single one, on
 * those of the next distance too, so that no region hangs on one NIC: rails that die
 * are never made up for later, since registering takes seconds in which a progress
 * thread moves nothing, and no job that is under way would know the new keys.  Host
 * memory is registered on all rails: the link between processors carries several NICs,
 * and a busy engine needs them all. everywhere: so is device memory. */
void topology_plan(const struct place *rails, uint32_t count, const struct place *buffer,
                   bool is_device, bool everywhere, struct reach *reach);

/* Host memory may have been placed by the time it is registered: ranks and seats anew,
 * the rails stay. */
void topology_rank(const struct place *rails, uint32_t count, const struct place *buffer,
                   struct reach *reach);

/* The rail at a seat. */
uint32_t reach_rail_at(const struct reach *reach, uint32_t count, uint32_t seat);

#endif
