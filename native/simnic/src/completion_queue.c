#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_SIZE = 8192 };

static struct completion_queue *from_fid(struct fid_cq *fid)
{
    return (struct completion_queue *)(void *)fid;
}

void completion_queue_push(struct completion_queue *queue, const struct completion *completion)
{
    /* Room was made sure of before the operation began. */
    queue->entries[queue->tail++ & (queue->capacity - 1)] = *completion;
}

/* The four formats begin alike, so each is a prefix of the longest. */
static size_t entry_size(enum fi_cq_format format)
{
    switch (format) {
    case FI_CQ_FORMAT_CONTEXT:
        return sizeof(struct fi_cq_entry);
    case FI_CQ_FORMAT_MSG:
        return sizeof(struct fi_cq_msg_entry);
    case FI_CQ_FORMAT_DATA:
        return sizeof(struct fi_cq_data_entry);
    default:
        return sizeof(struct fi_cq_tagged_entry);
    }
}

static ssize_t copy_entries(struct completion_queue *queue, char *buffer, size_t count,
                            fi_addr_t *sources)
{
    size_t size = entry_size(queue->format), copied = 0;
    while (copied < count && queue->head != queue->tail) {
        const struct completion *completion = &queue->entries[queue->head & (queue->capacity - 1)];
        if (completion->error)
            break;
        struct fi_cq_tagged_entry entry = {
            .op_context = completion->context,
            .flags = completion->flags,
            .len = completion->length,
            .data = completion->data,
        };
        memcpy(buffer + copied * size, &entry, size);
        if (sources)
            sources[copied] = completion->source;
        queue->head++;
        copied++;
    }
    if (copied)
        return (ssize_t)copied;
    return queue->head == queue->tail ? -FI_EAGAIN : -FI_EAVAIL;
}

static ssize_t read_from(struct fid_cq *fid, void *buffer, size_t count, fi_addr_t *sources)
{
    struct completion_queue *queue = from_fid(fid);
    domain_enter(queue->domain);
    /* A call for nothing still makes progress. */
    if (queue->tail - queue->head < count || count == 0)
        engine_progress(queue->domain);
    ssize_t result = copy_entries(queue, buffer, count, sources);
    domain_leave(queue->domain);
    return result;
}

static ssize_t read_entries(struct fid_cq *fid, void *buffer, size_t count)
{
    return read_from(fid, buffer, count, NULL);
}

static ssize_t read_error(struct fid_cq *fid, struct fi_cq_err_entry *entry, uint64_t flags)
{
    struct completion_queue *queue = from_fid(fid);
    ssize_t result = -FI_EAGAIN;
    (void)flags;
    domain_enter(queue->domain);
    const struct completion *completion = &queue->entries[queue->head & (queue->capacity - 1)];
    if (queue->head != queue->tail && completion->error) {
        /* The caller's structure may be longer than the one known here: only known fields are set.
         */
        entry->op_context = completion->context;
        entry->flags = completion->flags;
        entry->len = completion->length;
        entry->buf = NULL;
        entry->data = completion->data;
        entry->tag = 0;
        entry->olen = 0;
        entry->err = completion->fabric_error;
        entry->prov_errno = completion->error;
        entry->err_data = NULL;
        entry->err_data_size = 0;
        queue->head++;
        result = 1;
    }
    domain_leave(queue->domain);
    return result;
}

static ssize_t wait_and_read(struct fid_cq *fid, void *buffer, size_t count, const void *condition,
                             int timeout)
{
    (void)fid;
    (void)buffer;
    (void)count;
    (void)condition;
    (void)timeout;
    return -FI_ENOSYS;
}

static ssize_t wait_and_read_from(struct fid_cq *fid, void *buffer, size_t count,
                                  fi_addr_t *sources, const void *condition, int timeout)
{
    (void)sources;
    return wait_and_read(fid, buffer, count, condition, timeout);
}

static int signal_waiters(struct fid_cq *fid)
{
    (void)fid;
    return -FI_ENOSYS;
}

static const char *error_text(struct fid_cq *fid, int provider_error, const void *data,
                              char *buffer, size_t size)
{
    const char *text = provider_error_text(provider_error);
    (void)fid;
    (void)data;
    if (buffer && size)
        snprintf(buffer, size, "%s", text);
    return text;
}

static struct fi_ops_cq queue_ops = {
    .size = sizeof queue_ops,
    .read = read_entries,
    .readfrom = read_from,
    .readerr = read_error,
    .sread = wait_and_read,
    .sreadfrom = wait_and_read_from,
    .signal = signal_waiters,
    .strerror = error_text,
};

static int close_queue(struct fid *fid)
{
    struct completion_queue *queue = from_fid((struct fid_cq *)(void *)fid);
    struct domain *domain = queue->domain;
    domain_enter(domain);
    for (struct endpoint *endpoint = domain->endpoints; endpoint;
         endpoint = endpoint->next_in_domain)
        if (endpoint->send_queue == queue || endpoint->receive_queue == queue) {
            domain_leave(domain);
            return -FI_EBUSY;
        }
    domain->users--;
    domain_leave(domain);
    free(queue->entries);
    free(queue);
    return 0;
}

static struct fi_ops fid_ops = {
    sizeof fid_ops, close_queue, unsupported_bind, unsupported_control, unsupported_ops_open,
    NULL,           NULL};

int completion_queue_open(struct fid_domain *fid, struct fi_cq_attr *attributes,
                          struct fid_cq **result, void *context)
{
    struct domain *domain = (struct domain *)(void *)fid;
    size_t size = attributes && attributes->size ? attributes->size : DEFAULT_SIZE;
    if (attributes && attributes->wait_obj != FI_WAIT_NONE)
        return -FI_ENOSYS;
    struct completion_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return -FI_ENOMEM;
    queue->capacity = 64;
    while (queue->capacity < size)
        queue->capacity *= 2;
    queue->entries = calloc(queue->capacity, sizeof *queue->entries);
    if (!queue->entries) {
        free(queue);
        return -FI_ENOMEM;
    }
    queue->domain = domain;
    queue->format = attributes && attributes->format ? attributes->format : FI_CQ_FORMAT_CONTEXT;
    queue->fid.fid.fclass = FI_CLASS_CQ;
    queue->fid.fid.context = context;
    queue->fid.fid.ops = &fid_ops;
    queue->fid.ops = &queue_ops;
    if (attributes)
        attributes->size = queue->capacity;
    domain_enter(domain);
    domain->users++;
    domain_leave(domain);
    *result = &queue->fid;
    return 0;
}
