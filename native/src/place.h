/* place.h - reading places of devices from sysfs, and of memory from the kernel.
 * Stateless; `root` is where sysfs is mounted, NULL for /sys. */
#ifndef EKV_PLACE_H
#define EKV_PLACE_H

#include "efa_kv.h"
#include "topology.h"

/* Of a PCI device such as 0000:4f:00.0; what cannot be read stays unknown. */
void place_of_pci(const char *root, const char *address, struct place *place);

/* Of a network interface; fills pci with its address, or leaves it empty. */
void place_of_interface(const char *root, const char *name, char pci[16], struct place *place);

/* Speed of a network interface in bits per second, 0 unknown. */
uint64_t place_interface_speed(const char *root, const char *name);

/* The NUMA node that holds most of a range of host memory, as a sample of its pages shows;
 * -1 where it is spread, not there yet, or the kernel does not say. */
int32_t place_node_of_memory(uint64_t address, uint64_t length_bytes);

#endif
