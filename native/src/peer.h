/* peer.h - the engines we may write to: their NICs, the path from each of our rails,
 * and where their memory is.
 *
 * The table is guarded by its `lock`, a peer's regions by the peer's own; paths and
 * in-flight numbers of a rail belong to that rail's progress thread. */
#ifndef EKV_PEER_H
#define EKV_PEER_H

#include <pthread.h>
#include <rdma/fabric.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "efa_kv.h"
#include "range.h"

struct neighbour;
struct rail;

enum path_state { PATH_UNKNOWN = 0, PATH_READY, PATH_FAILED };

/* From one of our rails to one of the peer's NICs. */
struct path {
    fi_addr_t address;
    enum path_state state;
    bool usable; /* both NICs are on the same fabric */
    bool inserted;
    uint32_t version;  /* of the NIC's address, when it was inserted */
    uint32_t failures; /* in a row */
    uint64_t retry_ns; /* not used before, unless nothing else is left */
};

/* How a rail stood with a peer when its group last looked, for the other groups. */
enum standing { STANDING_READY = 0, STANDING_FULL, STANDING_OUT };

/* What one rail knows about a peer. */
struct peer_rail {
    struct path *paths;   /* one per NIC */
    _Atomic int standing; /* written by the rail's group, read by all */
    bool compatible;      /* some NIC of the peer is on this rail's fabric */
    uint32_t in_flight;
    uint64_t settled_ns;  /* last time something of this peer settled here */
    uint64_t again_round; /* round of the group in which the provider was full for it */
    uint64_t again_ns;    /* since when it was, with nothing in flight; 0: it is not */
};

struct remote_key {
    uint64_t key;
    uint64_t base;
    uint64_t offset_bytes;
    uint64_t length_bytes;
};

/* A region of the peer; keys are sorted by NIC, then by offset. */
struct remote_region {
    uint64_t id;
    uint64_t begin;
    uint64_t end;
    uint64_t told;      /* the peer's region_tells when these keys came */
    uint64_t near_key;  /* for the short way between processes; 0: the owner offers none */
    uint64_t stage_key; /* for messages that its owner copies; 0: it copies none */
    struct remote_key *keys;
    uint32_t *first_key; /* per NIC, with one more at the end */
    uint32_t *nics;      /* those with a key, as first named: the peer's nearest first */
    uint32_t nic_count;
};

enum peer_state { PEER_FREE = 0, PEER_OPENING, PEER_READY, PEER_REMOVING };

struct peer {
    uint32_t index;
    uint32_t generation;
    _Atomic int state;
    bool same_process;
    uint64_t incarnation;
    struct neighbour *neighbour;    /* the short way to its process, or NULL */
    ekv_nic *nics;                  /* their addresses are guarded by lock */
    _Atomic uint32_t *nic_versions; /* how often each address changed; set with lock held */
    uint32_t nic_count;
    struct peer_rail *rails;
    _Atomic uint32_t jobs;        /* jobs that may still touch it */
    _Atomic uint32_t groups_left; /* groups that still have to let go of it */
    pthread_rwlock_t lock;
    struct range_table ranges;
    uint64_t region_tells;          /* how often regions or new keys were told */
    struct remote_region **regions; /* by range slot */
    uint32_t region_capacity;
};

struct peer_table {
    pthread_rwlock_t lock;
    struct peer **peers;
    uint32_t capacity;
    uint32_t used;
    _Atomic uint32_t count;
};

bool peer_table_open(struct peer_table *table, uint32_t capacity);
void peer_table_close(struct peer_table *table, uint32_t rail_count);

/* A new peer in state OPENING with copies of nics; NULL with *code set. */
struct peer *peer_take(struct peer_table *table, const ekv_peer_options *options,
                       const ekv_nic *nics, uint32_t nic_count, uint32_t rail_count, int *code);
void peer_give(struct peer_table *table, struct peer *peer, uint32_t rail_count);

/* By id, in state READY or REMOVING; with the table's lock held by the caller. */
struct peer *peer_find(struct peer_table *table, uint8_t tag, ekv_peer_id id);

/* Takes new addresses; false: these are other NICs. */
bool peer_nics_move(struct peer *peer, const ekv_nic *nics, size_t count);

bool peer_nic_matches(const ekv_nic *ours, const ekv_nic *theirs, bool is_ip);

int peer_region_put(struct peer *peer, uint64_t id, uint64_t begin, uint64_t length,
                    const ekv_remote_key *keys, size_t key_count, ekv_error *error);
bool peer_region_drop(struct peer *peer, uint64_t id);

/* With peer->lock held: the region that holds address and reaches furthest. */
const struct remote_region *peer_region_at(const struct peer *peer, uint64_t address,
                                           uint64_t length);

/* The key of one NIC for address and the bytes it holds from there on, or NULL. */
const struct remote_key *remote_key_at(const struct remote_region *region, uint32_t nic,
                                       uint64_t address, uint64_t *left);

/* The best path of a rail at this moment: the aligned NIC first, then the others.
 * With desperate set, paths that failed recently count too. -1: none. */
int peer_choose_nic(const struct peer *peer, uint32_t rail, uint64_t now_ns, bool desperate);

void path_fail(struct path *path, uint64_t now_ns);
/* After a failure on the way from a rail to a NIC: a fault on our side is the rail's,
 * whichever NIC it was on the way to, so all its paths to the peer rest. */
void peer_path_fail(struct peer *peer, uint32_t rail, uint32_t nic, int code, uint64_t now_ns);
void path_succeed(struct path *path);

#endif
