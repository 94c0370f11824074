/* post.h - what posting a stripe and posting a message with bytes share; see post.c. */
#ifndef EKV_POST_H
#define EKV_POST_H

#include "choice.h"
#include "engine.h"

/* One stripe on its way to the provider. */
struct aim {
    struct rail *rail;
    uint32_t nic;
    fi_addr_t address;
    struct region *region;
    const struct remote_region *remote;
    void *descriptor;
    uint64_t remote_address;
    uint64_t key;
    struct piece piece;
};

enum turn {
    TURN_POSTED,
    TURN_AGAIN,   /* this rail is full for this peer in this round; another may not be */
    TURN_BLOCKED, /* nothing can be posted in this round */
    TURN_OVER     /* nothing is left to post at this stage */
};

/* A slot for what goes to an aim's rail and NIC, or NULL. */
struct operation *aim_operation(struct job *job, const struct aim *aim, enum operation_kind kind,
                                uint64_t now_ns);
/* What came of handing an operation to the provider; where it was refused the slot is given
 * back.  With job->lock held. */
enum turn operation_posted(struct group *group, struct job *job, const struct aim *aim,
                           struct operation *operation, ssize_t answer);

/* Whether a stripe between these regions has to be staged. */
bool aim_is_staged(const struct aim *aim);
/* Posts (the first part of) a staged stripe and shortens aim->piece to what went. */
enum turn aim_post_staged(struct group *group, struct job *job, struct aim *aim, uint32_t attempts,
                          uint64_t now_ns);

#endif
