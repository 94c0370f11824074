/* reset.c - giving a rail a new endpoint; see engine.h.
 *
 * Closing an endpoint is the one fence that every provider keeps: nothing that was on its
 * way over it, in either direction, can move a byte afterwards.  So a rail is reset
 *   - when a caller asks, because its peers may not write here any more and the provider
 *     has no better way to stop them;
 *   - when operations of a job that failed long ago do not end: without it the job's
 *     memory would stay lent out for as long as its peer stays silent; likewise those to
 *     an address that the peer has given up;
 *   - when a rail that fences falls silent while the others go on;
 *   - when it has no room for another peer because of those that are gone.
 * Progress threads find out and ask; the mender, a thread of its own, carries out one
 * reset at a time, because engines of one process may have to be waited for before (see
 * registry_flush).  A rail that cannot be opened again stays out and is tried again later.
 *
 * The mender's table is guarded by its lock; the reset itself runs in the rail's
 * progress thread. */
#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <string.h>

#include "clock.h"
#include "engine.h"
#include "error.h"

/* A failed job's operations have this long to end, and to show signs of life. */
#define RESET_OVERDUE_NS (2 * NS_PER_SECOND)
/* Longer than a network needs to find out that one of its parts has failed. */
#define RESET_SILENT_NS (3 * NS_PER_SECOND)
#define RESET_LOOK_NS (100 * NS_PER_MS)
/* How long after a peer's address has changed operations to the old one are looked for. */
#define RESET_MOVED_NS (60 * NS_PER_SECOND)
#define RESET_BACKOFF_FIRST_NS NS_PER_SECOND
#define RESET_BACKOFF_LONGEST_NS (30 * NS_PER_SECOND)

static const char rail_overdue[] = "operations that cannot succeed any more do not end";
static const char rail_silent[] = "it has fallen silent, and the others have not";
static const char rail_exhausted[] = "its address vector is full of peers that are gone";
static const char rail_asked[] = "it was asked for";

/* ---- in the progress thread ---------------------------------------------- */

/* Addresses belong to an address vector, which goes with the endpoint. */
static void rail_forget_paths(struct ekv_engine *engine, const struct rail *rail)
{
    pthread_rwlock_rdlock(&engine->peers.lock);
    for (uint32_t i = 0; i < engine->peers.used; i++) {
        struct peer *peer = engine->peers.peers[i];

        if (atomic_load(&peer->state) == PEER_FREE)
            continue;
        for (uint32_t nic = 0; nic < peer->nic_count; nic++)
            peer->rails[rail->index].paths[nic].inserted = false;
    }
    pthread_rwlock_unlock(&engine->peers.lock);
}

static void rail_meet_all(struct ekv_engine *engine, struct rail *rail)
{
    pthread_rwlock_rdlock(&engine->peers.lock);
    for (uint32_t i = 0; i < engine->peers.used; i++) {
        struct peer *peer = engine->peers.peers[i];

        if (atomic_load(&peer->state) != PEER_READY)
            continue;
        pthread_rwlock_rdlock(&peer->lock);
        rail_meet(rail, peer);
        pthread_rwlock_unlock(&peer->lock);
    }
    pthread_rwlock_unlock(&engine->peers.lock);
}

static void rail_trace(struct ekv_engine *engine, const struct rail *rail, uint32_t event)
{
    ekv_trace_record record = {.event = event, .rail = rail->index};

    trace_write(&engine->trace, &record);
}

/* Tells everybody what became of the rail. */
static void rail_publish(struct ekv_engine *engine, struct rail *rail, const ekv_nic *opened,
                         const ekv_error *error)
{
    if (!opened) {
        if (!(atomic_fetch_or(&rail->flags, EKV_NIC_DOWN) & EKV_NIC_DOWN))
            log_write(&engine->log, LOG_ERROR,
                      "rail %u (%s) is out, because it cannot be opened again: %s", rail->index,
                      rail->nic.name, error->text);
        return;
    }
    pthread_mutex_lock(&engine->nic_lock);
    memcpy(rail->nic.address, opened->address, sizeof rail->nic.address);
    rail->nic.address_length = opened->address_length;
    rail->nic.resets++;
    pthread_mutex_unlock(&engine->nic_lock);
    if (!rail->health.out) { /* else a probe has to succeed first */
        atomic_fetch_and(&rail->flags, ~EKV_NIC_DOWN);
        rail_trace(engine, rail, EKV_TRACE_RAIL_UP);
    }
    atomic_fetch_add(&engine->resets, 1);
    engine_signal(engine);
}

static void command_reset(struct group *group, struct command *command)
{
    struct ekv_engine *engine = group->engine;
    struct rail *rail = command->rail;
    ekv_nic opened = {0};

    if (atomic_load(&engine->closing)) {
        command->code =
            error_set(&command->error, EKV_ECLOSED, 0, "ekv_rail_reset", "the engine is closing");
        return;
    }
    if (rail->endpoint) {
        log_write(&engine->log, command->reason == rail_asked ? LOG_INFO : LOG_WARNING,
                  "rail %u (%s) gets a new endpoint, because %s; %u operations are in flight",
                  rail->index, rail->nic.name, command->reason, rail->in_flight);
        if (command->reason != rail_silent)
            rail_trace(engine, rail, EKV_TRACE_RAIL_DOWN);
        if (command->reason == rail_silent)
            rail_note_silence(engine, rail, rail_silent, clock_now_ns());
        else if (command->reason != rail_asked)
            counter_add(&rail->counters.failures, 1);
    }
    rail_close_endpoint(rail);
    rail_forget_paths(engine, rail);
    command->code = rail_reopen(rail, &opened, &command->error);
    if (command->code == EKV_OK)
        rail_meet_all(engine, rail);
    rail_publish(engine, rail, command->code == EKV_OK ? &opened : NULL, &command->error);
    /* Only now, so that what fell on the way can go on over the new endpoint. */
    rail_abort(group, rail, EKV_EPEER, "the rail was reset meanwhile",
               command->code != EKV_OK || command->reason == rail_silent);
}

void mender_ask(struct ekv_engine *engine, const struct rail *rail, const char *reason)
{
    struct mender *mender = &engine->mender;

    pthread_mutex_lock(&mender->lock);
    if (!mender->rails[rail->index].reason) {
        mender->rails[rail->index].reason = reason;
        mender->rails[rail->index].due_ns = 0;
        pthread_cond_signal(&mender->changed);
    }
    pthread_mutex_unlock(&mender->lock);
}

static bool long_ago(uint64_t then_ns, uint64_t now_ns, uint64_t span_ns)
{
    return now_ns > then_ns && now_ns - then_ns >= span_ns;
}

/* Of the jobs this group is the home of. */
static void group_mark_overdue(struct group *group, uint64_t now_ns)
{
    for (uint32_t i = 0; i < group->live_count; i++) {
        struct job *job = group->live[i];
        uint64_t failed_ns = atomic_load_explicit(&job->failed_ns, memory_order_relaxed);

        if (failed_ns == 0 || !long_ago(failed_ns, now_ns, RESET_OVERDUE_NS) ||
            atomic_load(&job->overdue))
            continue;
        pthread_mutex_lock(&job->lock);
        if (job->stage != JOB_SETTLED && job->unsettled > 0) {
            atomic_store(&job->overdue, true);
            atomic_fetch_add(&group->engine->overdue, 1);
        }
        pthread_mutex_unlock(&job->lock);
    }
}

static bool operation_is_hopeless(const struct operation *operation)
{
    if (operation->kind == OPERATION_FREE || operation->kind == OPERATION_RECEIVE)
        return false;
    if (operation->version != atomic_load(&operation->peer->nic_versions[operation->nic]))
        return true;
    return operation->kind != OPERATION_WARM && atomic_load(&operation->job->overdue);
}

/* And its peer settles nothing here; one that is slow is left alone. */
static bool rail_is_overdue(const struct rail *rail, uint64_t now_ns)
{
    for (size_t i = 0; i < rail->inflight.count; i++) {
        const struct operation *operation = &rail->inflight.slots[i];

        if (operation_is_hopeless(operation) &&
            long_ago(operation->peer->rails[rail->index].settled_ns, now_ns, RESET_OVERDUE_NS))
            return true;
    }
    return false;
}

/* A peer that stopped silences every rail that has something in flight to it. */
static bool rail_alone_is_silent(const struct group *group, const struct rail *rail,
                                 uint64_t now_ns)
{
    const struct ekv_engine *engine = group->engine;
    uint64_t settled_ns = atomic_load_explicit(&rail->settled_ns, memory_order_relaxed);
    bool another_works = false;

    if (!(rail->nic.flags & EKV_NIC_FENCES) || rail->in_flight == 0 ||
        !long_ago(settled_ns, now_ns, RESET_SILENT_NS))
        return false;
    for (uint32_t i = 0; i < engine->rail_count; i++) {
        const struct rail *other = &engine->rails[i];
        uint64_t other_ns = atomic_load_explicit(&other->settled_ns, memory_order_relaxed);
        bool idle = atomic_load_explicit(&other->counters.in_flight, memory_order_relaxed) == 0;

        another_works |= other != rail && other_ns > settled_ns &&
                         !(atomic_load(&other->flags) & EKV_NIC_DOWN) &&
                         (idle || !long_ago(other_ns, now_ns, RESET_SILENT_NS / 2));
    }
    return another_works;
}

void group_check_stuck(struct group *group, uint64_t now_ns)
{
    uint64_t moved_ns = atomic_load(&group->engine->moved_ns);
    bool suspicious;

    if (now_ns - group->stuck_ns < RESET_LOOK_NS)
        return;
    group->stuck_ns = now_ns;
    group_mark_overdue(group, now_ns);
    suspicious = atomic_load(&group->engine->overdue) > 0 ||
                 (moved_ns != 0 && !long_ago(moved_ns, now_ns, RESET_MOVED_NS));
    for (uint32_t i = 0; i < group->rail_count; i++) {
        struct rail *rail = &group->engine->rails[group->rail_first + i];

        if (!rail->endpoint || !rail_can_reopen(rail))
            continue;
        if (suspicious && rail_is_overdue(rail, now_ns))
            mender_ask(group->engine, rail, rail_overdue);
        else if (rail_alone_is_silent(group, rail, now_ns))
            mender_ask(group->engine, rail, rail_silent);
        else if (rail->exhausted)
            mender_ask(group->engine, rail, rail_exhausted);
    }
}

/* ---- in the mender's and in callers' threads ------------------------------ */

static int rail_reset(struct ekv_engine *engine, uint32_t index, const char *reason,
                      ekv_error *error)
{
    struct rail *rail = &engine->rails[index];
    struct command command = {.run = command_reset, .rail = rail, .reason = reason};

    /* Requests of ours that other engines of this process have not looked at yet would
     * lead them into memory that goes away with the endpoint. */
    if (rail_is_guarded(rail))
        registry_flush();
    if (group_call(rail_group(engine, index), &command) != EKV_OK && error)
        struct_export(error, &command.error, sizeof command.error);
    return command.code;
}

/* The rail to mend now, or -1 and when to look again; with the lock held. */
static int mender_next(const struct mender *mender, uint32_t rail_count, uint64_t now_ns,
                       uint64_t *look_ns)
{
    *look_ns = UINT64_MAX;
    for (uint32_t i = 0; i < rail_count; i++) {
        if (!mender->rails[i].reason)
            continue;
        if (mender->rails[i].due_ns <= now_ns)
            return (int)i;
        if (mender->rails[i].due_ns < *look_ns)
            *look_ns = mender->rails[i].due_ns;
    }
    return -1;
}

/* With the lock held: what came of a reset, and whether it has to be tried again. */
static void mender_note(struct mender *mender, uint32_t rail, int code, const char *reason)
{
    uint64_t backoff_ns = mender->rails[rail].backoff_ns;

    if (code == EKV_OK || code == EKV_ECLOSED) {
        mender->rails[rail].reason = NULL;
        mender->rails[rail].backoff_ns = 0;
        return;
    }
    backoff_ns = backoff_ns ? backoff_ns * 2 : RESET_BACKOFF_FIRST_NS;
    if (backoff_ns > RESET_BACKOFF_LONGEST_NS)
        backoff_ns = RESET_BACKOFF_LONGEST_NS;
    mender->rails[rail].reason = reason;
    mender->rails[rail].backoff_ns = backoff_ns;
    mender->rails[rail].due_ns = clock_now_ns() + backoff_ns;
    pthread_cond_signal(&mender->changed);
}

static void *mender_main(void *argument)
{
    struct ekv_engine *engine = argument;
    struct mender *mender = &engine->mender;

    pthread_mutex_lock(&mender->lock);
    while (!mender->stop) {
        uint64_t look_ns;
        int rail = mender_next(mender, engine->rail_count, clock_now_ns(), &look_ns);
        const char *reason = rail < 0 ? NULL : mender->rails[rail].reason;
        int code;

        if (rail < 0 && look_ns == UINT64_MAX) {
            pthread_cond_wait(&mender->changed, &mender->lock);
            continue;
        }
        if (rail < 0) {
            struct timespec until = clock_timespec(look_ns);

            pthread_cond_timedwait(&mender->changed, &mender->lock, &until);
            continue;
        }
        pthread_mutex_unlock(&mender->lock);
        code = rail_reset(engine, (uint32_t)rail, reason, NULL);
        pthread_mutex_lock(&mender->lock);
        mender_note(mender, (uint32_t)rail, code, reason);
    }
    pthread_mutex_unlock(&mender->lock);
    return NULL;
}

int mender_start(struct ekv_engine *engine, ekv_error *error)
{
    struct mender *mender = &engine->mender;
    pthread_condattr_t attributes;
    sigset_t all, before;
    int answer;

    pthread_mutex_init(&mender->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&mender->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    answer = pthread_create(&mender->thread, NULL, mender_main, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (answer != 0)
        return error_set(error, EKV_ESYSTEM, answer, "pthread_create", "%s", strerror(answer));
    mender->started = true;
    return EKV_OK;
}

void mender_stop(struct ekv_engine *engine)
{
    struct mender *mender = &engine->mender;

    if (!mender->started)
        return;
    pthread_mutex_lock(&mender->lock);
    mender->stop = true;
    pthread_cond_signal(&mender->changed);
    pthread_mutex_unlock(&mender->lock);
    pthread_join(mender->thread, NULL);
    mender->started = false;
}

int ekv_rail_reset(struct ekv_engine *engine, uint32_t rail, ekv_error *error)
{
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    if (rail >= engine->rail_count) {
        code = error_set(error, EKV_EINVAL, 0, "ekv_rail_reset", "rail %u of %u rails", rail,
                         engine->rail_count);
    } else if (!rail_can_reopen(&engine->rails[rail])) {
        code = error_set(error, EKV_ENOTSUP, 0, "ekv_rail_reset",
                         "%s binds memory to endpoints, so a new endpoint would need new keys",
                         engine->rails[rail].nic.provider);
    } else {
        code = rail_reset(engine, rail, rail_asked, error);
        pthread_mutex_lock(&engine->mender.lock);
        mender_note(&engine->mender, rail, code, rail_asked);
        pthread_mutex_unlock(&engine->mender.lock);
    }
    engine_leave(engine);
    return code;
}

int ekv_engine_resets(struct ekv_engine *engine, uint64_t *count)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    if (count) {
        *count = atomic_load(&engine->resets);
        atomic_store(&engine->resets_seen, *count);
        engine_unsignal(engine);
    } else {
        code = EKV_EINVAL;
    }
    engine_leave(engine);
    return code;
}
