/* fabric.h - libfabric, found and opened at run time.
 *
 * Only the exported functions are looked up; everything else of libfabric is inline
 * code over tables of the objects themselves.  One struct per engine; the library
 * stays mapped for the life of the process, since its providers have threads and
 * exit handlers of their own.  Read-only once opened. */
#ifndef EKV_FABRIC_H
#define EKV_FABRIC_H

#include <rdma/fabric.h>
#include <stdint.h>

#include "efa_kv.h"

struct fabric {
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
                   const struct fi_info *hints, struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*open)(struct fi_fabric_attr *attributes, struct fid_fabric **fabric, void *context);
    uint32_t (*version_of)(void);
    const char *(*strerror)(int number);
    uint32_t running_version;
    uint32_t api_version; /* what we ask for */
    char path[256];
};

int fabric_open(struct fabric *fabric, const char *libfabric_path, ekv_error *error);

#endif
