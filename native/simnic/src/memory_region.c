#include "objects.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Since libfabric 1.20; a registration of device memory names it by a file descriptor. */
#define FLAG_DMABUF (1ull << 40)

struct dmabuf_range {
    int file;
    uint64_t offset;
    size_t length;
    void *base;
};

struct memory_region {
    struct fid_mr fid;
    struct domain *domain;
    uint64_t length;
    uint32_t key;
};

enum { RESIDENCY_PAGES = 65536 };

static const uint64_t ALL_ACCESS =
    FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

static int close_region(struct fid *fid)
{
    struct memory_region *region = (struct memory_region *)(void *)fid;
    struct domain *domain = region->domain;
    /* Waits for others who move bytes; they never wait for this domain. */
    region_remove(region->key);
    domain_enter(domain);
    domain->registered_bytes -= region->length;
    domain->users--;
    domain_leave(domain);
    free(region);
    return 0;
}

static struct fi_ops fid_ops = {
    sizeof fid_ops, close_region, unsupported_bind, unsupported_control, unsupported_ops_open,
    NULL,           NULL};

/* FI_MR_ALLOCATED: a device pins the pages, so they must be there. */
static bool is_mapped(uint64_t address, uint64_t length)
{
    static _Thread_local unsigned char residency[RESIDENCY_PAGES];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t end = address + length;
    for (uint64_t at = address & ~(page - 1); at < end;) {
        uint64_t part = end - at < RESIDENCY_PAGES * page ? end - at : RESIDENCY_PAGES * page;
        if (mincore((void *)(uintptr_t)at, part, residency) != 0)
            return false;
        at += part;
    }
    return true;
}

static bool within_limits(const struct domain *domain, uint64_t length)
{
    const struct settings *settings = domain->settings;
    if (settings->max_region_bytes && length > settings->max_region_bytes)
        return false;
    return !settings->max_registered_bytes ||
           domain->registered_bytes + length <= settings->max_registered_bytes;
}

static int add_region(struct domain *domain, uint64_t address, uint64_t length, uint64_t access,
                      bool is_device, struct fid_mr **result, void *context)
{
    if (length == 0 || address + length < address || access & ~ALL_ACCESS)
        return -FI_EINVAL;
    if (!is_device && !is_mapped(address, length))
        return -FI_EFAULT;
    struct memory_region *region = calloc(1, sizeof *region);
    if (!region)
        return -FI_ENOMEM;
    domain_enter(domain);
    if (within_limits(domain, length))
        region->key = region_add(domain->number, address, length, access ? access : ALL_ACCESS);
    if (region->key) {
        domain->registered_bytes += length;
        domain->users++;
    }
    domain_leave(domain);
    if (!region->key) {
        free(region);
        return -FI_ENOMEM;
    }
    region->domain = domain;
    region->length = length;
    region->fid.fid.fclass = FI_CLASS_MR;
    region->fid.fid.context = context;
    region->fid.fid.ops = &fid_ops;
    region->fid.key = region->key;
    /* The descriptor is the local key, so that one used after the region was closed is caught. */
    region->fid.mem_desc = (void *)(uintptr_t)region->key;
    *result = &region->fid;
    return 0;
}

static int register_memory(struct fid *fid, const void *buffer, size_t length, uint64_t access,
                           uint64_t offset, uint64_t requested_key, uint64_t flags,
                           struct fid_mr **result, void *context)
{
    (void)offset;
    (void)requested_key;
    (void)flags;
    return add_region((struct domain *)(void *)fid, (uintptr_t)buffer, length, access, false,
                      result, context);
}

static int register_vector(struct fid *fid, const struct iovec *segments, size_t count,
                           uint64_t access, uint64_t offset, uint64_t requested_key, uint64_t flags,
                           struct fid_mr **result, void *context)
{
    if (count != 1)
        return -FI_EINVAL;
    return register_memory(fid, segments->iov_base, segments->iov_len, access, offset,
                           requested_key, flags, result, context);
}

static int register_attributes(struct fid *fid, const struct fi_mr_attr *attributes, uint64_t flags,
                               struct fid_mr **result)
{
    struct domain *domain = (struct domain *)(void *)fid;
    bool is_device = attributes->iface != FI_HMEM_SYSTEM;
    if ((is_device || flags & FLAG_DMABUF) && !domain->settings->device_memory)
        return -FI_EOPNOTSUPP;
    if (attributes->iov_count != 1)
        return -FI_EINVAL;
    if (flags & FLAG_DMABUF) {
        const struct dmabuf_range *range = (const void *)attributes->mr_iov;
        return add_region(domain, (uintptr_t)range->base + range->offset, range->length,
                          attributes->access, true, result, attributes->context);
    }
    return add_region(domain, (uintptr_t)attributes->mr_iov->iov_base, attributes->mr_iov->iov_len,
                      attributes->access, is_device, result, attributes->context);
}

struct fi_ops_mr memory_region_ops = {
    .size = sizeof memory_region_ops,
    .reg = register_memory,
    .regv = register_vector,
    .regattr = register_attributes,
};
