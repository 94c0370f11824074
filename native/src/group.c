/* group.c - the progress thread of a rail group; see engine.h.
 *
 * One round: run what callers asked for, take new jobs, drain completions, post, look
 * at deadlines, and wait if there was nothing to do. */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "clock.h"
#include "engine.h"
#include "error.h"

#define GROUP_CHECK_INTERVAL_NS NS_PER_MS
#define GROUP_CHECK_LATEST_NS (100 * NS_PER_MS)

struct group *job_home(struct ekv_engine *engine, const struct job *job)
{
    return &engine->groups[job->index % engine->group_count];
}

void group_wake(struct group *group)
{
    const uint64_t one = 1;

    /* Pairs with group_wait, which announces its sleep before it looks for work. */
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load(&group->sleeping))
        return;
    while (write(group->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void group_send(struct group *group, struct command *command)
{
    command->done = false;
    command->next = NULL;
    command->error.struct_size = sizeof command->error;
    pthread_mutex_lock(&group->command_lock);
    if (group->command_last)
        group->command_last->next = command;
    else
        group->command_first = command;
    group->command_last = command;
    atomic_store(&group->commands_waiting, true);
    pthread_mutex_unlock(&group->command_lock);
    group_wake(group);
}

int group_await(struct group *group, struct command *command)
{
    pthread_mutex_lock(&group->command_lock);
    while (!command->done)
        pthread_cond_wait(&group->command_done, &group->command_lock);
    pthread_mutex_unlock(&group->command_lock);
    return command->code;
}

int group_call(struct group *group, struct command *command)
{
    group_send(group, command);
    return group_await(group, command);
}

static bool group_run_commands(struct group *group)
{
    struct command *command;

    if (!atomic_load_explicit(&group->commands_waiting, memory_order_acquire))
        return false;
    pthread_mutex_lock(&group->command_lock);
    command = group->command_first;
    group->command_first = group->command_last = NULL;
    atomic_store(&group->commands_waiting, false);
    pthread_mutex_unlock(&group->command_lock);
    while (command) {
        struct command *next = command->next; /* gone once it is done */

        command->run(group, command);
        pthread_mutex_lock(&group->command_lock);
        command->done = true;
        pthread_cond_broadcast(&group->command_done);
        pthread_mutex_unlock(&group->command_lock);
        command = next;
    }
    return true;
}

void group_activate(struct group *group, struct job *job)
{
    uint32_t bit = 1u << group->index;

    if (atomic_fetch_or(&job->active_groups, bit) & bit)
        return;
    assert(group->active_count < group->engine->jobs.capacity);
    job_hold(&group->engine->jobs, job);
    group->active[group->active_count++] = job;
}

void group_unlist_live(struct group *group, struct job *job)
{
    struct job *last;

    if (!job->live)
        return;
    last = group->live[--group->live_count];
    group->live[job->live_index] = last;
    last->live_index = job->live_index;
    job->live = false;
    job_drop(&group->engine->jobs, job);
}

/* A job comes here when it is new, when a caller cancelled it, and when another group
 * has concluded it. */
void group_accept_job(struct group *group, struct job *job)
{
    struct ekv_engine *engine = group->engine;
    bool over = false;
    bool settled;

    pthread_mutex_lock(&job->lock);
    job->called_groups &= ~(1u << group->index);
    settled = job->stage == JOB_SETTLED;
    if (!settled && !job->live && job_home(engine, job) == group) {
        job->live = true;
        job->live_index = group->live_count;
        group->live[group->live_count++] = job;
        job_hold(&engine->jobs, job);
    }
    if (!settled && job->status != EKV_OK)
        over = job_advance(group, job);
    pthread_mutex_unlock(&job->lock);
    if (over)
        job_conclude(group, job);
    else if (!settled)
        group_activate(group, job);
    else if (job_home(engine, job) == group)
        group_unlist_live(group, job); /* another group has concluded it */
    job_drop(&engine->jobs, job);
}

static bool group_take_submissions(struct group *group)
{
    struct ekv_engine *engine = group->engine;
    uint64_t value;
    bool any = false;

    while (ring_pop(&group->submissions, &value)) {
        uint32_t index = (uint32_t)value;

        any = true;
        if (value & SUBMISSION_PEER_REMOVED) {
            pthread_rwlock_rdlock(&engine->peers.lock);
            group->removing[group->removing_count++] = engine->peers.peers[index];
            pthread_rwlock_unlock(&engine->peers.lock);
            group->checked_ns = 0; /* its jobs are failed in this very round */
        } else {
            group_accept_job(group, &engine->jobs.slots[index]);
        }
    }
    return any;
}

/* Lets go of a removed peer once no job can touch it any more. */
static void group_remove_peers(struct group *group)
{
    struct ekv_engine *engine = group->engine;

    for (uint32_t i = 0; i < group->removing_count;) {
        struct peer *peer = group->removing[i];

        if (atomic_load(&peer->jobs) > 0) {
            i++;
            continue;
        }
        for (uint32_t r = group->rail_first; r < group->rail_first + group->rail_count; r++)
            for (uint32_t n = 0; n < peer->nic_count; n++)
                if (peer->rails[r].paths[n].inserted && engine->rails[r].endpoint)
                    rail_address_give(&engine->rails[r], peer->rails[r].paths[n].address);
        if (atomic_fetch_sub(&peer->groups_left, 1) == 1)
            peer_give(&engine->peers, peer, engine->rail_count);
        group->removing[i] = group->removing[--group->removing_count];
    }
}

static void group_look_after_rails(struct group *group, uint64_t now_ns)
{
    struct ekv_engine *engine = group->engine;

    for (uint32_t i = 0; i < group->rail_count; i++) {
        struct rail *rail = &engine->rails[group->rail_first + i];

        if (!rail->endpoint)
            continue;
        if (rail->unposted_count > 0)
            rail_post_receives(rail);
        rail_address_sweep(rail);
        rail_drain_events(rail);
        stage_check(group, rail, now_ns);
    }
}

static void *group_main(void *argument)
{
    struct group *group = argument;
    const struct rail *first = &group->engine->rails[group->rail_first];
    char name[16];

    snprintf(name, sizeof name, "efa-kv-rail%u", group->index % 100);
    pthread_setname_np(pthread_self(), name);
    while (!atomic_load_explicit(&group->stop, memory_order_acquire)) {
        uint64_t now_ns = clock_now_ns();
        bool worked = group_run_commands(group);

        atomic_store_explicit(&group->turned_ns, now_ns, memory_order_relaxed);
        group->round++;
        if (atomic_load_explicit(&group->called_ns, memory_order_relaxed))
            atomic_store_explicit(&group->called_ns, 0, memory_order_relaxed);
        worked |= group_take_submissions(group);
        rail_guard_enter(first);
        worked |= group_drain(group, now_ns);
        worked |= stage_answer_deferred(group, now_ns);
        worked |= group_post_warms(group, now_ns);
        worked |= group_post(group, now_ns);
        rail_guard_leave(first);
        /* Only after an empty queue is a deadline really missed; but a queue that never
         * runs empty must not put it off for ever. */
        if (now_ns - group->checked_ns >=
            (group->drained ? GROUP_CHECK_INTERVAL_NS : GROUP_CHECK_LATEST_NS)) {
            group->checked_ns = now_ns;
            group_check_deadlines(group, now_ns);
            group_remove_peers(group);
            group_check_stuck(group, now_ns);
            group_look_after_rails(group, now_ns);
        }
        if (worked)
            group->active_ns = now_ns;
        group_wait(group, worked);
    }
    group_run_commands(group);
    return NULL;
}

static bool group_allocate(struct group *group)
{
    struct ekv_engine *engine = group->engine;
    uint32_t jobs = engine->jobs.capacity;

    group->active = calloc(jobs, sizeof(struct job *));
    group->live = calloc(jobs, sizeof(struct job *));
    group->removing = calloc(engine->peers.capacity, sizeof(struct peer *));
    /* Room for every job twice (new, and once more for a cancel) and every peer;
     * pushes beyond that are refused to the caller. */
    return group->active && group->live && group->removing &&
           ring_open(&group->submissions, 4 * (size_t)jobs + engine->peers.capacity);
}

int group_start(struct group *group, ekv_error *error)
{
    sigset_t all, before;
    int answer;

    pthread_mutex_init(&group->command_lock, NULL);
    pthread_cond_init(&group->command_done, NULL);
    group->made = true;
    group->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (group->wake_fd < 0)
        return error_set(error, EKV_ESYSTEM, errno, "eventfd", "%s", strerror(errno));
    if (!group_allocate(group))
        return error_set(error, EKV_ENOMEM, 0, "group_start", "out of memory");
    /* Signals are the business of the application's own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    answer = pthread_create(&group->thread, NULL, group_main, group);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (answer != 0)
        return error_set(error, EKV_ESYSTEM, answer, "pthread_create", "%s", strerror(answer));
    group->started = true;
    return EKV_OK;
}

void group_stop(struct group *group)
{
    if (!group->made)
        return;
    if (group->started) {
        atomic_store(&group->stop, true);
        group_wake(group);
        pthread_join(group->thread, NULL);
    }
    if (group->wake_fd > 0)
        close(group->wake_fd);
    ring_close(&group->submissions);
    free(group->active);
    free(group->live);
    free(group->removing);
    free(group->warms);
    pthread_mutex_destroy(&group->command_lock);
    pthread_cond_destroy(&group->command_done);
}
