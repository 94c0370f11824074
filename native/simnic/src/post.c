/* fi_write, fi_read, fi_send, fi_recv and their relatives. */
#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct post_request {
    enum operation_kind kind;
    const void *buffer;
    size_t length;
    void *descriptor;
    fi_addr_t target;
    uint64_t remote_address;
    uint64_t remote_key;
    uint64_t data;
    uint64_t flags; /* FI_REMOTE_CQ_DATA, FI_INJECT, FI_COMPLETION, FI_DELIVERY_COMPLETE */
    bool is_silent; /* the inject calls complete nothing */
    void *context;
};

static const uint64_t KNOWN_FLAGS = FI_REMOTE_CQ_DATA | FI_INJECT | FI_COMPLETION |
                                    FI_DELIVERY_COMPLETE | FI_TRANSMIT_COMPLETE |
                                    FI_INJECT_COMPLETE | FI_MORE;

static uint32_t descriptor_key(const void *descriptor)
{
    return (uint32_t)(uintptr_t)descriptor;
}

static bool descriptor_covers(const struct domain *domain, const void *descriptor,
                              const void *buffer, size_t length, uint64_t access)
{
    return length == 0 || region_allows(domain->self, descriptor_key(descriptor), domain->number,
                                        (uintptr_t)buffer, length, access);
}

/* What can be told without the target; a real device checks the same in its driver. */
static ssize_t check(const struct endpoint *endpoint, const struct post_request *request)
{
    static const uint64_t local_access[] = {
        [OPERATION_WRITE] = FI_WRITE, [OPERATION_READ] = FI_READ, [OPERATION_SEND] = FI_SEND};
    if (!endpoint->shared)
        return -FI_EOPBADSTATE;
    if (request->length >
        (request->kind == OPERATION_SEND ? MESSAGE_MAX_BYTES : SIMNIC_MAX_RMA_BYTES))
        return -FI_EMSGSIZE;
    if (request->flags & ~KNOWN_FLAGS)
        return -FI_EOPNOTSUPP;
    if (request->flags & FI_INJECT)
        return request->length > SIMNIC_INJECT_BYTES || request->kind == OPERATION_READ ? -FI_EINVAL
                                                                                        : 0;
    if (!descriptor_covers(endpoint->domain, request->descriptor, request->buffer, request->length,
                           local_access[request->kind]))
        return -FI_EINVAL;
    return 0;
}

static void fill(struct operation *operation, struct endpoint *endpoint, struct peer *peer,
                 const struct post_request *request)
{
    operation->endpoint = endpoint;
    operation->peer = peer;
    operation->context = request->context;
    operation->local_address = (uintptr_t)request->buffer;
    operation->remote_address = request->remote_address;
    operation->length = request->length;
    operation->moved = 0;
    operation->data = request->data & UINT32_MAX; /* EFA carries four bytes */
    operation->due_ns = 0;
    operation->local_key = descriptor_key(request->descriptor);
    operation->remote_key = (uint32_t)request->remote_key;
    operation->status = request->remote_key > UINT32_MAX ? PROVIDER_ERROR_REMOTE_BAD_ADDRESS : 0;
    operation->kind = (uint8_t)request->kind;
    operation->has_data = (request->flags & FI_REMOTE_CQ_DATA) != 0;
    operation->wants_completion =
        !request->is_silent && (!endpoint->selective_send || request->flags & FI_COMPLETION);
    operation->is_inline = (request->flags & FI_INJECT) != 0;
    operation->wants_delivery = (request->flags & FI_DELIVERY_COMPLETE) != 0;
    operation->is_deposited = false;
    operation->has_room = false;
    if (operation->is_inline && request->length)
        memcpy(operation->inline_bytes, request->buffer, request->length);
}

/* The faults that belong to this very operation. */
static void apply_faults(struct domain *domain, struct operation *operation)
{
    const struct nic_faults *faults = domain->faults;
    uint64_t count;
    nic_count_operation(domain->nic, faults, &count);
    if (count == faults->error_at_op || domain_chance(domain, faults->error_rate))
        operation->status = (int)faults->error_code;
}

/* Line time is booked when the operation is posted: the NIC would begin at once. */
static void book_line(struct domain *domain, struct operation *operation)
{
    struct peer *peer = operation->peer;
    struct shared_nic *target = NULL;
    double latency_us = domain->settings->latency_us;
    if (peer_connect(domain, peer))
        target = &peer->lane->process->nics[peer->address.nic];
    if (nic_is_paced(domain->nic, target, latency_us))
        operation->due_ns = nic_book(domain->nic, target, operation->kind == OPERATION_READ,
                                     operation->length, latency_us, clock_ns());
}

static ssize_t post_alone(struct endpoint *endpoint, const struct post_request *request)
{
    struct domain *domain = endpoint->domain;
    ssize_t result = check(endpoint, request);
    if (result)
        return result;
    struct peer *peer = address_vector_peer(endpoint->address_vector, request->target);
    if (!peer)
        return -FI_EINVAL;
    if (endpoint->outstanding >= endpoint->send_size ||
        domain_chance(domain, domain->faults->eagain))
        return -FI_EAGAIN;
    struct operation *operation = endpoint->free_operations;
    endpoint->free_operations = operation->next;
    endpoint->outstanding++;
    peer->references++;
    fill(operation, endpoint, peer, request);
    if (domain->counts_operations)
        apply_faults(domain, operation);
    if (nic_health(domain->nic) == NIC_DEAD)
        operation->status = PROVIDER_ERROR_QUEUE_PAIR_INTERNAL;
    if (!operation->status)
        book_line(domain, operation);
    /* In this mode the context belongs to the provider until the completion. Callers that give it
     * less room than a struct fi_context2 should notice. */
    if (endpoint->is_direct && request->context)
        memset(request->context, 0xa5, sizeof(struct fi_context2));
    engine_submit(domain, operation);
    return 0;
}

static ssize_t post(struct fid_ep *fid, const struct post_request *request)
{
    struct endpoint *endpoint = (struct endpoint *)(void *)fid;
    struct domain *domain = endpoint->domain;
    if (domain->checks_posters && atomic_exchange(&endpoint->posting, 1)) {
        fprintf(stderr, "simnic: two threads post to one endpoint of %s at once\n",
                domain->settings->device_names[domain->nic_index]);
        abort();
    }
    domain_enter(domain);
    ssize_t result = post_alone(endpoint, request);
    domain_leave(domain);
    if (domain->checks_posters)
        atomic_store(&endpoint->posting, 0);
    return result;
}

static uint64_t default_flags(struct fid_ep *fid)
{
    return ((struct endpoint *)(void *)fid)->default_flags;
}

static ssize_t write_one(struct fid_ep *fid, const void *buffer, size_t length, void *descriptor,
                         fi_addr_t target, uint64_t address, uint64_t key, void *context)
{
    struct post_request request = {OPERATION_WRITE, buffer, length, descriptor,         target,
                                   address,         key,    0,      default_flags(fid), false,
                                   context};
    return post(fid, &request);
}

static ssize_t write_with_data(struct fid_ep *fid, const void *buffer, size_t length,
                               void *descriptor, uint64_t data, fi_addr_t target, uint64_t address,
                               uint64_t key, void *context)
{
    struct post_request request = {OPERATION_WRITE,
                                   buffer,
                                   length,
                                   descriptor,
                                   target,
                                   address,
                                   key,
                                   data,
                                   default_flags(fid) | FI_REMOTE_CQ_DATA,
                                   false,
                                   context};
    return post(fid, &request);
}

static ssize_t write_inline(struct fid_ep *fid, const void *buffer, size_t length, fi_addr_t target,
                            uint64_t address, uint64_t key)
{
    struct post_request request = {OPERATION_WRITE, buffer, length, NULL, target, address, key, 0,
                                   FI_INJECT,       true,   NULL};
    return post(fid, &request);
}

static ssize_t write_inline_with_data(struct fid_ep *fid, const void *buffer, size_t length,
                                      uint64_t data, fi_addr_t target, uint64_t address,
                                      uint64_t key)
{
    struct post_request request = {OPERATION_WRITE,
                                   buffer,
                                   length,
                                   NULL,
                                   target,
                                   address,
                                   key,
                                   data,
                                   FI_INJECT | FI_REMOTE_CQ_DATA,
                                   true,
                                   NULL};
    return post(fid, &request);
}

static ssize_t read_one(struct fid_ep *fid, void *buffer, size_t length, void *descriptor,
                        fi_addr_t target, uint64_t address, uint64_t key, void *context)
{
    struct post_request request = {OPERATION_READ,
                                   buffer,
                                   length,
                                   descriptor,
                                   target,
                                   address,
                                   key,
                                   0,
                                   default_flags(fid) & ~FI_INJECT,
                                   false,
                                   context};
    return post(fid, &request);
}

static ssize_t post_rma_message(struct fid_ep *fid, enum operation_kind kind,
                                const struct fi_msg_rma *message, uint64_t flags)
{
    if (message->iov_count > 1 || message->rma_iov_count != 1)
        return -FI_EINVAL;
    struct post_request request = {
        .kind = kind,
        .target = message->addr,
        .remote_address = message->rma_iov->addr,
        .remote_key = message->rma_iov->key,
        .data = message->data,
        .flags = flags,
        .context = message->context,
    };
    if (message->iov_count) {
        request.buffer = message->msg_iov->iov_base;
        request.length = message->msg_iov->iov_len;
        request.descriptor = message->desc ? message->desc[0] : NULL;
    }
    if (message->rma_iov->len != request.length)
        return -FI_EINVAL;
    return post(fid, &request);
}

static ssize_t write_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags)
{
    return post_rma_message(fid, OPERATION_WRITE, message, flags);
}

static ssize_t read_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags)
{
    return post_rma_message(fid, OPERATION_READ, message, flags);
}

static ssize_t write_vector(struct fid_ep *fid, const struct iovec *segments, void **descriptors,
                            size_t count, fi_addr_t target, uint64_t address, uint64_t key,
                            void *context)
{
    if (count != 1)
        return -FI_EINVAL;
    return write_one(fid, segments->iov_base, segments->iov_len,
                     descriptors ? descriptors[0] : NULL, target, address, key, context);
}

static ssize_t read_vector(struct fid_ep *fid, const struct iovec *segments, void **descriptors,
                           size_t count, fi_addr_t target, uint64_t address, uint64_t key,
                           void *context)
{
    if (count != 1)
        return -FI_EINVAL;
    return read_one(fid, segments->iov_base, segments->iov_len, descriptors ? descriptors[0] : NULL,
                    target, address, key, context);
}

struct fi_ops_rma rma_ops = {
    .size = sizeof rma_ops,
    .read = read_one,
    .readv = read_vector,
    .readmsg = read_message,
    .write = write_one,
    .writev = write_vector,
    .writemsg = write_message,
    .inject = write_inline,
    .writedata = write_with_data,
    .injectdata = write_inline_with_data,
};

static ssize_t send_one(struct fid_ep *fid, const void *buffer, size_t length, void *descriptor,
                        fi_addr_t target, void *context)
{
    struct post_request request = {OPERATION_SEND,     buffer, length, descriptor, target, 0, 0, 0,
                                   default_flags(fid), false,  context};
    return post(fid, &request);
}

static ssize_t send_with_data(struct fid_ep *fid, const void *buffer, size_t length,
                              void *descriptor, uint64_t data, fi_addr_t target, void *context)
{
    struct post_request request = {OPERATION_SEND,
                                   buffer,
                                   length,
                                   descriptor,
                                   target,
                                   0,
                                   0,
                                   data,
                                   default_flags(fid) | FI_REMOTE_CQ_DATA,
                                   false,
                                   context};
    return post(fid, &request);
}

static ssize_t send_inline(struct fid_ep *fid, const void *buffer, size_t length, fi_addr_t target)
{
    struct post_request request = {OPERATION_SEND, buffer, length, NULL, target, 0, 0, 0,
                                   FI_INJECT,      true,   NULL};
    return post(fid, &request);
}

static ssize_t send_inline_with_data(struct fid_ep *fid, const void *buffer, size_t length,
                                     uint64_t data, fi_addr_t target)
{
    struct post_request request = {
        OPERATION_SEND, buffer, length, NULL, target, 0, 0, data, FI_INJECT | FI_REMOTE_CQ_DATA,
        true,           NULL};
    return post(fid, &request);
}

static ssize_t send_vector(struct fid_ep *fid, const struct iovec *segments, void **descriptors,
                           size_t count, fi_addr_t target, void *context)
{
    if (count != 1)
        return -FI_EINVAL;
    return send_one(fid, segments->iov_base, segments->iov_len, descriptors ? descriptors[0] : NULL,
                    target, context);
}

static ssize_t send_message(struct fid_ep *fid, const struct fi_msg *message, uint64_t flags)
{
    if (message->iov_count > 1)
        return -FI_EINVAL;
    struct post_request request = {
        .kind = OPERATION_SEND,
        .target = message->addr,
        .data = message->data,
        .flags = flags,
        .context = message->context,
    };
    if (message->iov_count) {
        request.buffer = message->msg_iov->iov_base;
        request.length = message->msg_iov->iov_len;
        request.descriptor = message->desc ? message->desc[0] : NULL;
    }
    return post(fid, &request);
}

static ssize_t receive_one(struct fid_ep *fid, void *buffer, size_t length, void *descriptor,
                           fi_addr_t source, void *context)
{
    struct endpoint *endpoint = (struct endpoint *)(void *)fid;
    ssize_t result = 0;
    (void)source;
    domain_enter(endpoint->domain);
    if (!endpoint->shared)
        result = -FI_EOPBADSTATE;
    else if (!descriptor_covers(endpoint->domain, descriptor, buffer, length, FI_RECV))
        result = -FI_EINVAL;
    else if (endpoint->receive_tail - endpoint->receive_head >= endpoint->receive_size)
        result = -FI_EAGAIN;
    if (result == 0) {
        uint64_t slot = endpoint->receive_tail++ % endpoint->receive_size;
        endpoint->receives[slot] = (struct posted_receive){buffer, context, length};
        if (endpoint->is_direct && context)
            memset(context, 0xa5, sizeof(struct fi_context2));
        mailbox_add_credit(endpoint->shared);
    }
    domain_leave(endpoint->domain);
    return result;
}

static ssize_t receive_vector(struct fid_ep *fid, const struct iovec *segments, void **descriptors,
                              size_t count, fi_addr_t source, void *context)
{
    if (count != 1)
        return -FI_EINVAL;
    return receive_one(fid, segments->iov_base, segments->iov_len,
                       descriptors ? descriptors[0] : NULL, source, context);
}

static ssize_t receive_message(struct fid_ep *fid, const struct fi_msg *message, uint64_t flags)
{
    if (flags & ~KNOWN_FLAGS)
        return -FI_EOPNOTSUPP;
    return receive_vector(fid, message->msg_iov, message->desc, message->iov_count, message->addr,
                          message->context);
}

struct fi_ops_msg message_ops = {
    .size = sizeof message_ops,
    .recv = receive_one,
    .recvv = receive_vector,
    .recvmsg = receive_message,
    .send = send_one,
    .sendv = send_vector,
    .sendmsg = send_message,
    .inject = send_inline,
    .senddata = send_with_data,
    .injectdata = send_inline_with_data,
};
