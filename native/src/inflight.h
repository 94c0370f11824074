/* inflight.h - the operations of one rail that the provider knows about.
 *
 * Slots are reused as late as possible (first in, first out, with twice as many slots
 * as credits), and those that ended in an error rest for a while: some providers
 * complete an operation twice when its peer dies, and the second completion must meet
 * a free slot, not the next tenant.  Owned by the rail's progress thread. */
#ifndef EKV_INFLIGHT_H
#define EKV_INFLIGHT_H

#include <rdma/fabric.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "notice.h"
#include "plan.h"

struct job;
struct peer;
struct region;
struct warm;

enum operation_kind {
    OPERATION_FREE = 0,
    OPERATION_DATA,   /* a stripe of a job */
    OPERATION_FLUSH,  /* the one-byte read behind a job's writes */
    OPERATION_NOTICE, /* a job's notice */
    OPERATION_WARM,   /* the empty message of ekv_peer_warm */
    OPERATION_PUT,    /* a staged stripe, see staging.h; over when it is answered */
    OPERATION_GET,    /* asks for one */
    OPERATION_ANSWER, /* to either; of no job, and holds its peer */
    OPERATION_RECEIVE /* waits for a notice */
};

struct operation {
    struct fi_context2 context; /* the provider's scratch room; must stay first */
    enum operation_kind kind;
    uint32_t nic;      /* the peer's NIC */
    uint32_t version;  /* of that NIC's address */
    uint32_t attempts; /* how often this stripe was posted before */
    bool is_read;
    bool probe; /* begun while the rail was out */
    struct job *job;
    struct peer *peer;
    struct region *region;
    struct warm *warm;
    struct piece piece;
    uint64_t freed_ns; /* when it ended in an error, else 0 */
    struct operation *next;
    struct notice_message *message; /* its own 64 bytes of registered memory */
    uint64_t cookie; /* of a staged stripe, and whether its message has gone and its answer come */
    uint32_t slab;
    int answer;
    bool has_slab;
    bool sent;
    bool answered;
};

struct inflight {
    struct operation *slots;
    size_t count;
    size_t used;
    struct operation *free_first;
    struct operation *free_last;
};

bool inflight_open(struct inflight *inflight, size_t count);
void inflight_close(struct inflight *inflight);

/* NULL: none free. */
struct operation *inflight_take(struct inflight *inflight, uint64_t now_ns);
void inflight_give(struct inflight *inflight, struct operation *operation, uint64_t error_ns);

/* The operation that a completion's context stands for, or NULL if it is not one that
 * is in flight. */
struct operation *inflight_find(const struct inflight *inflight, const void *context);

#endif
