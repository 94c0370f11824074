/* wait.c - how a progress thread waits; see engine.h.
 *
 * While something happens it spins, yielding the core; after a quiet spell it blocks
 * on the completion queues and a wake-up descriptor.  Where a provider cannot wake us
 * it sleeps in growing steps instead. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <rdma/fi_errno.h>
#include <sched.h>
#include <unistd.h>

#include "clock.h"
#include "engine.h"

#define WAIT_FIRST_SLEEP_NS (20 * NS_PER_US)
#define WAIT_LONGEST_SLEEP_NS (2 * NS_PER_MS)
/* After a longer rest the first to come waits a little more, and many rails cost less. */
#define WAIT_DORMANT_AFTER_NS (2 * NS_PER_SECOND)
#define WAIT_DORMANT_SLEEP_NS (8 * NS_PER_MS)
/* Deadlines are kept to this while jobs wait for a silent peer. */
#define WAIT_LIVE_SLEEP_NS (5 * NS_PER_MS)
/* While jobs are under way and something happened not long ago. */
#define WAIT_BUSY_SLEEP_NS (50 * NS_PER_US)
#define WAIT_PATIENCE_NS (50 * NS_PER_MS)
#define WAIT_RETRY_SLEEP_NS NS_PER_MS
#define WAIT_IDLE_SLEEP_NS (500 * NS_PER_MS)
/* The wait descriptor of a provider can stay readable with nothing behind it (seen with
 * the native TCP provider of libfabric 1.17 after its first write).  Wake-ups without a
 * completion are normal for a target, but those move bytes in between; many that follow
 * each other faster than that mean a stuck descriptor, which is then left out of a sleep. */
#define WAIT_STUCK_GAP_NS (10 * NS_PER_US)
#define WAIT_STUCK_FIRST 256u
#define WAIT_STUCK_AGAIN 8u
#define WAIT_STUCK_SLEEP_NS (50 * NS_PER_US)
#define WAIT_STUCK_LONGEST_NS (5 * NS_PER_MS)

struct wait_set {
    struct pollfd fds[RAILS_MAX + 1];
    uint32_t count;
    bool complete; /* every rail can wake us */
    bool ready;    /* a rail has something already */
};

static void wait_set_fill(struct group *group, struct wait_set *set)
{
    struct ekv_engine *engine = group->engine;

    set->fds[0] = (struct pollfd){.fd = group->wake_fd, .events = POLLIN};
    set->count = 1;
    set->complete = true;
    set->ready = false;
    for (uint32_t i = 0; i < group->rail_count; i++) {
        struct rail *rail = &engine->rails[group->rail_first + i];
        struct fid *fids[1];

        if (!rail->endpoint)
            continue;
        if (rail->wait_fd < 0 || group->stuck_sleep_ns > 0) {
            set->complete = false;
            continue;
        }
        fids[0] = &rail->completions->fid;
        if (fi_trywait(rail->fabric, fids, 1) != FI_SUCCESS)
            set->ready = true;
        set->fds[set->count++] = (struct pollfd){.fd = rail->wait_fd, .events = POLLIN};
    }
}

/* How long to sleep at most. */
static uint64_t wait_bound_ns(struct group *group, bool complete)
{
    bool pending = group->live_count > 0 || group->warm_count > 0 || group->removing_count > 0;
    uint64_t rested_ns = clock_now_ns() - group->active_ns;
    uint64_t longest = WAIT_LONGEST_SLEEP_NS;

    if (complete)
        longest = pending ? WAIT_LIVE_SLEEP_NS : WAIT_IDLE_SLEEP_NS;
    else if (!pending && rested_ns >= WAIT_DORMANT_AFTER_NS)
        longest = WAIT_DORMANT_SLEEP_NS;
    /* A full provider says nothing when it has room again. */
    if (group->active_count > 0)
        longest = WAIT_RETRY_SLEEP_NS;
    if (!complete && group->live_count > 0 && rested_ns < WAIT_PATIENCE_NS)
        longest = WAIT_BUSY_SLEEP_NS;

    if (complete)
        return longest;
    group->idle_ns = group->idle_ns ? group->idle_ns * 2 : WAIT_FIRST_SLEEP_NS;
    if (group->idle_ns > longest)
        group->idle_ns = longest;
    return group->idle_ns;
}

static bool group_has_calls(struct group *group)
{
    return atomic_load(&group->commands_waiting) || !ring_is_empty(&group->submissions) ||
           atomic_load(&group->stop);
}

/* Tells stuck descriptors from busy ones by how soon one wake-up follows the other. */
static void group_judge_wake(struct group *group, const struct wait_set *set, uint64_t asleep_ns)
{
    uint64_t now_ns = clock_now_ns();
    bool blocked = now_ns - asleep_ns >= WAIT_STUCK_GAP_NS;
    bool soon = now_ns - group->woken_ns < WAIT_STUCK_GAP_NS;
    bool by_rail = false;

    group->woken_ns = now_ns;
    if (group->stuck_sleep_ns > 0) {
        group->stuck_sleep_ns = 0; /* slept without them; now they are tried again */
        return;
    }
    for (uint32_t i = 1; i < set->count; i++)
        by_rail |= set->fds[i].revents != 0;
    if (blocked || !by_rail)
        group->futile_streaks = 0; /* it was not readable all the time */
    if (blocked || !by_rail || !soon) {
        group->futile_wakes = 0;
        return;
    }
    if (++group->futile_wakes < (group->futile_streaks ? WAIT_STUCK_AGAIN : WAIT_STUCK_FIRST))
        return;
    group->futile_wakes = 0;
    group->stuck_sleep_ns = WAIT_STUCK_SLEEP_NS
                            << (group->futile_streaks < 7 ? group->futile_streaks : 7);
    group->futile_streaks++;
    if (group->stuck_sleep_ns > WAIT_STUCK_LONGEST_NS)
        group->stuck_sleep_ns = WAIT_STUCK_LONGEST_NS;
    if (group->live_count > 0)
        group->stuck_sleep_ns = WAIT_STUCK_SLEEP_NS;
}

void group_wait(struct group *group, bool worked)
{
    struct wait_set set;
    struct timespec bound;
    uint64_t asleep_ns;
    uint64_t drained;

    if (worked) {
        group->idle_ns = 0;
        group->futile_wakes = 0;
        group->futile_streaks = 0;
        return;
    }
    if (clock_now_ns() - group->active_ns < group->engine->spin_ns) {
        sched_yield();
        return;
    }
    wait_set_fill(group, &set);
    if (set.ready)
        return;
    bound = clock_timespec(group->stuck_sleep_ns > 0 ? group->stuck_sleep_ns
                                                     : wait_bound_ns(group, set.complete));
    asleep_ns = clock_now_ns();
    atomic_store(&group->sleeping, true);
    atomic_thread_fence(memory_order_seq_cst);
    if (!group_has_calls(group) && ppoll(set.fds, set.count, &bound, NULL) >= 0)
        group_judge_wake(group, &set, asleep_ns);
    atomic_store(&group->sleeping, false);
    while (read(group->wake_fd, &drained, sizeof drained) > 0)
        ;
    if (group->rail_count > 0)
        counter_add(&group->engine->rails[group->rail_first].counters.progress_wakeups, 1);
}
