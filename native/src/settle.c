/* settle.c - completions, failures and deadlines; see engine.h. */
#include <assert.h>
#include <errno.h>
#include <rdma/fi_errno.h>
#include <stdio.h>
#include <string.h>

#include "choice.h"
#include "clock.h"
#include "engine.h"

#define DRAIN_BATCH 64
#define DRAIN_ROUND_BATCHES 16
/* How often one stripe is posted before its job is given up. */
#define SETTLE_ATTEMPTS_MAX 4u
/* How long a target may take to make us known to its device, and how often it is tried. */
#define SETTLE_MEETING_NS NS_PER_SECOND
#define SETTLE_REST_NS (200 * NS_PER_US)

/* The error entry grows with libfabric versions newer than the headers. */
union error_entry {
    struct fi_cq_err_entry entry;
    uint8_t room[256];
};

void trace_job(struct ekv_engine *engine, uint32_t event, const struct job *job, uint32_t rail)
{
    ekv_trace_record record = {.event = event,
                               .job = job->id,
                               .user_data = job->user_data,
                               .bytes = atomic_load(&job->bytes),
                               .rail = rail,
                               .status = job->status};

    trace_write(&engine->trace, &record);
}

/* How much of the job each rail carried, and when; with job->lock held. */
static void trace_rails(struct ekv_engine *engine, const struct job *job)
{
    for (uint32_t i = 0; job->rails && i < engine->rail_count; i++) {
        const struct job_rail *part = &job->rails[i];
        ekv_trace_record record = {.event = EKV_TRACE_RAIL_MOVED,
                                   .time_ns = part->ended_ns,
                                   .job = job->id,
                                   .user_data = job->user_data,
                                   .bytes = part->bytes,
                                   .rail = i,
                                   .status = job->status,
                                   .begun_ns = part->begun_ns,
                                   .operations = part->operations};

        if (part->operations > 0)
            trace_write(&engine->trace, &record);
    }
}

bool job_advance(struct group *group, struct job *job)
{
    if (job->stage == JOB_SETTLED || job->unsettled > 0)
        return false;
    if (job->stage == JOB_MOVING && job->status == EKV_OK) {
        if (!job->plan_over || job->retry_count > 0)
            return false;
        job->stage = JOB_FLUSHING;
        if (job->flush_count > 0) {
            group_activate(group, job);
            return false;
        }
    }
    if (job->stage == JOB_FLUSHING && job->status == EKV_OK) {
        for (uint32_t i = 0; i < job->flush_count; i++)
            if (!job->flushes[i].posted)
                return false;
        trace_rails(group->engine, job);
        trace_job(group->engine, EKV_TRACE_LANDED, job, 0);
        if (job->flags & EKV_JOB_NOTICE) {
            job->stage = JOB_NOTIFYING;
            group_activate(group, job);
            return false;
        }
    }
    if (job->stage == JOB_NOTIFYING && job->status == EKV_OK && !job->notice_over)
        return false;
    if (job->status != EKV_OK) {
        job->notice_status = job->flags & EKV_JOB_NOTICE ? job->status : EKV_EBUSY;
        trace_rails(group->engine, job);
        trace_job(group->engine, EKV_TRACE_FAILED, job, 0);
    }
    job->stage = JOB_SETTLED;
    if (atomic_exchange(&job->overdue, false))
        atomic_fetch_sub(&group->engine->overdue, 1);
    /* From here on other groups may let go of it; this hold is for job_conclude. */
    job_hold(&group->engine->jobs, job);
    return true;
}

void job_conclude(struct group *group, struct job *job)
{
    struct ekv_engine *engine = group->engine;
    struct group *home = job_home(engine, job);

    /* Before anybody can learn that it is over, so that a region or peer is free to go
     * the moment its last job is seen to be done. */
    pthread_mutex_lock(&job->lock);
    engine_release_job(engine, job);
    job_empty(job);
    if (jobs_publish(&engine->jobs, job, true))
        engine_signal(engine);
    pthread_mutex_unlock(&job->lock);
    if (home == group) {
        group_unlist_live(group, job);
        job_drop(&engine->jobs, job);
        return;
    }
    if (ring_push(&home->submissions, SUBMISSION_JOB | job->index))
        group_wake(home);
    else
        job_drop(&engine->jobs, job);
}

bool job_has_detour(struct group *group, const struct job *job, uint64_t now_ns)
{
    uint32_t elsewhere;

    for (uint32_t i = 0; i < group->rail_count; i++) {
        const struct rail *rail = &group->engine->rails[group->rail_first + i];

        if (rail->endpoint && health_allows(&rail->health, 0, now_ns) &&
            peer_choose_nic(job->peer, rail->index, now_ns, false) >= 0)
            return true;
    }
    /* A flush belongs to one rail, the rest can go over other groups'. */
    return job->stage != JOB_FLUSHING && rail_elsewhere(group, job->peer, &elsewhere);
}

/* With job->lock held. */
static void job_take_success(struct group *group, struct rail *rail, struct job *job,
                             const struct operation *operation, uint64_t now_ns)
{
    uint64_t bytes = operation->piece.length;

    if (operation->kind == OPERATION_NOTICE) {
        job->notice_status = EKV_OK;
        job->notice_over = true;
        counter_add(&rail->counters.notices_sent, 1);
        trace_job(group->engine, EKV_TRACE_NOTICED, job, rail->index);
        return;
    }
    if (operation->kind == OPERATION_FLUSH)
        return;
    if (job->rails) {
        job->rails[rail->index].bytes += bytes;
        job->rails[rail->index].ended_ns = now_ns;
    }
    atomic_store(&job->bytes, atomic_load(&job->bytes) + bytes);
    counter_add(operation->is_read ? &rail->counters.bytes_read : &rail->counters.bytes_written,
                bytes);
    if (operation->kind == OPERATION_DATA && !operation->is_read &&
        !(rail->nic.flags & EKV_NIC_DELIVERY_COMPLETE) &&
        !job_flush_note(job, rail->index, operation->nic, operation->piece.remote))
        job_fail(job, EKV_ENOMEM, 0, "out of memory");
}

/* Whether it carries a stripe. */
static bool operation_moves(const struct operation *operation)
{
    return operation->kind == OPERATION_DATA || operation->kind == OPERATION_PUT ||
           operation->kind == OPERATION_GET;
}

/* Whether the target has refused an operation for a moment, before it did anything: it had no
 * room for a staged message, or has yet to make us known to its device, which it does soon
 * after both have greeted. */
static bool job_can_wait(const struct rail *rail, struct job *job, const struct outcome *outcome,
                         uint64_t now_ns)
{
    if (job->status != EKV_OK)
        return false;
    if (outcome->code == EKV_EBUSY)
        return true;
    if (!rail_is_unknown_there(rail, outcome->provider_error) ||
        now_ns - job->submitted_ns > SETTLE_MEETING_NS)
        return false;
    job->rests_ns = now_ns + SETTLE_REST_NS;
    return true;
}

/* With job->lock held. */
static void job_take_failure(struct group *group, struct rail *rail, struct job *job,
                             const struct operation *operation, const struct outcome *outcome,
                             uint64_t now_ns)
{
    bool fenced = rail->nic.flags & EKV_NIC_FENCES;
    bool again = outcome->code != EKV_EACCESS && job->status == EKV_OK &&
                 operation->attempts + 1 < SETTLE_ATTEMPTS_MAX &&
                 job_has_detour(group, job, now_ns);

    if (operation->kind != OPERATION_FLUSH && job_can_wait(rail, job, outcome, now_ns)) {
        if (operation_moves(operation) &&
            !job_retry_put(job, &operation->piece, operation->attempts))
            job_fail(job, EKV_ENOMEM, 0, "out of memory");
        group_activate(group, job);
        return;
    }
    if (operation->kind == OPERATION_NOTICE) {
        if (again && !job->notice_over) {
            group_activate(group, job); /* over another path */
            return;
        }
        job->notice_status = outcome->code;
        job->notice_over = true;
        return;
    }
    /* Where an error proves nothing, the first copy may land after the second, in memory
     * that has another owner by then. */
    if (operation_moves(operation) && !operation->is_read && !fenced)
        job->stray |= outcome->code != EKV_EACCESS;
    if (operation_moves(operation) && again && (fenced || operation->is_read) &&
        job_retry_put(job, &operation->piece, operation->attempts + 1)) {
        counter_add(&rail->counters.operations_resent, 1);
        group_activate(group, job);
        return;
    }
    job_fail(job, outcome->code, outcome->error, outcome->text);
}

void operation_settle(struct group *group, struct rail *rail, struct operation *operation,
                      const struct outcome *outcome, uint64_t now_ns)
{
    struct operation ended = *operation;
    struct peer_rail *side = &ended.peer->rails[rail->index];
    struct path *path = &side->paths[ended.nic];
    bool over = false;

    stage_settle(rail, operation);
    assert(side->in_flight > 0 && rail->in_flight > 0);
    side->in_flight--;
    side->settled_ns = now_ns;
    atomic_store_explicit(&rail->settled_ns, now_ns, memory_order_relaxed);
    rail->in_flight--;
    atomic_store_explicit(&rail->counters.in_flight, rail->in_flight, memory_order_relaxed);
    counter_add(&rail->outstanding_bytes, 0 - ended.piece.length);
    counter_add(&rail->counters.operations_settled, 1);
    if (outcome->code == EKV_OK) {
        path_succeed(path);
        rail_note_success(group->engine, rail, ended.probe, now_ns);
    } else {
        counter_add(&rail->counters.operations_failed, 1);
        if (outcome->code != EKV_EACCESS && !outcome->blameless)
            peer_path_fail(ended.peer, rail->index, ended.nic, outcome->code, now_ns);
        if (outcome->code == EKV_ERAIL)
            rail_note_failure(group->engine, rail, ended.probe, outcome->text, now_ns);
    }
    inflight_give(&rail->inflight, operation, outcome->code == EKV_OK ? 0 : now_ns);
    if (ended.region)
        region_leave(ended.region);
    if (ended.kind == OPERATION_WARM) {
        warm_settle(ended.warm, outcome->code);
        return;
    }
    if (ended.kind == OPERATION_ANSWER) {
        atomic_fetch_sub(&ended.peer->jobs, 1);
        return;
    }
    pthread_mutex_lock(&ended.job->lock);
    assert(ended.job->unsettled > 0);
    ended.job->unsettled--;
    if (outcome->code == EKV_OK)
        job_take_success(group, rail, ended.job, &ended, now_ns);
    else
        job_take_failure(group, rail, ended.job, &ended, outcome, now_ns);
    over = job_advance(group, ended.job);
    pthread_mutex_unlock(&ended.job->lock);
    if (over)
        job_conclude(group, ended.job);
}

static void message_received(struct group *group, struct rail *rail, struct operation *operation,
                             size_t length, uint64_t now_ns)
{
    ekv_notice notice;
    uint16_t kind;

    if (stage_receive(group, rail, operation, length, now_ns))
        return;
    kind = notice_decode(operation->message, length, &notice);
    if (kind == NOTICE_KIND_JOB)
        engine_receive_notice(group->engine, rail, &notice);
    else if (kind == 0)
        log_write(rail->log, LOG_WARNING, "rail %u: a message of %zu bytes is not a notice",
                  rail->index, length);
    rail_receive_again(rail, operation);
}

static void rail_take_error(struct group *group, struct rail *rail, uint64_t now_ns)
{
    union error_entry error;
    struct operation *operation;
    struct outcome outcome = {0};
    char room[128] = "";
    const char *words;

    memset(&error, 0, sizeof error);
    if (fi_cq_readerr(rail->completions, &error.entry, 0) < 1)
        return;
    operation = inflight_find(&rail->inflight, error.entry.op_context);
    if (!operation) {
        counter_add(&rail->counters.stray_completions, 1);
        return;
    }
    if (operation->kind == OPERATION_RECEIVE) {
        if (error.entry.err != FI_ECANCELED)
            rail_receive_again(rail, operation);
        return;
    }
    words = fi_cq_strerror(rail->completions, error.entry.prov_errno, error.entry.err_data, room,
                           sizeof room);
    outcome.error = error.entry.err;
    outcome.provider_error = error.entry.prov_errno;
    outcome.code = rail_classify(rail, error.entry.err, error.entry.prov_errno);
    outcome.blameless = rail_is_unknown_there(rail, error.entry.prov_errno);
    snprintf(outcome.text, sizeof outcome.text, "%.100s (%d; provider %d)",
             words && words[0] ? words : rail_strerror(rail, error.entry.err), error.entry.err,
             error.entry.prov_errno);
    operation_settle(group, rail, operation, &outcome, now_ns);
}

static void rail_take_completions(struct group *group, struct rail *rail,
                                  const struct fi_cq_msg_entry *entries, ssize_t count,
                                  uint64_t now_ns)
{
    static const struct outcome success;

    for (ssize_t i = 0; i < count; i++) {
        struct operation *operation = inflight_find(&rail->inflight, entries[i].op_context);

        if (!operation)
            counter_add(&rail->counters.stray_completions, 1);
        else if (operation->kind == OPERATION_RECEIVE)
            message_received(group, rail, operation, entries[i].len, now_ns);
        else if (operation->kind == OPERATION_PUT || operation->kind == OPERATION_GET)
            stage_sent(group, rail, operation, now_ns);
        else
            operation_settle(group, rail, operation, &success, now_ns);
    }
}

/* True when peers were served since the last look. */
static bool rail_served_peers(struct rail *rail)
{
    uint64_t count;

    if (!rail->remote_count)
        return false;
    count = fi_cntr_read(rail->remote_count);
    if (count == rail->remote_seen)
        return false;
    rail->remote_seen = count;
    return true;
}

bool group_drain(struct group *group, uint64_t now_ns)
{
    struct fi_cq_msg_entry entries[DRAIN_BATCH];
    bool any = false;

    group->drained = true;
    for (uint32_t i = 0; i < group->rail_count; i++) {
        struct rail *rail = &group->engine->rails[group->rail_first + i];
        bool empty = !rail->endpoint;

        for (int batch = 0; batch < DRAIN_ROUND_BATCHES && !empty; batch++) {
            ssize_t count = fi_cq_read(rail->completions, entries, DRAIN_BATCH);

            if (count > 0) {
                any = true;
                rail_take_completions(group, rail, entries, count, now_ns);
            } else if (count == -FI_EAVAIL) {
                any = true;
                rail_take_error(group, rail, now_ns);
            } else {
                empty = true;
            }
        }
        group->drained &= empty;
        any |= rail_served_peers(rail);
    }
    return any;
}

/* The reason, if any, why a job must not go on. */
static int job_verdict(struct job *job, uint64_t now_ns, const char **text)
{
    if (atomic_load(&job->peer->state) == PEER_REMOVING) {
        *text = "the peer was removed";
        return EKV_EPEER;
    }
    if (now_ns >= job->deadline_ns) {
        *text = "the deadline passed";
        return EKV_EDEADLINE;
    }
    return EKV_OK;
}

static void job_expire(struct group *group, struct job *job, int code, const char *text)
{
    struct ekv_engine *engine = group->engine;
    bool over;

    pthread_mutex_lock(&job->lock);
    if (job->stage == JOB_NOTIFYING && job->status == EKV_OK) {
        /* Every byte has landed; only the news of it is late. */
        if (!job->notice_over)
            job->notice_status = code;
        job->notice_over = true;
    } else {
        job_fail(job, code, 0, text);
    }
    over = job_advance(group, job);
    if (!over && job->stage != JOB_SETTLED && code == EKV_EDEADLINE) {
        if (jobs_publish(&engine->jobs, job, false))
            engine_signal(engine);
        job->expired = true;
    }
    pthread_mutex_unlock(&job->lock);
    if (over)
        job_conclude(group, job);
}

void group_check_deadlines(struct group *group, uint64_t now_ns)
{
    /* Backwards, since the list closes gaps with its last entry. */
    for (uint32_t i = group->live_count; i-- > 0;) {
        struct job *job = group->live[i];
        const char *text = "";
        int code;

        if (job->expired)
            continue;
        code = job_verdict(job, now_ns, &text);
        if (code != EKV_OK)
            job_expire(group, job, code, text);
    }
}

void rail_abort(struct group *group, struct rail *rail, int code, const char *text, bool blame)
{
    struct outcome outcome = {.code = code, .blameless = !blame};
    uint64_t now_ns = clock_now_ns();

    snprintf(outcome.text, sizeof outcome.text, "%s", text);
    for (size_t i = 0; i < rail->inflight.count; i++) {
        struct operation *operation = &rail->inflight.slots[i];

        if (operation->kind != OPERATION_FREE && operation->kind != OPERATION_RECEIVE)
            operation_settle(group, rail, operation, &outcome, now_ns);
    }
}
