/* device.h - choosing the libfabric domains that become rails, and describing them.
 * Stateless. */
#ifndef EKV_DEVICE_H
#define EKV_DEVICE_H

#include "fabric.h"

#define DEVICES_MAX 64u

struct device_list {
    struct fi_info *infos[DEVICES_MAX]; /* each owned by the list */
    uint32_t count;
};

int device_list_open(struct device_list *list, const struct fabric *fabric,
                     const ekv_options *options, ekv_error *error);
void device_list_close(struct device_list *list, const struct fabric *fabric);

/* Name, fabric, provider, PCI, NUMA node, speed and the fixed behaviour flags. */
void device_describe(const struct fi_info *info, ekv_nic *nic);

#endif
