/* plan.c - see plan.h. */
#include "plan.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

/* Address arithmetic is checked once here, so that the cursor never has to. */
static bool end_of(uint64_t address, uint64_t bytes, uint64_t *end)
{
    return !__builtin_add_overflow(address, bytes, end);
}

int plan_open_list(struct plan *plan, const uint64_t *local, const uint64_t *remote,
                   const uint64_t *lengths, size_t count, uint64_t stripe_bytes)
{
    uint64_t end;

    memset(plan, 0, sizeof *plan);
    plan->stripe_bytes = stripe_bytes;
    if (count == 0)
        return EKV_OK;
    plan->descriptors = malloc(count * sizeof *plan->descriptors);
    if (!plan->descriptors)
        return EKV_ENOMEM;
    for (size_t i = 0; i < count; i++) {
        if (lengths[i] == 0)
            continue;
        if (!end_of(local[i], lengths[i], &end) || !end_of(remote[i], lengths[i], &end) ||
            __builtin_add_overflow(plan->total_bytes, lengths[i], &plan->total_bytes)) {
            plan_close(plan);
            return EKV_EINVAL;
        }
        plan->descriptors[plan->descriptor_count++] =
            (struct piece){.local = local[i], .remote = remote[i], .length = lengths[i]};
    }
    return EKV_OK;
}

static int plan_find_runs(struct plan *plan, const uint32_t *local, const uint32_t *remote,
                          size_t count)
{
    struct plan_run *last = NULL, *shrunk;

    plan->runs = malloc(count * sizeof *plan->runs);
    if (!plan->runs)
        return EKV_ENOMEM;
    for (size_t i = 0; i < count; i++) {
        if (last && (uint64_t)last->local + last->count == local[i] &&
            (uint64_t)last->remote + last->count == remote[i]) {
            last->count++;
            continue;
        }
        last = &plan->runs[plan->run_count++];
        *last = (struct plan_run){.local = local[i], .remote = remote[i], .count = 1};
    }
    shrunk = realloc(plan->runs, plan->run_count * sizeof *plan->runs);
    if (shrunk)
        plan->runs = shrunk;
    return EKV_OK;
}

/* The end of the last byte of block `highest` of one side of a row, or false. */
static bool row_end(uint64_t address, uint64_t stride, uint64_t length, uint32_t highest,
                    uint64_t *end)
{
    uint64_t offset;

    return !__builtin_mul_overflow(stride, (uint64_t)highest, &offset) &&
           end_of(address, offset, end) && end_of(*end, length, end);
}

static int plan_copy_rows(struct plan *plan, const void *rows, size_t row_count,
                          uint32_t local_highest, uint32_t remote_highest, size_t block_count)
{
    /* ekv_row is part of arrays of thousands and carries no struct_size. */
    const ekv_row *source = rows;
    uint64_t end;

    plan->rows = malloc(row_count * sizeof *plan->rows);
    if (!plan->rows)
        return EKV_ENOMEM;
    for (size_t i = 0; i < row_count; i++) {
        const ekv_row *row = &source[i];
        uint64_t bytes;

        if (row->length_bytes == 0)
            continue;
        if (!row_end(row->local_address, row->local_stride_bytes, row->length_bytes, local_highest,
                     &end) ||
            !row_end(row->remote_address, row->remote_stride_bytes, row->length_bytes,
                     remote_highest, &end) ||
            __builtin_mul_overflow(row->length_bytes, (uint64_t)block_count, &bytes) ||
            __builtin_add_overflow(plan->total_bytes, bytes, &plan->total_bytes))
            return EKV_EINVAL;
        plan->rows[plan->row_count++] = *row;
    }
    return EKV_OK;
}

static void bounds_of(const uint32_t *blocks, size_t count, uint32_t *low, uint32_t *high)
{
    *low = *high = blocks[0];
    for (size_t i = 1; i < count; i++) {
        *low = blocks[i] < *low ? blocks[i] : *low;
        *high = blocks[i] > *high ? blocks[i] : *high;
    }
}

int plan_open_paged(struct plan *plan, const void *rows, size_t row_count,
                    const uint32_t *local_blocks, const uint32_t *remote_blocks, size_t block_count,
                    uint64_t stripe_bytes)
{
    int code;

    memset(plan, 0, sizeof *plan);
    plan->stripe_bytes = stripe_bytes;
    if (row_count == 0 || block_count == 0)
        return EKV_OK;
    bounds_of(local_blocks, block_count, &plan->local_low, &plan->local_high);
    bounds_of(remote_blocks, block_count, &plan->remote_low, &plan->remote_high);
    code = plan_find_runs(plan, local_blocks, remote_blocks, block_count);
    if (code == EKV_OK)
        code =
            plan_copy_rows(plan, rows, row_count, plan->local_high, plan->remote_high, block_count);
    if (code != EKV_OK)
        plan_close(plan);
    return code;
}

void plan_close(struct plan *plan)
{
    free(plan->descriptors);
    free(plan->rows);
    free(plan->runs);
    memset(plan, 0, sizeof *plan);
}

static bool row_is_dense(const ekv_row *row)
{
    return row->local_stride_bytes == row->length_bytes &&
           row->remote_stride_bytes == row->length_bytes;
}

/* The span at the cursor of the paged form; steps the cursor over it. */
static bool plan_next_paged(struct plan *plan, struct piece *span)
{
    const ekv_row *row;
    const struct plan_run *run;

    if (plan->outer == plan->row_count || plan->run_count == 0)
        return false;
    row = &plan->rows[plan->outer];
    run = &plan->runs[plan->run];
    span->local =
        row->local_address + ((uint64_t)run->local + plan->block) * row->local_stride_bytes;
    span->remote =
        row->remote_address + ((uint64_t)run->remote + plan->block) * row->remote_stride_bytes;
    span->length = row->length_bytes;
    if (row_is_dense(row)) {
        span->length *= run->count;
        plan->block = run->count;
    } else {
        plan->block++;
    }
    if (plan->block == run->count) {
        plan->block = 0;
        plan->run++;
    }
    if (plan->run == plan->run_count) {
        plan->run = 0;
        plan->outer++;
    }
    return true;
}

static bool plan_next_span(struct plan *plan, struct piece *span)
{
    if (plan->rows)
        return plan_next_paged(plan, span);
    if (plan->outer == plan->descriptor_count)
        return false;
    *span = plan->descriptors[plan->outer++];
    /* Neighbours that touch on both sides become one span. */
    while (plan->outer < plan->descriptor_count) {
        const struct piece *next = &plan->descriptors[plan->outer];

        if (span->local + span->length != next->local ||
            span->remote + span->length != next->remote)
            break;
        span->length += next->length;
        plan->outer++;
    }
    return true;
}

bool plan_peek(struct plan *plan, struct piece *piece)
{
    if (plan->span.length == 0) {
        if (!plan_next_span(plan, &plan->span))
            return false;
        plan->stripe_left = plan->stripe_bytes;
    }
    *piece = plan->span;
    if (piece->length > plan->stripe_left)
        piece->length = plan->stripe_left;
    return true;
}

void plan_consume(struct plan *plan, uint64_t bytes)
{
    assert(bytes > 0 && bytes <= plan->span.length && bytes <= plan->stripe_left);
    plan->span.local += bytes;
    plan->span.remote += bytes;
    plan->span.length -= bytes;
    plan->stripe_left -= bytes;
    if (plan->stripe_left == 0)
        plan->stripe_left = plan->stripe_bytes;
}

int plan_each(const struct plan *plan, plan_visit visit, void *context)
{
    struct plan walker = *plan;
    struct piece span;
    int answer = 0;

    walker.outer = walker.run = walker.block = 0;
    while (answer == 0 && plan_next_span(&walker, &span))
        answer = visit(context, span.local, span.remote, span.length);
    return answer;
}

void plan_row_hull(const struct plan *plan, size_t row_index, uint64_t *local,
                   uint64_t *local_bytes, uint64_t *remote, uint64_t *remote_bytes)
{
    const ekv_row *row = &plan->rows[row_index];

    *local = row->local_address + plan->local_low * row->local_stride_bytes;
    *local_bytes =
        (plan->local_high - plan->local_low) * row->local_stride_bytes + row->length_bytes;
    *remote = row->remote_address + plan->remote_low * row->remote_stride_bytes;
    *remote_bytes =
        (plan->remote_high - plan->remote_low) * row->remote_stride_bytes + row->length_bytes;
}
