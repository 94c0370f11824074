/* rail.h - one local NIC: its libfabric objects, its credits and its operations.
 *
 * Everything but the counters belongs to the progress thread of the rail's group;
 * `nic` is fixed before other threads can see the rail, except for its flags, and for its
 * address and resets, which change with the engine's nic_lock held. */
#ifndef EKV_RAIL_H
#define EKV_RAIL_H

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "budget.h"
#include "efa_kv.h"
#include "fabric.h"
#include "health.h"
#include "inflight.h"
#include "log.h"
#include "near_process.h"
#include "staging.h"
#include "topology.h"

/* Written by one thread, read by any. */
typedef _Atomic uint64_t counter;

static inline void counter_add(counter *value, uint64_t more)
{
    atomic_store_explicit(value, atomic_load_explicit(value, memory_order_relaxed) + more,
                          memory_order_relaxed);
}

struct rail_counters {
    counter operations_posted;
    counter operations_settled;
    counter operations_failed;
    counter operations_resent;
    counter bytes_written;
    counter bytes_read;
    counter again;
    counter in_flight;
    counter in_flight_peak;
    counter failures;
    counter notices_sent;
    counter notices_received;
    counter notices_dropped;
    counter stray_completions;
    counter progress_wakeups;
    counter operations_near;
    counter bytes_near;
    counter operations_staged;
    counter bytes_staged;
    counter near_refused[NEAR_REFUSALS]; /* on the first rail; written by any thread */
};

/* An entry of the address vector, shared by all peers that name this address. */
struct rail_address {
    uint8_t bytes[EKV_ADDRESS_BYTES];
    uint32_t length;
    uint32_t users;
    fi_addr_t address;
};

struct rail {
    const struct fabric *library;
    struct log *log;
    struct fi_info *info; /* owned */
    uint32_t index;       /* within the engine */
    ekv_nic nic;
    struct place place;
    _Atomic uint32_t flags; /* nic.flags as they are now */

    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *addresses;
    struct fid_cq *completions;
    struct fid_eq *events;
    struct fid_cntr *remote_count; /* operations of peers here, or NULL */
    uint64_t remote_seen;
    struct fid_ep *endpoint;
    int wait_fd; /* -1: this provider cannot wake us */

    struct budget budget;
    uint32_t depth;
    uint32_t in_flight; /* operations that use credit */
    counter settled_ns; /* when one settled last, or the first of them began */
    counter outstanding_bytes;
    counter carried_bytes;
    struct inflight inflight;
    struct health health;

    struct notice_message *messages; /* one per slot, then one for flushes */
    struct fid_mr *messages_mr;
    void *messages_descriptor;
    struct operation **unposted; /* receives the provider had no room for */
    uint32_t unposted_count;
    uint32_t receive_count;
    size_t receive_bytes; /* of each, and the descriptor of where they go */
    void *receive_descriptor;
    struct stage *stage; /* NULL: this rail stages nothing */

    struct rail_address *known;
    uint32_t known_count;
    uint32_t known_capacity;
    bool known_idle; /* some have no users any more, and wait until nothing is in flight */
    bool exhausted;  /* no room for another because of those that cannot be removed */

    struct rail_counters counters;
};

struct rail_options {
    uint32_t index;
    uint32_t max_in_flight; /* 0: the provider's own limit */
    struct cuda *cuda;      /* where GPU memory is to be staged, else NULL */
};

/* Memory to register: of a GPU where device is not -1, and then through a dmabuf descriptor
 * of the memory from dmabuf_base on where dmabuf is not -1. */
struct rail_memory {
    void *address;
    size_t length;
    int device;
    int dmabuf;
    uint64_t dmabuf_base;
};

/* Takes over info. On failure nothing stays open. */
int rail_open(struct rail *rail, const struct fabric *library, struct log *log,
              struct fi_info *info, const struct rail_options *options, ekv_error *error);

/* Whether it carries GPU memory in messages, where there is any: EFA reaches it, or the
 * EFA software is too old, which is said instead. */
bool rail_stages(const struct rail *rail);

/* Held by a progress thread while it calls into a provider whose endpoints of one
 * process reach into each other's memory (shm); closing one waits for all of them. */
bool rail_is_guarded(const struct rail *rail);
void rail_guard_enter(const struct rail *rail);
void rail_guard_leave(const struct rail *rail);

/* Closes the endpoint: from then on none of its operations can move a byte. */
void rail_close_endpoint(struct rail *rail);
void rail_close(struct rail *rail);

/* Whether the rail can get another endpoint under its registered memory. */
bool rail_can_reopen(const struct rail *rail);
/* Opens what rail_close_endpoint closed, with new queues and an empty address vector, and
 * writes the new address to *nic; what was in flight is dead but not settled.  On failure
 * the rail stays without an endpoint, and the call can be repeated. */
int rail_reopen(struct rail *rail, ekv_nic *nic, ekv_error *error);

const char *rail_strerror(const struct rail *rail, int code);

int rail_register(struct rail *rail, const struct rail_memory *memory, uint64_t access,
                  uint64_t key, struct fid_mr **mr);

/* Finds or inserts an address; false: the provider refused it. */
bool rail_address_take(struct rail *rail, const uint8_t *bytes, uint32_t length,
                       fi_addr_t *address);
void rail_address_give(struct rail *rail, fi_addr_t address);
/* The same for an address that operations may still be on their way to: it is removed
 * when nothing is in flight on the rail. */
void rail_address_retire(struct rail *rail, fi_addr_t address);
void rail_address_sweep(struct rail *rail);

/* All three return libfabric's code; -FI_EAGAIN asks to come again. */
ssize_t rail_post_data(struct rail *rail, struct operation *operation, void *descriptor,
                       fi_addr_t to, uint64_t remote_address, uint64_t key);
ssize_t rail_post_message(struct rail *rail, struct operation *operation, fi_addr_t to);
/* Completes once the buffer is free again: whoever gets it answers. */
ssize_t rail_post_buffer(struct rail *rail, struct operation *operation, const void *buffer,
                         size_t length, void *descriptor, fi_addr_t to);
ssize_t rail_post_flush(struct rail *rail, struct operation *operation, fi_addr_t to,
                        uint64_t remote_address, uint64_t key);

/* Posts receives that are waiting for room. */
void rail_post_receives(struct rail *rail);
void rail_receive_again(struct rail *rail, struct operation *operation);

/* The code that a provider's error number stands for. */
int rail_classify(const struct rail *rail, int error, int provider_error);

/* Whether a target has not made this rail known to its own device (yet): EFA then refuses an
 * operation before it does anything. */
bool rail_is_unknown_there(const struct rail *rail, int provider_error);

/* Reports asynchronous events of the device to the log. */
void rail_drain_events(struct rail *rail);

#endif
