/* Moves bytes: many operations with one process in one system call, or memcpy within a process. */
#include "objects.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

enum {
    CALL_BYTES = 4 << 20, /* bounds how long the owner of a region waits when it removes it */
    MAX_FRUITLESS_CALLS = 3,
};

/* The operations at the head of a lane that one call moves, and how much of each. */
struct batch {
    struct operation *operations[VISIT_SEGMENTS];
    struct iovec local[VISIT_SEGMENTS];
    int count;
};

struct lane *lane_acquire(struct domain *domain, struct process_identity identity)
{
    for (struct lane *lane = domain->lanes; lane; lane = lane->next)
        if (lane->process->identity.pid == identity.pid &&
            lane->process->identity.start_time == identity.start_time) {
            lane->references++;
            return lane;
        }
    struct remote_process *process = registry_attach(identity);
    struct lane *lane = process ? calloc(1, sizeof *lane) : NULL;
    if (!lane) {
        if (process)
            registry_release(process);
        return NULL;
    }
    lane->process = process;
    lane->visit = visit_claim(process->shared);
    lane->references = 1;
    lane->next = domain->lanes;
    domain->lanes = lane;
    return lane;
}

void lane_release(struct domain *domain, struct lane *lane)
{
    if (--lane->references > 0)
        return;
    struct lane **link = &domain->lanes;
    while (*link != lane)
        link = &(*link)->next;
    *link = lane->next;
    if (lane->visit)
        visit_release(lane->visit);
    registry_release(lane->process);
    free(lane);
}

void lane_append(struct domain *domain, struct lane *lane, struct operation *operation)
{
    enum direction direction = operation->kind == OPERATION_READ ? DIRECTION_READ : DIRECTION_WRITE;
    operation->next = NULL;
    if (lane->first[direction])
        lane->last[direction]->next = operation;
    else
        lane->first[direction] = operation;
    lane->last[direction] = operation;
    if (!lane->is_queued) {
        lane->is_queued = true;
        lane->next_queued = domain->queued_lanes;
        domain->queued_lanes = lane;
    }
}

static const void *local_bytes(const struct operation *operation)
{
    if (operation->is_inline)
        return operation->inline_bytes;
    return (const void *)(uintptr_t)operation->local_address;
}

/* Fills in the segments and only then looks at the keys: see visit_begin. */
static void fill_batch(struct lane *lane, struct operation *first, struct batch *batch)
{
    uint64_t bytes = 0;
    batch->count = 0;
    for (struct operation *operation = first;
         operation && batch->count < VISIT_SEGMENTS && bytes < CALL_BYTES;
         operation = operation->next) {
        uint64_t left = operation->length - operation->moved;
        uint64_t part = left < CALL_BYTES - bytes ? left : CALL_BYTES - bytes;
        struct iovec *remote = &lane->visit->remote[batch->count];
        remote->iov_base = (void *)(uintptr_t)(operation->remote_address + operation->moved);
        remote->iov_len = part;
        batch->local[batch->count].iov_base = (char *)local_bytes(operation) + operation->moved;
        batch->local[batch->count].iov_len = part;
        batch->operations[batch->count++] = operation;
        bytes += part;
    }
    atomic_thread_fence(memory_order_seq_cst);
    for (int i = 0; i < batch->count; i++) {
        const struct operation *operation = batch->operations[i];
        if (region_allows(lane->process->shared, operation->remote_key,
                          operation->peer->remote->domain, operation->remote_address,
                          operation->length,
                          operation->kind == OPERATION_READ ? FI_REMOTE_READ : FI_REMOTE_WRITE))
            continue;
        lane->visit->remote[i].iov_len = 0;
        batch->local[i].iov_len = 0;
    }
}

static ssize_t move_within_process(struct batch *batch, const struct iovec *remote,
                                   enum direction direction)
{
    size_t total = 0;
    for (int i = 0; i < batch->count; i++) {
        size_t length = batch->local[i].iov_len;
        if (length == 0)
            continue;
        /* Source and target of a loop-back operation may overlap. */
        if (direction == DIRECTION_WRITE)
            memmove(remote[i].iov_base, batch->local[i].iov_base, length);
        else
            memmove(batch->local[i].iov_base, remote[i].iov_base, length);
        total += length;
    }
    return (ssize_t)total;
}

static ssize_t move_batch(struct lane *lane, struct batch *batch, enum direction direction)
{
    const struct iovec *remote = lane->visit->remote;
    unsigned long count = (unsigned long)batch->count;
    if (lane->process->is_self)
        return move_within_process(batch, remote, direction);
    pid_t pid = (pid_t)lane->process->identity.pid;
    if (direction == DIRECTION_WRITE)
        return process_vm_writev(pid, batch->local, count, remote, count, 0);
    return process_vm_readv(pid, batch->local, count, remote, count, 0);
}

static struct operation *take_first(struct lane *lane, enum direction direction)
{
    struct operation *first = lane->first[direction];
    lane->first[direction] = first->next;
    return first;
}

static void say_refused_once(void)
{
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&said))
        fprintf(
            stderr,
            "simnic: the kernel refuses process_vm_writev to another process (ptrace rights)\n");
}

/* What a failed call means for the lane. */
static void handle_error(struct lane *lane, enum direction direction, int error)
{
    if (error == ESRCH) {
        atomic_store_explicit(&lane->process->has_exited, true, memory_order_relaxed);
        while (lane->first[direction]) {
            struct operation *operation = take_first(lane, direction);
            engine_fail_later(operation, operation->peer->has_answered
                                             ? PROVIDER_ERROR_UNRESPONSIVE_REMOTE
                                             : PROVIDER_ERROR_UNREACHABLE_REMOTE);
        }
        return;
    }
    if (error == EPERM)
        say_refused_once();
    /* The kernel stops at the first segment that faults, so the first operation is to blame. */
    engine_finish(take_first(lane, direction),
                  error == EFAULT ? PROVIDER_ERROR_REMOTE_BAD_ADDRESS : PROVIDER_ERROR_OTHER);
}

/* Hands back what is finished. True when the lane got shorter or an operation got further. */
static bool account(struct lane *lane, enum direction direction, const struct batch *batch,
                    size_t moved)
{
    bool progress = false;
    for (int i = 0; i < batch->count; i++) {
        struct operation *operation = batch->operations[i];
        size_t part = batch->local[i].iov_len;
        if (part == 0) {
            engine_finish(take_first(lane, direction), PROVIDER_ERROR_REMOTE_BAD_ADDRESS);
            progress = true;
            continue;
        }
        if (moved < part)
            part = moved;
        operation->moved += part;
        moved -= part;
        progress = progress || part > 0;
        if (operation->moved < operation->length)
            break;
        engine_moved(take_first(lane, direction));
    }
    return progress;
}

static void flush_direction(struct lane *lane, enum direction direction)
{
    struct batch batch;
    int fruitless_calls = 0;
    while (lane->first[direction]) {
        if (!lane->visit) {
            engine_finish(take_first(lane, direction), PROVIDER_ERROR_OTHER);
            continue;
        }
        visit_begin(lane->visit);
        fill_batch(lane, lane->first[direction], &batch);
        ssize_t moved = move_batch(lane, &batch, direction);
        int error = errno;
        visit_end(lane->visit);
        if (moved < 0) {
            handle_error(lane, direction, error);
        } else if (account(lane, direction, &batch, (size_t)moved)) {
            fruitless_calls = 0;
        } else if (++fruitless_calls == MAX_FRUITLESS_CALLS) {
            /* Nothing moves although the keys are good: the memory behind them is gone. */
            engine_finish(take_first(lane, direction), PROVIDER_ERROR_REMOTE_BAD_ADDRESS);
            fruitless_calls = 0;
        }
    }
}

void lanes_flush(struct domain *domain)
{
    while (domain->queued_lanes) {
        struct lane *lane = domain->queued_lanes;
        domain->queued_lanes = lane->next_queued;
        lane->is_queued = false;
        /* Finishing the last operation with a peer that was removed would free the lane. */
        lane->references++;
        for (int direction = 0; direction < DIRECTION_COUNT; direction++)
            flush_direction(lane, (enum direction)direction);
        lane_release(domain, lane);
    }
}
