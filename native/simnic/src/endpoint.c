#include "objects.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { PROTOCOL_OPTION_LEVEL = FI_OPT_ENDPOINT };

static struct endpoint *from_fid(struct fid *fid)
{
    return (struct endpoint *)(void *)fid;
}

/* Numbers count up over the life of the process, so that one is not soon met again. */
static struct shared_endpoint *create_shared(uint16_t *queue_pair)
{
    static _Atomic uint32_t next_queue_pair;
    for (int tries = 0; tries < 65536; tries++) {
        *queue_pair = (uint16_t)atomic_fetch_add(&next_queue_pair, 1);
        struct shared_endpoint *created = registry_create_endpoint(*queue_pair);
        if (created)
            return created;
    }
    return NULL;
}

static void set_address(struct endpoint *endpoint, uint16_t queue_pair)
{
    struct simnic_address *address = &endpoint->address;
    struct domain *domain = endpoint->domain;
    uint64_t host = registry_host_number();
    memset(address, 0, sizeof *address);
    address->gid[0] = 0xfe;
    address->gid[1] = 0x80;
    memcpy(address->gid + 8, &host, 7);
    address->gid[8] |= 2; /* so that address_nic_number tells any two apart */
    address->gid[15] = (uint8_t)(domain->nic_index + 1);
    address->queue_pair = queue_pair;
    address->nic = (uint16_t)domain->nic_index;
    if (getrandom(&address->queue_key, sizeof address->queue_key, 0) != sizeof address->queue_key)
        address->queue_key = (uint32_t)domain_random(domain);
    address->queue_key |= 1;
    address->process = address_process(registry_self_identity());
}

static bool allocate_queues(struct endpoint *endpoint)
{
    endpoint->operations = calloc(endpoint->send_size, sizeof *endpoint->operations);
    endpoint->receives = calloc(endpoint->receive_size, sizeof *endpoint->receives);
    if (!endpoint->operations || !endpoint->receives)
        return false;
    for (size_t i = endpoint->send_size; i-- > 0;) {
        endpoint->operations[i].next = endpoint->free_operations;
        endpoint->free_operations = &endpoint->operations[i];
    }
    uint64_t operations = endpoint->send_size;
    for (struct endpoint *other = endpoint->domain->endpoints; other; other = other->next_in_domain)
        operations += other == endpoint ? 0 : other->send_size;
    return engine_reserve(endpoint->domain, operations);
}

static int enable(struct endpoint *endpoint)
{
    uint16_t queue_pair;
    if (endpoint->shared)
        return 0;
    if (!endpoint->address_vector)
        return -FI_ENOAV;
    if (!endpoint->send_queue || !endpoint->receive_queue)
        return -FI_ENOCQ;
    if (!endpoint->operations && !allocate_queues(endpoint))
        return -FI_ENOMEM;
    struct shared_endpoint *created = create_shared(&queue_pair);
    if (!created)
        return -FI_ENOMEM;
    set_address(endpoint, queue_pair);
    created->domain = endpoint->domain->number;
    endpoint->shared = created;
    address_vector_publish(endpoint->address_vector, endpoint);
    atomic_store(&created->queue_key, endpoint->address.queue_key);
    return 0;
}

static int control(struct fid *fid, int command, void *argument)
{
    struct endpoint *endpoint = from_fid(fid);
    (void)argument;
    if (command != FI_ENABLE)
        return -FI_ENOSYS;
    domain_enter(endpoint->domain);
    int result = enable(endpoint);
    domain_leave(endpoint->domain);
    return result;
}

static int bind_queue(struct endpoint *endpoint, struct completion_queue *queue, uint64_t flags)
{
    if (queue->domain != endpoint->domain || !(flags & (FI_TRANSMIT | FI_RECV)))
        return -FI_EINVAL;
    if (flags & FI_TRANSMIT) {
        endpoint->send_queue = queue;
        endpoint->selective_send = (flags & FI_SELECTIVE_COMPLETION) != 0;
    }
    if (flags & FI_RECV) {
        endpoint->receive_queue = queue;
        endpoint->selective_receive = (flags & FI_SELECTIVE_COMPLETION) != 0;
    }
    return 0;
}

static int bind_vector(struct endpoint *endpoint, struct address_vector *vector)
{
    if (vector->domain != endpoint->domain || endpoint->address_vector)
        return -FI_EINVAL;
    endpoint->address_vector = vector;
    endpoint->next_in_address_vector = vector->endpoints;
    vector->endpoints = endpoint;
    return 0;
}

static int bind(struct fid *fid, struct fid *other, uint64_t flags)
{
    struct endpoint *endpoint = from_fid(fid);
    int result = -FI_EINVAL;
    domain_enter(endpoint->domain);
    if (endpoint->shared)
        result = -FI_EOPBADSTATE;
    else if (other->fclass == FI_CLASS_AV)
        result = bind_vector(endpoint, (struct address_vector *)(void *)other);
    else if (other->fclass == FI_CLASS_CQ)
        result = bind_queue(endpoint, (struct completion_queue *)(void *)other, flags);
    else if (other->fclass == FI_CLASS_EQ)
        result = 0;
    domain_leave(endpoint->domain);
    return result;
}

static void unlink_endpoint(struct endpoint *endpoint)
{
    struct endpoint **link = &endpoint->domain->endpoints;
    while (*link != endpoint)
        link = &(*link)->next_in_domain;
    *link = endpoint->next_in_domain;
    if (!endpoint->address_vector)
        return;
    link = &endpoint->address_vector->endpoints;
    while (*link != endpoint)
        link = &(*link)->next_in_address_vector;
    *link = endpoint->next_in_address_vector;
}

static int close_endpoint(struct fid *fid)
{
    struct endpoint *endpoint = from_fid(fid);
    struct domain *domain = endpoint->domain;
    domain_enter(domain);
    if (endpoint->shared) {
        /* From here on peers are refused; what was on its way out is dropped without completions.
         */
        atomic_store(&endpoint->shared->queue_key, 0);
        engine_drop_endpoint(domain, endpoint);
        registry_remove_endpoint(endpoint->shared, endpoint->address.queue_pair);
    }
    unlink_endpoint(endpoint);
    domain->users--;
    domain_leave(domain);
    free(endpoint->operations);
    free(endpoint->receives);
    free(endpoint);
    return 0;
}

static struct fi_ops fid_ops = {sizeof fid_ops,       close_endpoint, bind, control,
                                unsupported_ops_open, NULL,           NULL};

static int get_name(fid_t fid, void *address, size_t *size)
{
    struct endpoint *endpoint = from_fid(fid);
    size_t room = *size;
    *size = sizeof endpoint->address;
    if (!endpoint->shared)
        return -FI_EOPBADSTATE;
    memcpy(address, &endpoint->address,
           room < sizeof endpoint->address ? room : sizeof endpoint->address);
    return room < sizeof endpoint->address ? -FI_ETOOSMALL : 0;
}

static struct fi_ops_cm management_ops = {.size = sizeof management_ops, .getname = get_name};

/* Cancels a posted receive that no message counts on yet. */
static ssize_t cancel_alone(struct endpoint *endpoint, const void *context)
{
    uint64_t found = endpoint->receive_head;
    while (found < endpoint->receive_tail &&
           endpoint->receives[found % endpoint->receive_size].context != context)
        found++;
    if (found == endpoint->receive_tail || !endpoint->shared)
        return -FI_ENOENT;
    if (!completion_queue_has_room(endpoint->receive_queue))
        return -FI_EAGAIN;
    if (!mailbox_withdraw_credit(endpoint->shared))
        return -FI_ENOENT;
    struct completion completion = {
        .context = endpoint->receives[found % endpoint->receive_size].context,
        .flags = FI_MSG | FI_RECV,
        .source = FI_ADDR_NOTAVAIL,
        .error = PROVIDER_ERROR_FLUSHED,
        .fabric_error = FI_ECANCELED,
    };
    for (uint64_t i = found; i + 1 < endpoint->receive_tail; i++)
        endpoint->receives[i % endpoint->receive_size] =
            endpoint->receives[(i + 1) % endpoint->receive_size];
    endpoint->receive_tail--;
    completion_queue_push(endpoint->receive_queue, &completion);
    return 0;
}

static ssize_t cancel(fid_t fid, void *context)
{
    struct endpoint *endpoint = from_fid(fid);
    domain_enter(endpoint->domain);
    ssize_t result = cancel_alone(endpoint, context);
    domain_leave(endpoint->domain);
    return result;
}

static int get_option(fid_t fid, int level, int option, void *value, size_t *size)
{
    (void)fid;
    (void)level;
    (void)option;
    (void)value;
    (void)size;
    return -FI_ENOPROTOOPT;
}

/* Options steer how a real device works; there is nothing to steer here, but callers that set them
 * must be able to. */
static int set_option(fid_t fid, int level, int option, const void *value, size_t size)
{
    (void)fid;
    (void)option;
    (void)value;
    (void)size;
    return level == PROTOCOL_OPTION_LEVEL ? 0 : -FI_ENOPROTOOPT;
}

static struct fi_ops_ep endpoint_ops = {
    .size = sizeof endpoint_ops,
    .cancel = cancel,
    .getopt = get_option,
    .setopt = set_option,
};

int endpoint_open(struct fid_domain *fid, struct fi_info *info, struct fid_ep **result,
                  void *context)
{
    struct domain *domain = (struct domain *)(void *)fid;
    const struct settings *settings = domain->settings;
    int count = 0;
    if (info->ep_attr && info->ep_attr->type != FI_EP_RDM)
        return -FI_EINVAL;
    struct endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (!endpoint)
        return -FI_ENOMEM;
    endpoint->domain = domain;
    endpoint->send_size =
        info->tx_attr && info->tx_attr->size ? info->tx_attr->size : settings->transmit_queue_size;
    endpoint->receive_size =
        info->rx_attr && info->rx_attr->size ? info->rx_attr->size : settings->receive_queue_size;
    endpoint->default_flags =
        info->tx_attr ? info->tx_attr->op_flags & (FI_COMPLETION | FI_DELIVERY_COMPLETE) : 0;
    endpoint->is_direct = domain->is_direct;
    endpoint->fid.fid.fclass = FI_CLASS_EP;
    endpoint->fid.fid.context = context;
    endpoint->fid.fid.ops = &fid_ops;
    endpoint->fid.ops = &endpoint_ops;
    endpoint->fid.cm = &management_ops;
    endpoint->fid.msg = &message_ops;
    endpoint->fid.rma = &rma_ops;
    domain_enter(domain);
    for (struct endpoint *other = domain->endpoints; other; other = other->next_in_domain)
        count++;
    if (count >= SIMNIC_MAX_ENDPOINTS) {
        domain_leave(domain);
        free(endpoint);
        return -FI_ENOMEM;
    }
    endpoint->next_in_domain = domain->endpoints;
    domain->endpoints = endpoint;
    domain->users++;
    domain_leave(domain);
    *result = &endpoint->fid;
    return 0;
}
