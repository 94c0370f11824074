#include "mailbox.h"

#include <errno.h>
#include <string.h>

enum { SLOT_EMPTY = 0, SLOT_REMOVED = 1 };

/* A lock that is taken means waiting for the next turn: its holder may be stopped. One whose holder
 * was killed is safe to inherit, since a deposit becomes visible only with its last store. */
static bool try_lock(struct shared_endpoint *endpoint)
{
    int result = pthread_mutex_trylock(&endpoint->mutex);
    if (result == EOWNERDEAD)
        result = pthread_mutex_consistent(&endpoint->mutex);
    return result == 0;
}

enum deposit_result mailbox_deposit(struct shared_endpoint *endpoint, enum mail_kind kind,
                                    const void *payload, uint64_t length, const uint64_t *data,
                                    const struct simnic_address *source, uint64_t *ticket)
{
    if (!try_lock(endpoint))
        return DEPOSIT_LATER;
    uint64_t tail = atomic_load(&endpoint->tail);
    if (tail - atomic_load(&endpoint->head) >= MAILBOX_SLOTS ||
        (kind == MAIL_MESSAGE && !mailbox_withdraw_credit(endpoint))) {
        pthread_mutex_unlock(&endpoint->mutex);
        return DEPOSIT_LATER;
    }
    struct shared_mail *mail = &endpoint->slots[tail % MAILBOX_SLOTS];
    mail->kind = kind;
    mail->has_data = data != NULL;
    mail->data = data ? *data : 0;
    mail->length = length;
    mail->source = *source;
    if (kind == MAIL_MESSAGE && length)
        memcpy(mail->payload, payload, length);
    *ticket = tail;
    atomic_store(&endpoint->tail, tail + 1);
    pthread_mutex_unlock(&endpoint->mutex);
    return DEPOSITED;
}

bool mailbox_taken(const struct shared_endpoint *endpoint, uint64_t ticket)
{
    return atomic_load(&endpoint->head) > ticket;
}

const struct shared_mail *mailbox_peek(const struct shared_endpoint *endpoint)
{
    uint64_t head = atomic_load_explicit(&endpoint->head, memory_order_relaxed);
    if (atomic_load_explicit(&endpoint->tail, memory_order_acquire) == head)
        return NULL;
    return &endpoint->slots[head % MAILBOX_SLOTS];
}

void mailbox_pop(struct shared_endpoint *endpoint)
{
    atomic_fetch_add(&endpoint->head, 1);
}

void mailbox_add_credit(struct shared_endpoint *endpoint)
{
    atomic_fetch_add(&endpoint->receive_credits, 1);
}

bool mailbox_withdraw_credit(struct shared_endpoint *endpoint)
{
    int64_t credits = atomic_load(&endpoint->receive_credits);
    while (credits > 0)
        if (atomic_compare_exchange_weak(&endpoint->receive_credits, &credits, credits - 1))
            return true;
    return false;
}

static uint32_t first_slot(uint64_t nic_number)
{
    return (uint32_t)((nic_number * 0x9e3779b97f4a7c15u) >> 40) % KNOWN_PEER_CAPACITY;
}

static bool find_slot(const struct shared_endpoint *endpoint, uint64_t nic_number, uint32_t *slot)
{
    for (uint32_t i = 0, at = first_slot(nic_number); i < KNOWN_PEER_CAPACITY; i++) {
        uint64_t content = atomic_load(&endpoint->known_peers[at]);
        if (content == nic_number) {
            *slot = at;
            return true;
        }
        if (content == SLOT_EMPTY)
            return false;
        at = (at + 1) % KNOWN_PEER_CAPACITY;
    }
    return false;
}

void known_peers_add(struct shared_endpoint *endpoint, uint64_t nic_number)
{
    uint32_t at;
    if (find_slot(endpoint, nic_number, &at))
        return;
    at = first_slot(nic_number);
    for (uint32_t i = 0; i < KNOWN_PEER_CAPACITY; i++) {
        if (atomic_load(&endpoint->known_peers[at]) <= SLOT_REMOVED) {
            atomic_store(&endpoint->known_peers[at], nic_number);
            return;
        }
        at = (at + 1) % KNOWN_PEER_CAPACITY;
    }
}

void known_peers_remove(struct shared_endpoint *endpoint, uint64_t nic_number)
{
    uint32_t slot;
    if (find_slot(endpoint, nic_number, &slot))
        atomic_store(&endpoint->known_peers[slot], SLOT_REMOVED);
}

bool known_peers_contain(const struct shared_endpoint *endpoint, uint64_t nic_number,
                         uint32_t *slot)
{
    if (atomic_load_explicit(&endpoint->known_peers[*slot], memory_order_relaxed) == nic_number)
        return true;
    return find_slot(endpoint, nic_number, slot);
}
