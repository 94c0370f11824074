/* choice.c - see choice.h.
 *
 * A job is shared by all groups, and each posts on its own rails alone.  So that its
 * stripes are spread over all rails and not over those of whoever wakes first, a group
 * takes a stripe only when the best rail of all is its own; else it calls the group
 * whose turn it is and looks again later.  What it knows of other groups' rails are
 * their outstanding bytes and their standing with the peer, as they last published them.
 * A group that has not looked up CHOICE_PATIENCE_NS after a call, because it is inside
 * some long call of its own, is passed over until it does. */
#include "choice.h"

#include <string.h>

#include "clock.h"
#include "stripe.h"

/* A peer that has not settled anything for this long gets no more than a few. */
#define CHOICE_SILENT_NS (500 * NS_PER_MS)
#define CHOICE_SILENT_LIMIT 4u
#define CHOICE_PATIENCE_NS (250 * NS_PER_MS)
/* Host memory uses a far rail once every near one has this much more to do: a light
 * load stays on its own processor's side, a heavy one has all NICs. */
#define CHOICE_SPILL_BYTES (UINT64_C(4) << 20)
/* Two groups are even when they differ by less than this part of a rail's share of the
 * job; passing the turn for every small stripe would cost more than it mends. */
#define CHOICE_EVEN_PART 64u

/* A rail that is out is probed now and then; with desperate set it is used when nothing
 * better is left. */
static bool rail_is_open(const struct rail *rail, uint64_t now_ns, bool desperate)
{
    return rail->endpoint && (desperate || health_allows(&rail->health, rail->in_flight, now_ns));
}

static bool rail_has_credit(struct group *group, const struct peer *peer, const struct rail *rail,
                            uint64_t now_ns)
{
    const struct peer_rail *side = &peer->rails[rail->index];
    uint32_t peers = atomic_load_explicit(&group->engine->peers.count, memory_order_relaxed);

    if (!rail->endpoint || rail->in_flight >= rail->depth)
        return false;
    if (side->again_round == group->round)
        return false;
    if (side->in_flight >= stripe_peer_limit(rail->depth, rail->in_flight, side->in_flight, peers))
        return false;
    return peers <= 1 || side->in_flight < CHOICE_SILENT_LIMIT ||
           now_ns - side->settled_ns < CHOICE_SILENT_NS;
}

/* Of the peer's NICs with a key, the one at this rail's seat first, then the others. */
static int choose_nic(const struct errand *errand, uint32_t rail, uint64_t now_ns, bool desperate)
{
    const struct peer *peer = errand->job->peer;
    const struct peer_rail *side = &peer->rails[rail];
    const struct remote_region *remote = errand->remote;
    uint32_t seat = errand->region->reach.seats[rail];
    uint64_t left;

    if (!side->compatible || !(errand->region->reach.rails >> rail & 1))
        return -1;
    for (uint32_t i = 0; i < remote->nic_count; i++) {
        uint32_t nic = remote->nics[(seat + i) % remote->nic_count];
        const struct path *path = &side->paths[nic];

        if (path->usable && (path->state != PATH_FAILED || desperate || now_ns >= path->retry_ns) &&
            remote_key_at(remote, nic, errand->remote_address, &left))
            return (int)nic;
    }
    return -1;
}

/* A rail with no more than a stripe to go counts as idle, so that what it has carried
 * decides: completions that nobody has read yet must not make it look busy. */
static void rail_load(const struct ekv_engine *engine, const struct rail *rail,
                      struct stripe_rail *choice)
{
    uint64_t outstanding = atomic_load_explicit(&rail->outstanding_bytes, memory_order_relaxed);

    choice->outstanding_bytes =
        outstanding > engine->stripe_bytes ? outstanding - engine->stripe_bytes : 0;
    choice->carried_bytes = atomic_load_explicit(&rail->carried_bytes, memory_order_relaxed);
}

/* One of this group's rails as it is now; publishes how it stands with the peer. */
static void survey_rail(struct group *group, const struct errand *errand, uint32_t r,
                        uint64_t now_ns, bool desperate)
{
    const struct rail *rail = &group->engine->rails[r];
    const struct peer *peer = errand->job->peer;
    struct stripe_rail *choice = &group->survey.choices[r];
    int standing = STANDING_READY;
    int nic = rail_is_open(rail, now_ns, desperate) ? choose_nic(errand, r, now_ns, desperate) : -1;

    group->survey.nics[r] = nic;
    choice->reachable = nic >= 0;
    choice->usable = nic >= 0 && rail_has_credit(group, peer, rail, now_ns);
    choice->rank = errand->region->reach.ranks[r];
    rail_load(group->engine, rail, choice);
    if (!choice->usable)
        standing = choice->reachable ? STANDING_FULL : STANDING_OUT;
    if (errand->region->reach.rails >> r & 1 &&
        atomic_load_explicit(&peer->rails[r].standing, memory_order_relaxed) != standing)
        atomic_store_explicit(&peer->rails[r].standing, standing, memory_order_relaxed);
}

static void survey_own(struct group *group, const struct errand *errand, uint64_t now_ns,
                       bool desperate)
{
    struct survey *survey = &group->survey;

    survey->turn = desperate ? 0 : group->turn;
    survey->region = errand->region;
    survey->remote = errand->remote;
    survey->chosen = group->rail_first;
    survey->level = !desperate;
    for (uint32_t i = 0; i < group->rail_count; i++) {
        uint32_t r = group->rail_first + i;

        survey_rail(group, errand, r, now_ns, desperate);
        survey->level &= survey->choices[r].rank == survey->choices[group->rail_first].rank;
    }
}

/* Within a turn only what was chosen last has changed, by what came of it. */
static void survey_again(struct group *group, const struct errand *errand, uint64_t now_ns)
{
    struct survey *survey = &group->survey;

    if (survey->turn == group->turn && survey->region == errand->region &&
        survey->remote == errand->remote)
        survey_rail(group, errand, survey->chosen, now_ns, false);
    else
        survey_own(group, errand, now_ns, false);
}

static bool group_has(const struct group *group, struct job *job)
{
    return (atomic_load(&job->active_groups) | job->called_groups) & 1u << group->index;
}

static bool group_is_late(struct group *group, uint64_t now_ns)
{
    uint64_t called_ns = atomic_load_explicit(&group->called_ns, memory_order_relaxed);

    return called_ns != 0 && now_ns > called_ns + CHOICE_PATIENCE_NS;
}

static void survey_others(struct group *group, const struct errand *errand, uint64_t now_ns,
                          struct stripe_rail *choices)
{
    const struct reach *reach = &errand->region->reach;

    for (uint32_t r = 0; r < group->engine->rail_count; r++) {
        const struct peer_rail *side = &errand->job->peer->rails[r];
        struct group *other;
        int standing;

        if (r - group->rail_first < group->rail_count)
            continue;
        other = rail_group(group->engine, r);
        standing = atomic_load_explicit(&side->standing, memory_order_relaxed);
        choices[r].reachable = (reach->rails >> r & 1) && side->compatible &&
                               errand->remote->nic_count > 0 && standing != STANDING_OUT;
        /* A group without the job does not look, so that it was full says nothing. */
        choices[r].usable = choices[r].reachable && !group_is_late(other, now_ns) &&
                            (standing == STANDING_READY || !group_has(other, errand->job));
        choices[r].rank = reach->ranks[r];
        rail_load(group->engine, &group->engine->rails[r], &choices[r]);
    }
}

/* Sees to it that the group of a rail has the job; false: it cannot be told now. */
static bool call_group(struct group *group, struct job *job, uint32_t rail, uint64_t now_ns)
{
    struct ekv_engine *engine = group->engine;
    struct group *other = rail_group(engine, rail);
    uint64_t never = 0;

    if (!group_has(other, job)) {
        job_hold(&engine->jobs, job);
        if (!ring_push(&other->submissions, SUBMISSION_JOB | job->index)) {
            job_drop(&engine->jobs, job);
            return false;
        }
        job->called_groups |= 1u << other->index;
    }
    atomic_compare_exchange_strong(&other->called_ns, &never, now_ns);
    group_wake(other);
    return true;
}

static bool any_reachable(const struct stripe_rail *choices, uint32_t first, uint32_t count)
{
    bool any = false;

    for (uint32_t i = 0; i < count; i++)
        any |= choices[first + i].reachable != 0;
    return any;
}

/* Whether a rail of this group, or of the others, has a key for the region and a NIC of
 * the peer on its fabric, in whatever state the paths are; *rail is one. */
static bool rails_serve(const struct group *group, const struct errand *errand, bool own,
                        uint32_t *rail)
{
    for (uint32_t r = 0; r < group->engine->rail_count; r++)
        if ((r - group->rail_first < group->rail_count) == own &&
            (errand->region->reach.rails >> r & 1) && errand->job->peer->rails[r].compatible &&
            errand->remote->nic_count > 0) {
            *rail = r;
            return true;
        }
    return false;
}

/* Nothing of this group is free. */
static enum choice choose_none(struct group *group, const struct errand *errand, bool mine,
                               int best, uint64_t now_ns)
{
    uint32_t rail;

    if (mine)
        return CHOICE_WAIT;
    if (rails_serve(group, errand, true, &rail)) {
        /* What fell here goes on there, where the job may be over already. */
        if (best >= 0)
            call_group(group, errand->job, (uint32_t)best, now_ns);
        return best >= 0 ? CHOICE_WAIT : CHOICE_HOPELESS;
    }
    if (!rails_serve(group, errand, false, &rail))
        return CHOICE_HOPELESS;
    return call_group(group, errand->job, best >= 0 ? (uint32_t)best : rail, now_ns)
               ? CHOICE_ELSEWHERE
               : CHOICE_WAIT;
}

/* With one group and rails of one nearness: the best of them, or -1. */
static int choose_simply(const struct group *group)
{
    return group->engine->group_count == 1 && group->survey.level
               ? stripe_choose(group->survey.choices, group->rail_count)
               : -1;
}

/* The best of this group's rails, or -1 with *choice saying why there is none. */
static int choose_fairly(struct group *group, const struct errand *errand, uint64_t now_ns,
                         enum choice *choice)
{
    const struct ekv_engine *engine = group->engine;
    struct stripe_rail choices[RAILS_MAX];
    struct job *job = errand->job;
    size_t choices_bytes = engine->rail_count * sizeof choices[0];
    int best, own;

    memcpy(choices, group->survey.choices, choices_bytes);
    if (engine->group_count > 1)
        survey_others(group, errand, now_ns, choices);
    if (!any_reachable(choices, 0, engine->rail_count)) { /* probe what has failed lately */
        survey_own(group, errand, now_ns, true);
        memcpy(choices, group->survey.choices, choices_bytes);
    }
    stripe_prefer(choices, engine->rail_count, errand->region->reach.bound, CHOICE_SPILL_BYTES);
    best = stripe_choose(choices, engine->rail_count);
    own = stripe_choose(choices + group->rail_first, group->rail_count);
    own = own < 0 ? -1 : own + (int)group->rail_first;
    if (own >= 0 && best != own) {
        uint64_t even = job->plan.total_bytes / engine->rail_count / CHOICE_EVEN_PART;

        if (!stripe_even(&choices[own], &choices[best], even) &&
            call_group(group, job, (uint32_t)best, now_ns)) {
            *choice = CHOICE_WAIT;
            return -1;
        }
    }
    if (own < 0)
        *choice =
            choose_none(group, errand, any_reachable(choices, group->rail_first, group->rail_count),
                        best, now_ns);
    return own;
}

enum choice choose_for_stripe(struct group *group, const struct errand *errand, uint64_t now_ns,
                              struct rail **rail, uint32_t *nic)
{
    enum choice choice;
    uint64_t left;
    int own;

    survey_again(group, errand, now_ns);
    own = choose_simply(group);
    if (own < 0)
        own = choose_fairly(group, errand, now_ns, &choice);
    if (own < 0)
        return choice;
    if (!remote_key_at(errand->remote, (uint32_t)group->survey.nics[own], errand->remote_address,
                       &left)) {
        group->survey.turn = 0; /* it was made for an address with a key on that NIC */
        return choose_for_stripe(group, errand, now_ns, rail, nic);
    }
    group->survey.chosen = (uint32_t)own;
    *rail = &group->engine->rails[own];
    *nic = (uint32_t)group->survey.nics[own];
    return CHOICE_MADE;
}

bool rail_elsewhere(const struct group *group, const struct peer *peer, uint32_t *rail)
{
    const struct ekv_engine *engine = group->engine;

    for (uint32_t r = 0; r < engine->rail_count; r++)
        if (r - group->rail_first >= group->rail_count && peer->rails[r].compatible &&
            atomic_load(&peer->rails[r].standing) != STANDING_OUT &&
            !(atomic_load(&engine->rails[r].flags) & EKV_NIC_DOWN)) {
            *rail = r;
            return true;
        }
    return false;
}

/* Says that nothing here leads to the peer, so that no group passes the job back, and
 * passes it to a group where something does. */
static bool call_elsewhere(struct group *group, struct job *job, uint64_t now_ns)
{
    uint32_t rail;

    for (uint32_t i = 0; i < group->rail_count; i++)
        atomic_store(&job->peer->rails[group->rail_first + i].standing, STANDING_OUT);
    return rail_elsewhere(group, job->peer, &rail) && call_group(group, job, rail, now_ns);
}

enum choice choose_for_message(struct group *group, struct job *job, uint64_t now_ns,
                               struct rail **rail, uint32_t *nic)
{
    const struct peer *peer = job->peer;

    for (int desperate = 0; desperate < 2; desperate++) {
        struct stripe_rail choices[RAILS_MAX] = {0};
        int nics[RAILS_MAX];
        int chosen;

        for (uint32_t i = 0; i < group->rail_count; i++) {
            const struct rail *own = &group->engine->rails[group->rail_first + i];

            nics[i] = rail_is_open(own, now_ns, desperate)
                          ? peer_choose_nic(peer, own->index, now_ns, desperate)
                          : -1;
            choices[i].reachable = nics[i] >= 0;
            choices[i].usable = nics[i] >= 0 && rail_has_credit(group, peer, own, now_ns);
            rail_load(group->engine, own, &choices[i]);
        }
        if (!any_reachable(choices, 0, group->rail_count)) {
            if (!desperate && call_elsewhere(group, job, now_ns))
                return CHOICE_ELSEWHERE;
            continue; /* every path failed lately: probe one */
        }
        chosen = stripe_choose(choices, group->rail_count);
        if (chosen < 0)
            return CHOICE_WAIT;
        *rail = &group->engine->rails[group->rail_first + (uint32_t)chosen];
        *nic = (uint32_t)nics[chosen];
        return CHOICE_MADE;
    }
    return CHOICE_HOPELESS;
}
