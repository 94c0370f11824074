/* rail_post.c - handing operations to the provider, and reading its errors; see
 * rail.h. */
#include <assert.h>
#include <errno.h>
#include <rdma/fi_errno.h>
#include <string.h>

#include "rail.h"

/* Completion status of the EFA device, as its provider reports it in prov_errno. */
enum efa_status {
    EFA_FLUSHED = 1,
    EFA_QUEUE_PAIR_FAILED = 2,
    EFA_REMOTE_BAD_ADDRESS = 7,
    EFA_REMOTE_ABORT = 8,
    EFA_REMOTE_BAD_DESTINATION = 9,
    EFA_UNRESPONSIVE_REMOTE = 13,
    EFA_UNKNOWN_PEER = 14,
    EFA_UNREACHABLE_REMOTE = 15
};

/* The semantics are asked for on every operation: the native TCP provider forgets the
 * endpoint's default flags on the connections behind it, and then completes a write
 * when the kernel has taken it (seen with libfabric 1.17). */
static uint64_t rail_flags(const struct rail *rail)
{
    return FI_COMPLETION | (rail->nic.flags & EKV_NIC_DELIVERY_COMPLETE ? FI_DELIVERY_COMPLETE : 0);
}

ssize_t rail_post_data(struct rail *rail, struct operation *operation, void *descriptor,
                       fi_addr_t to, uint64_t remote_address, uint64_t key)
{
    struct iovec local = {.iov_base = (void *)(uintptr_t)operation->piece.local,
                          .iov_len = operation->piece.length};
    struct fi_rma_iov remote = {.addr = remote_address, .len = operation->piece.length, .key = key};
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &descriptor,
                                 .iov_count = 1,
                                 .addr = to,
                                 .rma_iov = &remote,
                                 .rma_iov_count = 1,
                                 .context = &operation->context};

    if (operation->is_read)
        return fi_readmsg(rail->endpoint, &message, FI_COMPLETION);
    return fi_writemsg(rail->endpoint, &message, rail_flags(rail));
}

static ssize_t rail_send(struct rail *rail, struct operation *operation, const void *buffer,
                         size_t length, void *descriptor, fi_addr_t to, uint64_t flags)
{
    struct iovec local = {.iov_base = (void *)(uintptr_t)buffer, .iov_len = length};
    struct fi_msg message = {.msg_iov = &local,
                             .desc = &descriptor,
                             .iov_count = 1,
                             .addr = to,
                             .context = &operation->context};

    return fi_sendmsg(rail->endpoint, &message, flags);
}

ssize_t rail_post_message(struct rail *rail, struct operation *operation, fi_addr_t to)
{
    return rail_send(rail, operation, operation->message, sizeof *operation->message,
                     rail->messages_descriptor, to, rail_flags(rail));
}

ssize_t rail_post_buffer(struct rail *rail, struct operation *operation, const void *buffer,
                         size_t length, void *descriptor, fi_addr_t to)
{
    return rail_send(rail, operation, buffer, length, descriptor, to, FI_COMPLETION);
}

ssize_t rail_post_flush(struct rail *rail, struct operation *operation, fi_addr_t to,
                        uint64_t remote_address, uint64_t key)
{
    return fi_read(rail->endpoint, operation->message, 1, rail->messages_descriptor, to,
                   remote_address, key, &operation->context);
}

static ssize_t rail_post_receive(struct rail *rail, struct operation *operation)
{
    return fi_recv(rail->endpoint, operation->message, rail->receive_bytes,
                   rail->receive_descriptor, FI_ADDR_UNSPEC, &operation->context);
}

void rail_post_receives(struct rail *rail)
{
    while (rail->unposted_count > 0) {
        ssize_t answer = rail_post_receive(rail, rail->unposted[rail->unposted_count - 1]);

        if (answer != 0)
            return; /* kept; the next round tries again */
        rail->unposted_count--;
    }
}

void rail_receive_again(struct rail *rail, struct operation *operation)
{
    assert(operation->kind == OPERATION_RECEIVE && rail->unposted_count < rail->receive_count);
    rail->unposted[rail->unposted_count++] = operation;
    rail_post_receives(rail);
}

static int rail_classify_efa(int provider_error)
{
    switch (provider_error) {
    case EFA_FLUSHED:
    case EFA_QUEUE_PAIR_FAILED:
        return EKV_ERAIL; /* our own device or queue pair */
    case EFA_REMOTE_BAD_ADDRESS:
        return EKV_EACCESS;
    case EFA_REMOTE_ABORT:
    case EFA_REMOTE_BAD_DESTINATION:
    case EFA_UNRESPONSIVE_REMOTE:
    case EFA_UNKNOWN_PEER:
    case EFA_UNREACHABLE_REMOTE:
        return EKV_EPEER;
    default:
        return EKV_OK;
    }
}

bool rail_is_unknown_there(const struct rail *rail, int provider_error)
{
    return strncmp(rail->nic.provider, "efa", 3) == 0 &&
           (provider_error == EFA_UNKNOWN_PEER || provider_error == -EFA_UNKNOWN_PEER);
}

int rail_classify(const struct rail *rail, int error, int provider_error)
{
    if (strncmp(rail->nic.provider, "efa", 3) == 0) {
        int code = rail_classify_efa(provider_error < 0 ? -provider_error : provider_error);

        if (code != EKV_OK)
            return code;
    }
    switch (error < 0 ? -error : error) {
    case EACCES:
    case EPERM:
    case EKEYREJECTED:
    case ENOKEY:
    case EFAULT:
        return EKV_EACCESS;
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case ENOTCONN:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ESHUTDOWN:
    case ECANCELED:
    case ETIMEDOUT:
    case EPIPE:
    case EIO:
    case ESRCH:
        return EKV_EPEER;
    case ENETDOWN:
    case ENODEV:
        return EKV_ERAIL;
    default:
        return EKV_EPROVIDER;
    }
}

void rail_drain_events(struct rail *rail)
{
    struct fi_eq_err_entry error;
    uint8_t room[256];
    uint32_t event;
    ssize_t answer;

    if (!rail->events)
        return;
    answer = fi_eq_read(rail->events, &event, room, sizeof room, 0);
    if (answer != -FI_EAVAIL)
        return;
    memset(&error, 0, sizeof error);
    if (fi_eq_readerr(rail->events, &error, 0) > 0)
        log_write(rail->log, LOG_ERROR, "rail %u (%s): the device reports %s", rail->index,
                  rail->nic.name, rail_strerror(rail, error.err));
}
