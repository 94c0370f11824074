/* plan.h - PURE: a job's bytes as a cursor over pieces.
 *
 * A plan holds either a list of descriptors or the paged form (block pairs found to be
 * runs once, replayed for every row).  The cursor yields the longest piece that is
 * contiguous on both sides and no longer than a stripe; the caller consumes as much of
 * it as the registrations of both sides allow.  Guarded by its job. */
#ifndef EKV_PLAN_H
#define EKV_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "efa_kv.h"

struct piece {
    uint64_t local;
    uint64_t remote;
    uint64_t length;
};

/* Block pairs local..local+count and remote..remote+count. */
struct plan_run {
    uint32_t local;
    uint32_t remote;
    uint32_t count;
};

struct plan {
    uint64_t stripe_bytes;
    uint64_t total_bytes;

    struct piece *descriptors; /* the list form */
    size_t descriptor_count;

    ekv_row *rows; /* the paged form */
    size_t row_count;
    struct plan_run *runs;
    size_t run_count;
    uint32_t local_low; /* the lowest and highest block of each side */
    uint32_t local_high;
    uint32_t remote_low;
    uint32_t remote_high;

    size_t outer;         /* descriptor, or row */
    size_t run;           /* run within the row */
    uint32_t block;       /* block within the run, for rows whose blocks are not dense */
    struct piece span;    /* what is left of the current contiguous span */
    uint64_t stripe_left; /* bytes until the next stripe boundary of the span */
};

/* Both copy their arguments.  EKV_ENOMEM, or EKV_EINVAL for sums that do not fit. */
int plan_open_list(struct plan *plan, const uint64_t *local, const uint64_t *remote,
                   const uint64_t *lengths, size_t count, uint64_t stripe_bytes);
int plan_open_paged(struct plan *plan, const void *rows, size_t row_count,
                    const uint32_t *local_blocks, const uint32_t *remote_blocks, size_t block_count,
                    uint64_t stripe_bytes);
void plan_close(struct plan *plan);

/* The next piece, or false at the end. */
bool plan_peek(struct plan *plan, struct piece *piece);

/* Takes the first bytes of the piece just seen. */
void plan_consume(struct plan *plan, uint64_t bytes);

/* Calls visit with every contiguous span of the plan on the local and on the remote
 * side, possibly merged or widened to the hull of a row when widen is set; stops at
 * and returns the first answer that is not 0. */
typedef int (*plan_visit)(void *context, uint64_t local, uint64_t remote, uint64_t length);
int plan_each(const struct plan *plan, plan_visit visit, void *context);

/* The smallest range of each side that holds a row's bytes. */
void plan_row_hull(const struct plan *plan, size_t row, uint64_t *local, uint64_t *local_bytes,
                   uint64_t *remote, uint64_t *remote_bytes);

#endif
