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
/* Deadlines are kept to this while jobs wait for a silent peer. */
#define WAIT_LIVE_SLEEP_NS (5 * NS_PER_MS)
#define WAIT_RETRY_SLEEP_NS NS_PER_MS
#define WAIT_IDLE_SLEEP_NS (500 * NS_PER_MS)

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
        if (rail->wait_fd < 0) {
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
    uint64_t longest = complete ? (pending ? WAIT_LIVE_SLEEP_NS : WAIT_IDLE_SLEEP_NS)
                                : WAIT_LONGEST_SLEEP_NS;

    /* A full provider says nothing when it has room again. */
    if (group->active_count > 0)
        longest = WAIT_RETRY_SLEEP_NS;

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

void group_wait(struct group *group, bool worked)
{
    struct wait_set set;
    struct timespec bound;
    uint64_t drained;

    if (worked) {
        group->idle_ns = 0;
        return;
    }
    if (clock_now_ns() - group->active_ns < group->engine->spin_ns) {
        sched_yield();
        return;
    }
    wait_set_fill(group, &set);
    if (set.ready)
        return;
    bound = clock_timespec(wait_bound_ns(group, set.complete));
    atomic_store(&group->sleeping, true);
    atomic_thread_fence(memory_order_seq_cst);
    if (!group_has_calls(group))
        ppoll(set.fds, set.count, &bound, NULL);
    atomic_store(&group->sleeping, false);
    while (read(group->wake_fd, &drained, sizeof drained) > 0)
        ;
    if (group->rail_count > 0)
        counter_add(&group->engine->rails[group->rail_first].counters.progress_wakeups, 1);
}
