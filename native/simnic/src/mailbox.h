/* Messages, and notices of writes with immediate data, on their way into an endpoint. */
#ifndef SIMNIC_MAILBOX_H
#define SIMNIC_MAILBOX_H

#include "shared_state.h"

enum deposit_result {
    DEPOSITED,
    DEPOSIT_LATER, /* no receive posted, no free slot, or another depositor is at it */
};

/* On DEPOSITED ticket is what mailbox_taken asks for. A message needs a posted receive. */
enum deposit_result mailbox_deposit(struct shared_endpoint *endpoint, enum mail_kind kind,
                                    const void *payload, uint64_t length, const uint64_t *data,
                                    const struct simnic_address *source, uint64_t *ticket);

/* True once the owner has taken that mail out. */
bool mailbox_taken(const struct shared_endpoint *endpoint, uint64_t ticket);

/* For the owner: the oldest mail, or NULL; then its removal. */
const struct shared_mail *mailbox_peek(const struct shared_endpoint *endpoint);
void mailbox_pop(struct shared_endpoint *endpoint);

void mailbox_add_credit(struct shared_endpoint *endpoint);
/* False when a message already counts on every posted receive. */
bool mailbox_withdraw_credit(struct shared_endpoint *endpoint);

/* The NICs whose operations an endpoint lets in; only the owner writes. */
void known_peers_add(struct shared_endpoint *endpoint, uint64_t nic_number);
void known_peers_remove(struct shared_endpoint *endpoint, uint64_t nic_number);
/* slot remembers where the number was found, for the next time. */
bool known_peers_contain(const struct shared_endpoint *endpoint, uint64_t nic_number,
                         uint32_t *slot);

#endif
