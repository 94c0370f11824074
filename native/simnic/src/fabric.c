/* The fabric and its event queue, on which this provider never has anything to report. */
#include "objects.h"

#include <stdlib.h>
#include <string.h>

static int close_plain(struct fid *fid)
{
    free(fid);
    return 0;
}

static struct fi_ops plain_fid_ops = {sizeof plain_fid_ops,
                                      close_plain,
                                      unsupported_bind,
                                      unsupported_control,
                                      unsupported_ops_open,
                                      NULL,
                                      NULL};

static ssize_t event_read(struct fid_eq *queue, uint32_t *event, void *buffer, size_t size,
                          uint64_t flags)
{
    (void)queue;
    (void)event;
    (void)buffer;
    (void)size;
    (void)flags;
    return -FI_EAGAIN;
}

static ssize_t event_read_error(struct fid_eq *queue, struct fi_eq_err_entry *entry, uint64_t flags)
{
    (void)queue;
    (void)entry;
    (void)flags;
    return -FI_EAGAIN;
}

static ssize_t event_write(struct fid_eq *queue, uint32_t event, const void *buffer, size_t size,
                           uint64_t flags)
{
    (void)queue;
    (void)event;
    (void)buffer;
    (void)size;
    (void)flags;
    return -FI_ENOSYS;
}

static ssize_t event_wait(struct fid_eq *queue, uint32_t *event, void *buffer, size_t size,
                          int timeout, uint64_t flags)
{
    (void)timeout;
    return event_read(queue, event, buffer, size, flags);
}

static const char *event_error_text(struct fid_eq *queue, int error, const void *data, char *buffer,
                                    size_t size)
{
    (void)queue;
    (void)error;
    (void)data;
    (void)buffer;
    (void)size;
    return "no event";
}

static struct fi_ops_eq event_ops = {
    .size = sizeof event_ops,
    .read = event_read,
    .readerr = event_read_error,
    .write = event_write,
    .sread = event_wait,
    .strerror = event_error_text,
};

static int event_queue_open(struct fid_fabric *fabric, struct fi_eq_attr *attributes,
                            struct fid_eq **result, void *context)
{
    struct fid_eq *queue = calloc(1, sizeof *queue);
    (void)fabric;
    (void)attributes;
    if (!queue)
        return -FI_ENOMEM;
    queue->fid.fclass = FI_CLASS_EQ;
    queue->fid.context = context;
    queue->fid.ops = &plain_fid_ops;
    queue->ops = &event_ops;
    *result = queue;
    return 0;
}

static int try_wait(struct fid_fabric *fabric, struct fid **fids, int count)
{
    (void)fabric;
    (void)fids;
    (void)count;
    return -FI_ENOSYS;
}

static struct fi_ops_fabric fabric_ops = {
    .size = sizeof fabric_ops,
    .domain = domain_open,
    .eq_open = event_queue_open,
    .trywait = try_wait,
};

int fabric_open(struct fi_fabric_attr *attributes, struct fid_fabric **result, void *context)
{
    struct fabric *fabric = calloc(1, sizeof *fabric);
    if (!fabric)
        return -FI_ENOMEM;
    fabric->is_direct =
        attributes && attributes->name && strcmp(attributes->name, SIMNIC_DIRECT_FABRIC) == 0;
    fabric->fid.fid.fclass = FI_CLASS_FABRIC;
    fabric->fid.fid.context = context;
    fabric->fid.fid.ops = &plain_fid_ops;
    fabric->fid.ops = &fabric_ops;
    *result = &fabric->fid;
    return 0;
}
