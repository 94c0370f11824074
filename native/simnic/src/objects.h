/* The libfabric objects of the provider and what they share. */
#ifndef SIMNIC_OBJECTS_H
#define SIMNIC_OBJECTS_H

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "due_queue.h"
#include "mailbox.h"
#include "nic.h"
#include "number_map.h"
#include "provider_error.h"
#include "region_table.h"

#define SIMNIC_INJECT_BYTES 32
#define SIMNIC_MAX_RMA_BYTES (1ull << 30)
#define SIMNIC_MAX_ENDPOINTS 256 /* per NIC and process */
#define SIMNIC_DIRECT_FABRIC "efa-direct"

struct fabric {
    struct fid_fabric fid;
    bool is_direct;
};

enum operation_kind { OPERATION_WRITE, OPERATION_READ, OPERATION_SEND };

/* One posted operation, from the post to its completion. */
struct operation {
    struct operation *next;
    struct endpoint *endpoint;
    struct peer *peer;
    void *context;
    uint64_t local_address;
    uint64_t remote_address;
    uint64_t length;
    uint64_t moved;
    uint64_t data;
    uint64_t due_ns;
    uint64_t ticket; /* of the mail that carries it */
    uint32_t local_key;
    uint32_t remote_key;
    int status; /* provider error it will end with */
    uint8_t kind;
    bool has_data;
    bool wants_completion;
    bool is_inline;
    bool wants_delivery;
    bool is_deposited;
    bool has_room; /* a place in the completion queue is kept for it */
    uint8_t inline_bytes[SIMNIC_INJECT_BYTES];
};

/* All traffic of a domain with one process: operations waiting to be moved in one system call. */
enum direction { DIRECTION_WRITE, DIRECTION_READ, DIRECTION_COUNT };

struct lane {
    struct lane *next;
    struct lane *next_queued;
    struct remote_process *process;
    struct shared_visit *visit;
    struct operation *first[DIRECTION_COUNT];
    struct operation *last[DIRECTION_COUNT];
    unsigned references;
    bool is_queued;
};

/* One address in an address vector. */
struct peer {
    struct simnic_address address;
    uint64_t nic_number;
    struct lane *lane; /* NULL until the first operation */
    struct shared_endpoint *remote;
    unsigned references; /* operations under way */
    uint32_t known_slot;
    bool is_removed;
    bool has_answered;
};

struct address_vector {
    struct fid_av fid;
    struct domain *domain;
    struct peer **peers;
    size_t peer_count; /* length of the array; holes are NULL */
    size_t peer_capacity;
    struct number_map index_of_address;
    struct number_map uses_of_nic;
    struct endpoint *endpoints;
};

struct completion {
    void *context;
    uint64_t flags;
    uint64_t length;
    uint64_t data;
    fi_addr_t source;
    int error; /* provider code */
    int fabric_error;
};

struct completion_queue {
    struct fid_cq fid;
    struct domain *domain;
    struct completion *entries;
    uint64_t head;
    uint64_t tail;
    uint64_t reserved;
    uint64_t capacity; /* a power of two */
    enum fi_cq_format format;
};

struct posted_receive {
    void *buffer;
    void *context;
    size_t length;
};

struct endpoint {
    struct fid_ep fid;
    struct domain *domain;
    struct address_vector *address_vector;
    struct completion_queue *send_queue;
    struct completion_queue *receive_queue;
    struct operation *operations;
    struct operation *free_operations;
    size_t send_size;
    size_t outstanding;
    struct posted_receive *receives;
    size_t receive_size;
    uint64_t receive_head;
    uint64_t receive_tail;
    struct shared_endpoint *shared; /* NULL until enabled */
    struct simnic_address address;
    uint64_t default_flags;
    bool selective_send;
    bool selective_receive;
    bool is_direct;
    _Atomic int posting;
    struct endpoint *next_in_domain;
    struct endpoint *next_in_address_vector;
};

struct domain {
    struct fid_domain fid;
    const struct settings *settings;
    const struct nic_faults *faults;
    struct shared_process *self;
    struct shared_nic *nic;
    int nic_index;
    uint32_t number; /* of the domain within the process; regions belong to it */
    bool is_direct;
    bool is_locked;
    bool checks_threads;
    bool checks_posters;
    bool counts_operations;
    pthread_mutex_t mutex;
    _Atomic int inside;
    struct endpoint *endpoints;
    struct lane *lanes;
    struct lane *queued_lanes;
    struct operation **ready; /* ring */
    uint64_t ready_head;
    uint64_t ready_tail;
    uint64_t ready_capacity; /* a power of two */
    struct due_queue due;
    struct operation *waiting; /* for the target: a receive, a slot, a healthy NIC */
    struct operation *waiting_last;
    uint64_t random_state;
    uint64_t registered_bytes;
    unsigned users; /* objects that hold the domain open */
    uint64_t operations_done;
    uint64_t operations_failed;
    uint64_t bytes_done;
};

/* Serialises what the application must serialise, or locks where it asked for thread safety. */
void domain_enter_contended(struct domain *domain);

static inline void domain_enter(struct domain *domain)
{
    if (domain->is_locked)
        pthread_mutex_lock(&domain->mutex);
    else if (domain->checks_threads &&
             atomic_exchange_explicit(&domain->inside, 1, memory_order_acquire))
        domain_enter_contended(domain);
}

static inline void domain_leave(struct domain *domain)
{
    if (domain->is_locked)
        pthread_mutex_unlock(&domain->mutex);
    else if (domain->checks_threads)
        atomic_store_explicit(&domain->inside, 0, memory_order_release);
}

/* xorshift64* */
static inline uint64_t domain_random(struct domain *domain)
{
    uint64_t x = domain->random_state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    domain->random_state = x;
    return x * 2685821657736338717u;
}

static inline bool domain_chance(struct domain *domain, double probability)
{
    return probability > 0 && (double)(domain_random(domain) >> 11) * 0x1p-53 < probability;
}

/* fi_ops entries for what an object does not do. */
int unsupported_bind(struct fid *fid, struct fid *other, uint64_t flags);
int unsupported_control(struct fid *fid, int command, void *argument);
int unsupported_ops_open(struct fid *fid, const char *name, uint64_t flags, void **ops,
                         void *context);

int fabric_open(struct fi_fabric_attr *attributes, struct fid_fabric **fabric, void *context);
int domain_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain,
                void *context);
int address_vector_open(struct fid_domain *domain, struct fi_av_attr *attributes,
                        struct fid_av **result, void *context);
int completion_queue_open(struct fid_domain *domain, struct fi_cq_attr *attributes,
                          struct fid_cq **result, void *context);
int endpoint_open(struct fid_domain *domain, struct fi_info *info, struct fid_ep **result,
                  void *context);
extern struct fi_ops_mr memory_region_ops;
extern struct fi_ops_msg message_ops;
extern struct fi_ops_rma rma_ops;

/* address_vector.c */
struct peer *address_vector_peer(struct address_vector *vector, fi_addr_t address);
fi_addr_t address_vector_find(const struct address_vector *vector,
                              const struct simnic_address *address);
void address_vector_publish(struct address_vector *vector, struct endpoint *endpoint);
void peer_release(struct domain *domain, struct peer *peer);
/* Finds the process and endpoint behind an address; false when they are not there. */
bool peer_connect(struct domain *domain, struct peer *peer);

/* completion_queue.c */
static inline bool completion_queue_has_room(const struct completion_queue *queue)
{
    return queue->tail - queue->head + queue->reserved < queue->capacity;
}
void completion_queue_push(struct completion_queue *queue, const struct completion *completion);

/* engine.c */
void engine_progress(struct domain *domain);
void engine_submit(struct domain *domain, struct operation *operation);
bool engine_reserve(struct domain *domain, uint64_t operation_count);
void engine_drop_endpoint(struct domain *domain, struct endpoint *endpoint);
void engine_finish(struct operation *operation, int status);
void engine_moved(struct operation *operation);
void engine_fail_later(struct operation *operation, int status);

/* lane.c */
struct lane *lane_acquire(struct domain *domain, struct process_identity identity);
void lane_release(struct domain *domain, struct lane *lane);
void lane_append(struct domain *domain, struct lane *lane, struct operation *operation);
void lanes_flush(struct domain *domain);

#endif
