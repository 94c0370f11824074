/* device.h - choosing the libfabric domains that become rails, and describing them.
 * Stateless. */
#ifndef EKV_DEVICE_H
#define EKV_DEVICE_H

#include <stdbool.h>

#include "fabric.h"
#include "topology.h"

#define DEVICES_MAX 64u

struct device_list {
    struct fi_info *infos[DEVICES_MAX]; /* each owned by the list */
    uint32_t count;
};

/* gpus: NICs that reach GPU memory are asked to, where their provider can. */
int device_list_open(struct device_list *list, const struct fabric *fabric,
                     const ekv_options *options, bool gpus, ekv_error *error);
void device_list_close(struct device_list *list, const struct fabric *fabric);

/* Name, fabric, provider, PCI, NUMA node, speed and the fixed behaviour flags; where the
 * device is, from a sysfs that may be mounted elsewhere. */
void device_describe(const struct fi_info *info, const char *sysfs_root, ekv_nic *nic,
                     struct place *place);

#endif
