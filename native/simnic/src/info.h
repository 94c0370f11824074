/* Answers fi_getinfo. */
#ifndef SIMNIC_INFO_H
#define SIMNIC_INFO_H

#include "settings.h"

#include <rdma/fabric.h>

#define SIMNIC_VERSION FI_VERSION(999, 0) /* above any built-in provider of the name */

/* Functions of the libfabric that loaded the provider, which knows its own structures. */
struct libfabric {
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    void (*freeinfo)(struct fi_info *info);
};

int info_get(const struct libfabric *libfabric, const struct settings *settings,
             const struct fi_info *hints, struct fi_info **result);

/* The fi_nic of a device; NULL without memory. */
struct fid_nic *nic_info_new(const struct settings *settings, int nic);

#endif
