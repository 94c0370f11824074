/* memory.h - the local regions: who they are, which addresses they hold, and their
 * keys on every rail.
 *
 * The table and the address ranges are guarded by `lock`; the keys of a rail are
 * written by that rail's progress thread with `lock` held and read by it without. */
#ifndef EKV_MEMORY_H
#define EKV_MEMORY_H

#include <pthread.h>
#include <rdma/fi_domain.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "efa_kv.h"
#include "range.h"
#include "topology.h"

struct cuda;
struct rail;

/* A part of a region under one key; all parts but the last have the same length. */
struct region_chunk {
    struct fid_mr *mr;
    void *descriptor;
    uint64_t key;
};

struct region_rail {
    struct rail *rail;
    uint64_t bytes; /* what it takes of the rail's budget */
    uint64_t entries;
    struct region_chunk *chunks;
    uint32_t count;
    uint64_t chunk_bytes;
};

enum region_state {
    REGION_FREE = 0,
    REGION_HIDDEN, /* being registered or deregistered; nobody may look it up */
    REGION_READY,
    REGION_CLOSING /* refused to new jobs */
};

struct region {
    uint32_t generation;
    enum region_state state;
    uint32_t kind;
    int32_t device; /* of GPU memory, else -1 */
    bool staged;    /* no rail reaches it, see staging.h */
    uint32_t access;
    uint64_t begin;
    uint64_t end;
    struct reach reach; /* which rails, and how near they are */
    struct region_rail *rails;
    uint64_t near_key;           /* for neighbours, see gate.h; 0: not offered */
    uint64_t stage_key;          /* for peers that stage; 0: not offered */
    _Atomic uint32_t jobs;       /* jobs that may still touch it */
    _Atomic uint32_t operations; /* operations in flight on it */
    _Atomic bool paused;         /* nothing new is posted while its keys are replaced */
};

struct memory {
    pthread_rwlock_t lock;
    struct region *regions;
    uint32_t capacity;
    uint32_t used; /* slots ever used; later ones are still untouched */
    uint32_t rail_count;
    struct range_table ranges;
    _Atomic uint64_t next_key;
    struct cuda *cuda;
};

bool memory_open(struct memory *memory, uint32_t capacity, uint32_t rail_count, uint64_t seed);
void memory_close(struct memory *memory);

/* A free slot in state HIDDEN, or NULL. */
struct region *memory_take(struct memory *memory, const ekv_memory *description);
/* Makes a region whose keys are complete visible to submissions. */
bool memory_publish(struct memory *memory, struct region *region);
/* Hides it from new submissions; with `lock` held for writing by the caller. */
void memory_retire(struct memory *memory, struct region *region);
void memory_give(struct memory *memory, struct region *region);
uint32_t memory_index(const struct memory *memory, const struct region *region);

/* By id; with `lock` held by the caller. */
struct region *memory_find(struct memory *memory, uint8_t tag, ekv_region_id id);

/* Registers on one rail, in that rail's thread or while it waits. The keys become valid in the
 * region only when everything succeeded. */
int region_register(struct region *region, struct rail *rail, struct memory *memory,
                    uint64_t chunk_limit_bytes, ekv_error *error);
void region_rail_close(struct region_rail *keys);

/* Counts an operation in, unless the region's keys are just being replaced. */
bool region_enter(struct region *region);
void region_leave(struct region *region);

/* The chunk that holds address, and how many bytes it holds from there on. */
const struct region_chunk *region_chunk_at(const struct region *region, uint32_t rail,
                                           uint64_t address, uint64_t *left);

#endif
