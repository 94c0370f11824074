/* submit.c - exported calls that make jobs, and all the checks made before anything is
 * queued.  Runs in callers' threads; takes the locks of both region tables for reading
 * and never waits for the network. */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "engine.h"
#include "error.h"
#include "identifier.h"

/* One bit per local region that the job touches. */
struct region_marks {
    uint64_t *bits;
    uint32_t words;
    uint32_t count;
};

struct submission {
    struct ekv_engine *engine;
    ekv_job_options options;
    struct job *job;
    struct peer *peer;
    struct region_marks marks;
    ekv_error *error;
};

static int describe_gap(const struct submission *submission, int code,
                        const struct range_table *ranges, uint64_t address, uint64_t length,
                        uint64_t gap)
{
    const struct range *near = range_nearest(ranges, gap);
    const char *side = code == EKV_EREGION ? "local" : "remote";

    if (!near)
        return error_set(submission->error, code, 0, "ekv_submit",
                         "%s address 0x%llx (+%llu bytes): no region is registered", side,
                         (unsigned long long)address, (unsigned long long)length);
    return error_set(submission->error, code, 0, "ekv_submit",
                     "%s address 0x%llx (+%llu bytes) is outside every region at 0x%llx; the "
                     "nearest region is 0x%llx to 0x%llx",
                     side, (unsigned long long)address, (unsigned long long)length,
                     (unsigned long long)gap, (unsigned long long)near->begin,
                     (unsigned long long)near->end);
}

/* With the memory lock held for reading. Marks every region that the range touches. */
static bool mark_local(struct submission *submission, uint64_t address, uint64_t length,
                       uint64_t *gap)
{
    struct memory *memory = &submission->engine->memory;

    while (length > 0) {
        const struct range *found = range_find(&memory->ranges, address, length);
        uint64_t bit;
        uint64_t held;

        if (!found) {
            *gap = address;
            return false;
        }
        bit = UINT64_C(1) << (found->slot % 64);
        if (!(submission->marks.bits[found->slot / 64] & bit)) {
            submission->marks.bits[found->slot / 64] |= bit;
            submission->marks.count++;
        }
        held = found->end - address;
        if (held >= length)
            return true;
        address += held;
        length -= held;
    }
    return true;
}

static int check_span(void *context, uint64_t local, uint64_t remote, uint64_t length)
{
    struct submission *submission = context;
    uint64_t gap;

    if (!mark_local(submission, local, length, &gap))
        return describe_gap(submission, EKV_EREGION, &submission->engine->memory.ranges, local,
                            length, gap);
    if (!range_covers(&submission->peer->ranges, remote, length, &gap))
        return describe_gap(submission, EKV_EREMOTEREGION, &submission->peer->ranges, remote,
                            length, gap);
    return EKV_OK;
}

/* A row whose whole hull is registered on both sides needs no look at its blocks. */
static bool hulls_are_covered(struct submission *submission)
{
    const struct plan *plan = &submission->job->plan;

    for (size_t i = 0; i < plan->row_count; i++) {
        uint64_t local, local_bytes, remote, remote_bytes, gap;

        plan_row_hull(plan, i, &local, &local_bytes, &remote, &remote_bytes);
        if (!mark_local(submission, local, local_bytes, &gap) ||
            !range_covers(&submission->peer->ranges, remote, remote_bytes, &gap))
            return false;
    }
    return true;
}

/* Counts the job in at every region it touches. */
static int hold_regions(struct submission *submission)
{
    struct job *job = submission->job;
    struct region_marks *marks = &submission->marks;

    job->regions = malloc((marks->count ? marks->count : 1) * sizeof *job->regions);
    if (!job->regions)
        return error_set(submission->error, EKV_ENOMEM, 0, "ekv_submit", "out of memory");
    job->region_count = 0;
    for (uint32_t word = 0; word < marks->words; word++)
        for (uint64_t bits = marks->bits[word]; bits; bits &= bits - 1) {
            uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(bits);

            atomic_fetch_add(&submission->engine->memory.regions[slot].jobs, 1);
            job->regions[job->region_count++] = slot;
        }
    return EKV_OK;
}

static int check_addresses(struct submission *submission)
{
    struct ekv_engine *engine = submission->engine;
    struct plan *plan = &submission->job->plan;
    int code = EKV_OK;

    submission->marks.words = (engine->memory.capacity + 63) / 64;
    submission->marks.bits = calloc(submission->marks.words, sizeof(uint64_t));
    if (!submission->marks.bits)
        return error_set(submission->error, EKV_ENOMEM, 0, "ekv_submit", "out of memory");
    pthread_rwlock_rdlock(&engine->memory.lock);
    pthread_rwlock_rdlock(&submission->peer->lock);
    submission->job->region_tells = submission->peer->region_tells;
    if (!plan->rows || !hulls_are_covered(submission))
        code = plan_each(plan, check_span, submission);
    if (code == EKV_OK)
        code = hold_regions(submission);
    pthread_rwlock_unlock(&submission->peer->lock);
    pthread_rwlock_unlock(&engine->memory.lock);
    free(submission->marks.bits);
    return code;
}

static int check_options(const struct submission *submission)
{
    const ekv_job_options *options = &submission->options;

    if (options->operation != EKV_WRITE && options->operation != EKV_READ)
        return error_set(submission->error, EKV_EINVAL, 0, "ekv_submit",
                         "operation %u is neither EKV_WRITE nor EKV_READ", options->operation);
    if (!(options->deadline_s > 0) || !isfinite(options->deadline_s))
        return error_set(submission->error, EKV_EINVAL, 0, "ekv_submit",
                         "deadline_s must be positive and finite, not %g", options->deadline_s);
    return EKV_OK;
}

/* Finds the peer and counts the job in, so that it stays. */
static int hold_peer(struct submission *submission)
{
    struct ekv_engine *engine = submission->engine;
    struct peer *peer;

    pthread_rwlock_rdlock(&engine->peers.lock);
    peer = peer_find(&engine->peers, engine->tag, submission->options.peer);
    if (peer && atomic_load(&peer->state) != PEER_READY)
        peer = NULL;
    if (peer)
        atomic_fetch_add(&peer->jobs, 1);
    pthread_rwlock_unlock(&engine->peers.lock);
    submission->peer = peer;
    if (!peer)
        return error_set(submission->error, EKV_ESTALE, 0, "ekv_submit",
                         "peer 0x%llx is not (or no longer) known",
                         (unsigned long long)submission->options.peer);
    return EKV_OK;
}

static int submission_begin(struct submission *submission, struct ekv_engine *engine,
                            const ekv_job_options *options, ekv_error *error)
{
    int code;

    memset(submission, 0, sizeof *submission);
    submission->engine = engine;
    submission->error = error;
    if (struct_import(&submission->options, sizeof submission->options, options) != EKV_OK)
        return error_set(error, EKV_EINVAL, 0, "ekv_submit", "the options are missing");
    code = check_options(submission);
    if (code != EKV_OK)
        return code;
    submission->job = jobs_take(&engine->jobs, engine->tag);
    if (!submission->job)
        return error_set(error, EKV_EBUSY, 0, "ekv_submit",
                         "all %u jobs are in use; release those that are done",
                         engine->jobs.capacity);
    code = hold_peer(submission);
    if (code != EKV_OK)
        jobs_abandon(&engine->jobs, submission->job);
    return code;
}

static void submission_undo(struct submission *submission)
{
    struct job *job = submission->job;

    job->peer = submission->peer;
    engine_release_job(submission->engine, job);
    jobs_abandon(&submission->engine->jobs, job);
}

/* Memory of a device is never copied by the kernel. */
static bool job_is_in_host_memory(const struct submission *submission)
{
    const struct job *job = submission->job;
    const struct memory *memory = &submission->engine->memory;

    for (uint32_t i = 0; i < job->region_count; i++)
        if (memory->regions[job->regions[i]].kind != EKV_MEMORY_HOST) {
            atomic_fetch_add(&submission->engine->rails[0].counters.near_refused[NEAR_MEMORY], 1);
            return false;
        }
    return true;
}

static void job_fill(struct submission *submission)
{
    const ekv_job_options *options = &submission->options;
    struct job *job = submission->job;

    job->operation = options->operation;
    job->flags = options->flags;
    if (!job->rails)
        job->rails = calloc(submission->engine->rail_count, sizeof *job->rails);
    else
        memset(job->rails, 0, submission->engine->rail_count * sizeof *job->rails);
    job->near = submission->engine->near && submission->peer->same_process;
    job->neighbour = submission->peer->neighbour && job_is_in_host_memory(submission);
    job->peer = submission->peer;
    job->user_data = options->user_data;
    job->submitted_ns = clock_now_ns();
    job->deadline_ns = clock_after_ns(options->deadline_s);
    job->notice = options->notice;
}

/* Hands the job to the progress threads, its home first. */
static int submission_queue(struct submission *submission, ekv_job_id *id)
{
    struct ekv_engine *engine = submission->engine;
    struct job *job = submission->job;
    struct group *home = job_home(engine, job);

    *id = job->id;
    trace_job(engine, EKV_TRACE_SUBMITTED, job, 0);
    /* Before the first of them sees it, so that it leaves the others their part. */
    job->called_groups = (uint32_t)((UINT64_C(1) << engine->group_count) - 1);
    for (uint32_t i = 0; i < engine->group_count; i++)
        if (&engine->groups[i] != home)
            job_hold(&engine->jobs, job);
    if (!ring_push(&home->submissions, SUBMISSION_JOB | job->index)) {
        *id = 0;
        submission_undo(submission);
        return error_set(submission->error, EKV_EBUSY, 0, "ekv_submit",
                         "the submission ring is full");
    }
    group_wake(home);
    for (uint32_t i = 0; i < engine->group_count; i++) {
        struct group *group = &engine->groups[i];

        if (group == home)
            continue;
        if (ring_push(&group->submissions, SUBMISSION_JOB | job->index)) {
            group_wake(group);
        } else { /* it is called again when it is needed */
            pthread_mutex_lock(&job->lock);
            job->called_groups &= ~(1u << group->index);
            pthread_mutex_unlock(&job->lock);
            job_drop(&engine->jobs, job);
        }
    }
    return EKV_OK;
}

static int submission_end(struct submission *submission, int plan_code, ekv_job_id *id)
{
    int code = plan_code;

    if (code != EKV_OK)
        code = error_set(submission->error, code, 0, "ekv_submit",
                         code == EKV_ENOMEM ? "out of memory"
                                            : "an address or a sum of lengths overflows");
    if (code == EKV_OK)
        code = check_addresses(submission);
    if (code != EKV_OK) {
        submission_undo(submission);
        return code;
    }
    job_fill(submission);
    return submission_queue(submission, id);
}

int ekv_submit(struct ekv_engine *engine, const ekv_job_options *options,
               const uint64_t *local_addresses, const uint64_t *remote_addresses,
               const uint64_t *lengths_bytes, size_t count, ekv_job_id *job, ekv_error *error)
{
    struct submission submission;
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    if (!job || (count && (!local_addresses || !remote_addresses || !lengths_bytes)))
        code = error_set(error, EKV_EINVAL, 0, "ekv_submit", "an argument is missing");
    else
        code = submission_begin(&submission, engine, options, error);
    if (code == EKV_OK)
        code =
            submission_end(&submission,
                           plan_open_list(&submission.job->plan, local_addresses, remote_addresses,
                                          lengths_bytes, count, engine->stripe_bytes),
                           job);
    engine_leave(engine);
    return code;
}

int ekv_submit_paged(struct ekv_engine *engine, const ekv_job_options *options, const ekv_row *rows,
                     size_t row_count, const uint32_t *local_blocks, const uint32_t *remote_blocks,
                     size_t block_count, ekv_job_id *job, ekv_error *error)
{
    struct submission submission;
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    if (!job || (row_count && !rows) || (block_count && (!local_blocks || !remote_blocks)))
        code = error_set(error, EKV_EINVAL, 0, "ekv_submit_paged", "an argument is missing");
    else
        code = submission_begin(&submission, engine, options, error);
    if (code == EKV_OK)
        code = submission_end(&submission,
                              plan_open_paged(&submission.job->plan, rows, row_count, local_blocks,
                                              remote_blocks, block_count, engine->stripe_bytes),
                              job);
    engine_leave(engine);
    return code;
}
