/* What the NIC does with posted operations. It runs inside fi_cq_read, in batches, and never makes
 * a system call for a single operation. */
#include "objects.h"

#include <stdlib.h>
#include <string.h>

enum {
    BATCH_OPERATIONS = 512,
    BATCH_BYTES = 4 << 20,  /* keeps one call of fi_cq_read short */
    BATCH_MAILS = 64,       /* per endpoint */
    LIVENESS_INTERVAL = 64, /* operations between two looks at whether the target still runs */
};

bool engine_reserve(struct domain *domain, uint64_t operation_count)
{
    uint64_t capacity = domain->ready_capacity ? domain->ready_capacity : 64;
    while (capacity < operation_count)
        capacity *= 2;
    if (!due_queue_reserve(&domain->due, capacity))
        return false;
    if (capacity == domain->ready_capacity)
        return true;
    struct operation **larger = calloc(capacity, sizeof *larger);
    if (!larger)
        return false;
    uint64_t count = domain->ready_tail - domain->ready_head;
    for (uint64_t i = 0; i < count; i++)
        larger[i] = domain->ready[(domain->ready_head + i) & (domain->ready_capacity - 1)];
    free(domain->ready);
    domain->ready = larger;
    domain->ready_capacity = capacity;
    domain->ready_head = 0;
    domain->ready_tail = count;
    return true;
}

static struct operation **ready_slot(struct domain *domain, uint64_t position)
{
    return &domain->ready[position & (domain->ready_capacity - 1)];
}

static void make_ready(struct domain *domain, struct operation *operation)
{
    *ready_slot(domain, domain->ready_tail++) = operation;
}

void engine_submit(struct domain *domain, struct operation *operation)
{
    if (operation->due_ns)
        due_queue_push(&domain->due, operation);
    else
        make_ready(domain, operation);
}

static struct operation *pick_ready(struct domain *domain)
{
    uint64_t window = domain->ready_tail - domain->ready_head;
    struct operation **first = ready_slot(domain, domain->ready_head);
    if (window > domain->settings->reorder_window)
        window = domain->settings->reorder_window;
    if (window > 1) {
        uint64_t chosen = ((domain_random(domain) >> 32) * window) >> 32;
        struct operation **other = ready_slot(domain, domain->ready_head + chosen);
        struct operation *kept = *first;
        *first = *other;
        *other = kept;
    }
    domain->ready_head++;
    return *first;
}

static uint64_t completion_flags(const struct operation *operation)
{
    if (operation->kind == OPERATION_SEND)
        return FI_MSG | FI_SEND;
    return FI_RMA | (operation->kind == OPERATION_READ ? FI_READ : FI_WRITE);
}

/* Gives the operation back to its endpoint. */
static void recycle(struct operation *operation)
{
    struct endpoint *endpoint = operation->endpoint;
    if (operation->has_room)
        endpoint->send_queue->reserved--;
    peer_release(endpoint->domain, operation->peer);
    endpoint->outstanding--;
    operation->next = endpoint->free_operations;
    endpoint->free_operations = operation;
}

void engine_finish(struct operation *operation, int status)
{
    struct endpoint *endpoint = operation->endpoint;
    struct domain *domain = endpoint->domain;
    if (status) {
        domain->operations_failed++;
    } else {
        operation->peer->has_answered = true;
        domain->operations_done++;
        domain->bytes_done += operation->length;
    }
    if (status || operation->wants_completion) {
        struct completion completion = {
            .context = operation->context,
            .flags = completion_flags(operation),
            .length = operation->length,
            .source = FI_ADDR_NOTAVAIL,
            .error = status,
            .fabric_error = provider_error_to_fabric(status),
        };
        completion_queue_push(endpoint->send_queue, &completion);
    }
    recycle(operation);
}

void engine_fail_later(struct operation *operation, int status)
{
    struct domain *domain = operation->endpoint->domain;
    operation->status = status;
    operation->due_ns = clock_ns() + (uint64_t)(domain->settings->unresponsive_ms * 1e6);
    due_queue_push(&domain->due, operation);
}

static void wait_for_target(struct operation *operation)
{
    struct domain *domain = operation->endpoint->domain;
    operation->next = NULL;
    if (domain->waiting)
        domain->waiting_last->next = operation;
    else
        domain->waiting = operation;
    domain->waiting_last = operation;
}

static void deposit(struct operation *operation)
{
    struct peer *peer = operation->peer;
    bool is_message = operation->kind == OPERATION_SEND;
    const void *payload = operation->is_inline ? operation->inline_bytes
                                               : (void *)(uintptr_t)operation->local_address;
    if (!operation->is_deposited) {
        if (mailbox_deposit(peer->remote, is_message ? MAIL_MESSAGE : MAIL_WRITE_DATA, payload,
                            operation->length, operation->has_data ? &operation->data : NULL,
                            &operation->endpoint->address, &operation->ticket) != DEPOSITED) {
            wait_for_target(operation);
            return;
        }
        operation->is_deposited = true;
    }
    /* A message is delivered when the receiver has it, not when it lies in the mailbox. */
    if (is_message && operation->wants_delivery && !mailbox_taken(peer->remote, operation->ticket))
        wait_for_target(operation);
    else
        engine_finish(operation, PROVIDER_ERROR_NONE);
}

void engine_moved(struct operation *operation)
{
    operation->moved = operation->length;
    if (operation->has_data)
        deposit(operation);
    else
        engine_finish(operation, PROVIDER_ERROR_NONE);
}

static int silence_error(const struct peer *peer)
{
    return peer->has_answered ? PROVIDER_ERROR_UNRESPONSIVE_REMOTE
                              : PROVIDER_ERROR_UNREACHABLE_REMOTE;
}

/* Memory-to-memory part of an operation whose target answers. */
static void execute_rma(struct domain *domain, struct operation *operation)
{
    struct peer *peer = operation->peer;
    bool is_read = operation->kind == OPERATION_READ;
    if (domain->settings->mutual_addresses &&
        !known_peers_contain(peer->remote, address_nic_number(&operation->endpoint->address),
                             &peer->known_slot)) {
        engine_finish(operation, PROVIDER_ERROR_UNKNOWN_PEER);
    } else if (operation->moved == operation->length) {
        engine_moved(operation);
    } else if (!operation->is_inline &&
               !region_allows(domain->self, operation->local_key, domain->number,
                              operation->local_address, operation->length,
                              is_read ? FI_READ : FI_WRITE)) {
        engine_finish(operation, PROVIDER_ERROR_INVALID_LOCAL_KEY);
    } else if (!domain->settings->no_copy) {
        lane_append(domain, peer->lane, operation);
    } else if (region_allows(peer->lane->process->shared, operation->remote_key,
                             peer->remote->domain, operation->remote_address, operation->length,
                             is_read ? FI_REMOTE_READ : FI_REMOTE_WRITE)) {
        engine_moved(operation);
    } else {
        engine_finish(operation, PROVIDER_ERROR_REMOTE_BAD_ADDRESS);
    }
}

static bool target_has_exited(struct domain *domain, const struct operation *operation)
{
    struct remote_process *process = operation->peer->lane->process;
    if (atomic_load_explicit(&process->has_exited, memory_order_relaxed))
        return true;
    /* Copying notices by itself, so of the operations that come to it only a few ask. */
    if (operation->kind != OPERATION_SEND && operation->moved == 0 &&
        domain->ready_head % LIVENESS_INTERVAL != 0)
        return false;
    return registry_has_exited(process);
}

static void execute(struct domain *domain, struct operation *operation,
                    enum nic_fault_kind local_health)
{
    struct peer *peer = operation->peer;
    if (operation->status) {
        engine_finish(operation, operation->status);
        return;
    }
    /* What was received stays received, though the receiver may have gone since. */
    if (operation->is_deposited && mailbox_taken(peer->remote, operation->ticket)) {
        engine_finish(operation, PROVIDER_ERROR_NONE);
        return;
    }
    if (local_health == NIC_DEAD) {
        engine_finish(operation, PROVIDER_ERROR_FLUSHED);
        return;
    }
    if (peer->is_removed) {
        engine_finish(operation, PROVIDER_ERROR_INVALID_ADDRESS_HANDLE);
        return;
    }
    if (local_health == NIC_VANISHED || !peer_connect(domain, peer) ||
        target_has_exited(domain, operation)) {
        engine_fail_later(operation, silence_error(peer));
        return;
    }
    enum nic_fault_kind remote_health = nic_health(&peer->lane->process->nics[peer->address.nic]);
    if (remote_health == NIC_STALLED)
        wait_for_target(operation);
    else if (remote_health != NIC_HEALTHY)
        engine_fail_later(operation, silence_error(peer));
    else if (atomic_load_explicit(&peer->remote->queue_key, memory_order_acquire) !=
             peer->address.queue_key)
        engine_finish(operation, PROVIDER_ERROR_REMOTE_BAD_QUEUE_PAIR);
    else if (operation->kind == OPERATION_SEND)
        deposit(operation);
    else
        execute_rma(domain, operation);
}

static bool keep_room(struct operation *operation)
{
    struct completion_queue *queue = operation->endpoint->send_queue;
    if (operation->has_room)
        return true;
    if (!completion_queue_has_room(queue))
        return false;
    queue->reserved++;
    operation->has_room = true;
    return true;
}

static void run_ready(struct domain *domain, enum nic_fault_kind health)
{
    uint64_t bytes = 0;
    for (int i = 0;
         i < BATCH_OPERATIONS && bytes < BATCH_BYTES && domain->ready_head != domain->ready_tail;
         i++) {
        struct operation *operation = pick_ready(domain);
        if (!keep_room(operation)) {
            *ready_slot(domain, --domain->ready_head) = operation;
            break;
        }
        bytes += operation->length;
        execute(domain, operation, health);
    }
    if (domain->queued_lanes)
        lanes_flush(domain);
}

static void retry_waiting(struct domain *domain, enum nic_fault_kind health)
{
    struct operation *operation = domain->waiting, *next;
    domain->waiting = NULL;
    for (; operation; operation = next) {
        next = operation->next;
        execute(domain, operation, health);
    }
}

static void receive_mail(struct endpoint *endpoint, const struct shared_mail *mail)
{
    struct completion completion = {
        .flags = FI_RMA | FI_REMOTE_WRITE,
        .length = mail->length,
        .data = mail->data,
        .source = address_vector_find(endpoint->address_vector, &mail->source),
    };
    bool wants_completion = true;
    if (mail->kind == MAIL_MESSAGE) {
        uint64_t slot = endpoint->receive_head++ % endpoint->receive_size;
        const struct posted_receive *receive = &endpoint->receives[slot];
        completion.context = receive->context;
        completion.flags = FI_MSG | FI_RECV;
        wants_completion = !endpoint->selective_receive;
        if (mail->length > receive->length) {
            completion.error = PROVIDER_ERROR_RECEIVER_TOO_SHORT;
            completion.fabric_error = FI_ETRUNC;
            completion.length = receive->length;
        }
        if (completion.length)
            memcpy(receive->buffer, mail->payload, completion.length);
    }
    if (mail->has_data)
        completion.flags |= FI_REMOTE_CQ_DATA;
    if (wants_completion || completion.error)
        completion_queue_push(endpoint->receive_queue, &completion);
}

static void receive(struct endpoint *endpoint)
{
    for (int i = 0; i < BATCH_MAILS && endpoint->shared && endpoint->receive_queue; i++) {
        const struct shared_mail *mail = mailbox_peek(endpoint->shared);
        if (!mail || !completion_queue_has_room(endpoint->receive_queue))
            return;
        receive_mail(endpoint, mail);
        mailbox_pop(endpoint->shared);
    }
}

void engine_progress(struct domain *domain)
{
    enum nic_fault_kind health = nic_health(domain->nic);
    if (health == NIC_STALLED)
        return;
    if (domain->due.count) {
        uint64_t now = clock_ns();
        for (struct operation *due; (due = due_queue_pop(&domain->due, now));)
            make_ready(domain, due);
    }
    if (domain->waiting)
        retry_waiting(domain, health);
    if (domain->ready_head != domain->ready_tail || domain->queued_lanes)
        run_ready(domain, health);
    if (health != NIC_HEALTHY)
        return;
    for (struct endpoint *endpoint = domain->endpoints; endpoint;
         endpoint = endpoint->next_in_domain)
        receive(endpoint);
}

void engine_drop_endpoint(struct domain *domain, struct endpoint *endpoint)
{
    uint64_t kept = domain->ready_head;
    for (uint64_t i = domain->ready_head; i < domain->ready_tail; i++) {
        struct operation *operation = *ready_slot(domain, i);
        if (operation->endpoint == endpoint)
            recycle(operation);
        else
            *ready_slot(domain, kept++) = operation;
    }
    domain->ready_tail = kept;
    for (struct operation *due; (due = due_queue_take(&domain->due, endpoint));)
        recycle(due);
    struct operation *operation = domain->waiting, *next;
    domain->waiting = NULL;
    for (; operation; operation = next) {
        next = operation->next;
        if (operation->endpoint == endpoint)
            recycle(operation);
        else
            wait_for_target(operation);
    }
}
