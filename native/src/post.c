/* post.c - turning jobs into operations; see engine.h.
 *
 * Jobs take turns of a few stripes, so that no job and no peer holds up the others.
 * A stripe goes to the rail with the least bytes outstanding, is cut at the
 * registration seams of both sides, and is posted with the local descriptor and the
 * remote address form that the provider asked for. */
#include <assert.h>
#include <rdma/fi_errno.h>
#include <string.h>

#include "clock.h"
#include "near_process.h"
#include "post.h"
#include "stripe.h"

#define POST_TURN_STRIPES 16u
#define POST_ROUND_STRIPES 256u
#define POST_NEAR_TURN_BYTES (UINT64_C(256) << 10)
/* A provider that takes nothing at all for a peer for this long cannot reach it. */
#define POST_UNREACHABLE_NS (3 * NS_PER_SECOND)

bool group_path(struct peer *peer, struct rail *rail, uint32_t nic, fi_addr_t *address)
{
    struct peer_rail *side = &peer->rails[rail->index];
    struct path *path = &side->paths[nic];

    if (!rail->endpoint)
        return false;
    if (path->inserted && path->version != peer->nic_versions[nic]) {
        rail_address_retire(rail, path->address);
        path->inserted = false;
    }
    if (!path->inserted) {
        if (path->version != peer->nic_versions[nic]) {
            path_succeed(path); /* what failed was the old address */
            side->again_ns = 0;
        }
        path->version = peer->nic_versions[nic];
        if (!rail_address_take(rail, peer->nics[nic].address, peer->nics[nic].address_length,
                               &path->address)) {
            path_fail(path, clock_now_ns());
            return false;
        }
        path->inserted = true;
    }
    *address = path->address;
    return true;
}

void operation_begin(struct rail *rail, struct operation *operation)
{
    struct peer_rail *side = &operation->peer->rails[rail->index];
    uint64_t peak;

    operation->probe = rail->health.out;
    if (side->in_flight++ == 0)
        side->settled_ns = clock_now_ns();
    if (rail->in_flight++ == 0)
        atomic_store_explicit(&rail->settled_ns, clock_now_ns(), memory_order_relaxed);
    counter_add(&rail->outstanding_bytes, operation->piece.length);
    counter_add(&rail->carried_bytes, operation->piece.length);
    counter_add(&rail->counters.operations_posted, 1);
    atomic_store_explicit(&rail->counters.in_flight, rail->in_flight, memory_order_relaxed);
    peak = atomic_load_explicit(&rail->counters.in_flight_peak, memory_order_relaxed);
    if (rail->in_flight > peak)
        atomic_store_explicit(&rail->counters.in_flight_peak, rail->in_flight,
                              memory_order_relaxed);
}

/* The job's region that holds address; usually the one of the stripe before. */
static struct region *job_region_at(struct memory *memory, struct job *job, uint64_t address)
{
    for (uint32_t i = 0; i < job->region_count; i++) {
        uint32_t at = (job->region_last + i) % job->region_count;
        struct region *region = &memory->regions[job->regions[at]];

        if (address >= region->begin && address < region->end) {
            job->region_last = at;
            return region;
        }
    }
    return NULL;
}

/* Finds the regions of both sides behind the piece.  With the peer's lock held for
 * reading. */
static int aim_find(struct group *group, struct job *job, struct aim *aim)
{
    aim->region = job_region_at(&group->engine->memory, job, aim->piece.local);
    if (!aim->region)
        return EKV_EREGION;
    aim->remote = peer_region_at(job->peer, aim->piece.remote, aim->piece.length);
    if (!aim->remote)
        return EKV_EREMOTEREGION;
    /* A peer changes keys to shut out what was on its way: a job from before must not
     * come in with the new ones. */
    return aim->remote->told > job->region_tells ? EKV_EACCESS : EKV_OK;
}

/* Finds the registrations and cuts the piece where either ends.  With the peer's lock
 * held for reading. */
static void aim_cut(struct aim *aim)
{
    const struct remote_key *key;
    const struct region_chunk *chunk;
    uint64_t local_left = 0, remote_left = 0;
    uint64_t longest = aim->rail->info->ep_attr->max_msg_size;

    chunk = region_chunk_at(aim->region, aim->rail->index, aim->piece.local, &local_left);
    key = remote_key_at(aim->remote, aim->nic, aim->piece.remote, &remote_left);
    assert(chunk && key); /* the choice was among rails and NICs that have them */
    aim->key = key->key;
    aim->remote_address = key->base + (aim->piece.remote - aim->remote->begin - key->offset_bytes);
    aim->descriptor = chunk->descriptor;
    aim->piece.length = stripe_cut(aim->piece.length, local_left, remote_left);
    if (longest && aim->piece.length > longest)
        aim->piece.length = longest;
}

/* The rail and NIC for the piece; any answer but TURN_POSTED is the end of the turn. */
static enum turn aim_choose(struct group *group, struct job *job, uint64_t now_ns, struct aim *aim)
{
    struct errand errand = {.job = job,
                            .region = aim->region,
                            .remote = aim->remote,
                            .remote_address = aim->piece.remote};

    switch (choose_for_stripe(group, &errand, now_ns, &aim->rail, &aim->nic)) {
    case CHOICE_MADE:
        return TURN_POSTED;
    case CHOICE_WAIT:
        return TURN_BLOCKED;
    case CHOICE_ELSEWHERE:
        return TURN_OVER; /* nothing of it is for this group, until it is called again */
    default:
        job_fail(job, EKV_EPEER, 0, "no path to the peer is left on which both sides have keys");
        return TURN_OVER;
    }
}

/* Back-pressure is normal while operations are in flight.  With none in flight it means
 * that no connection comes about: some providers say nothing else about a dead peer. */
static enum turn operation_refused(struct group *group, struct job *job, struct peer_rail *side,
                                   struct path *path)
{
    uint64_t now_ns = clock_now_ns();

    if (side->in_flight > 0) {
        side->again_ns = 0;
        return TURN_AGAIN;
    }
    if (side->again_ns == 0)
        side->again_ns = now_ns;
    if (now_ns - side->again_ns < POST_UNREACHABLE_NS)
        return TURN_AGAIN;
    side->again_ns = 0; /* the next job gets as long again */
    path_fail(path, now_ns);
    if (job_has_detour(group, job, now_ns))
        return TURN_AGAIN;
    job_fail(job, EKV_EPEER, 0, "the provider accepts nothing for the peer: no connection");
    return TURN_OVER;
}

/* What came of handing an operation to the provider. */
enum turn operation_posted(struct group *group, struct job *job, const struct aim *aim,
                           struct operation *operation, ssize_t answer)
{
    struct rail *rail = aim->rail;
    struct peer_rail *side = &job->peer->rails[rail->index];
    int code;

    if (answer == 0) {
        operation_begin(rail, operation);
        side->again_ns = 0;
        job->unsettled++;
        if (job->rails && operation->kind != OPERATION_NOTICE &&
            job->rails[rail->index].operations++ == 0)
            job->rails[rail->index].begun_ns = atomic_load(&group->turned_ns);
        if (!job->first_posted) {
            job->first_posted = true;
            trace_job(group->engine, EKV_TRACE_FIRST_POST, job, rail->index);
        }
        return TURN_POSTED;
    }
    inflight_give(&rail->inflight, operation, 0);
    if (answer == -FI_EAGAIN) {
        counter_add(&rail->counters.again, 1);
        side->again_round = group->round;
        return operation_refused(group, job, side, &side->paths[aim->nic]);
    }
    counter_add(&rail->counters.operations_failed, 1);
    code = rail_classify(rail, (int)-answer, 0);
    peer_path_fail(job->peer, rail->index, aim->nic, code, clock_now_ns());
    if (code == EKV_ERAIL)
        rail_note_failure(group->engine, rail, rail->health.out, rail_strerror(rail, (int)answer),
                          clock_now_ns());
    if (code != EKV_EACCESS && job_has_detour(group, job, clock_now_ns()))
        return TURN_AGAIN;
    job_fail(job, code, (int)-answer, rail_strerror(rail, (int)answer));
    return TURN_OVER;
}

struct operation *aim_operation(struct job *job, const struct aim *aim, enum operation_kind kind,
                                uint64_t now_ns)
{
    struct operation *operation = inflight_take(&aim->rail->inflight, now_ns);

    if (!operation)
        return NULL;
    operation->kind = kind;
    operation->job = job;
    operation->peer = job->peer;
    operation->nic = aim->nic;
    operation->version = job->peer->rails[aim->rail->index].paths[aim->nic].version;
    return operation;
}

/* Posts (the first part of) a stripe and shortens aim->piece to what went. */
static enum turn aim_post(struct group *group, struct job *job, struct aim *aim, uint32_t attempts,
                          uint64_t now_ns)
{
    struct operation *operation;
    enum turn turn = aim_choose(group, job, now_ns, aim);

    if (turn != TURN_POSTED)
        return turn;
    aim_cut(aim);
    if (!group_path(job->peer, aim->rail, aim->nic, &aim->address))
        return TURN_BLOCKED;
    operation = aim_operation(job, aim, OPERATION_DATA, now_ns);
    if (!operation)
        return TURN_BLOCKED;
    if (!region_enter(aim->region)) {
        inflight_give(&aim->rail->inflight, operation, 0);
        return TURN_BLOCKED;
    }
    operation->is_read = job->operation == EKV_READ;
    operation->region = aim->region;
    operation->piece = aim->piece;
    operation->attempts = attempts;
    turn = operation_posted(group, job, aim, operation,
                            rail_post_data(aim->rail, operation, aim->descriptor, aim->address,
                                           aim->remote_address, aim->key));
    if (turn != TURN_POSTED)
        region_leave(aim->region);
    return turn;
}

/* With job->lock and, for reading, the peer's lock held. */
static enum turn job_post_stripe(struct group *group, struct job *job, uint64_t now_ns)
{
    struct retry *retry = job->retry_count ? &job->retries[job->retry_count - 1] : NULL;
    struct aim aim;
    enum turn turn;
    int code;

    if (retry) {
        aim.piece = retry->piece;
    } else if (!plan_peek(&job->plan, &aim.piece)) {
        if (!job->plan_over)
            trace_job(group->engine, EKV_TRACE_LAST_POST, job, 0);
        job->plan_over = true;
        return TURN_OVER;
    }
    code = aim_find(group, job, &aim);
    if (code != EKV_OK) {
        job_fail(job, code, 0,
                 code == EKV_EREGION   ? "a local region went away"
                 : code == EKV_EACCESS ? "the peer changed its keys after the job was submitted"
                                       : "the peer's region went away");
        return TURN_OVER;
    }
    turn = aim_is_staged(&aim)
               ? aim_post_staged(group, job, &aim, retry ? retry->attempts : 0, now_ns)
               : aim_post(group, job, &aim, retry ? retry->attempts : 0, now_ns);
    if (turn != TURN_POSTED)
        return turn;
    atomic_store_explicit(&job->descriptors, atomic_load(&job->descriptors) + 1,
                          memory_order_relaxed);
    if (!retry) {
        plan_consume(&job->plan, aim.piece.length);
    } else if ((retry->piece.length -= aim.piece.length) == 0) {
        job->retry_count--;
    } else {
        retry->piece.local += aim.piece.length;
        retry->piece.remote += aim.piece.length;
    }
    return TURN_POSTED;
}

/* With job->lock and, for reading, the peer's lock held. */
static enum turn job_post_flush(struct group *group, struct job *job, uint64_t now_ns)
{
    for (uint32_t i = 0; i < job->flush_count; i++) {
        struct flush *flush = &job->flushes[i];
        struct aim aim = {.nic = flush->nic, .piece = {.remote = flush->remote, .length = 1}};
        struct operation *operation;
        const struct remote_region *remote;
        const struct remote_key *key = NULL;
        uint64_t left;
        enum turn turn;

        if (flush->posted || flush->rail < group->rail_first ||
            flush->rail >= group->rail_first + group->rail_count)
            continue;
        aim.rail = &group->engine->rails[flush->rail];
        if (!aim.rail->endpoint || aim.rail->in_flight >= aim.rail->depth ||
            !group_path(job->peer, aim.rail, aim.nic, &aim.address))
            return TURN_BLOCKED;
        remote = peer_region_at(job->peer, flush->remote, 1);
        if (remote)
            key = remote_key_at(remote, aim.nic, flush->remote, &left);
        if (key) {
            aim.key = key->key;
            aim.remote_address = key->base + (flush->remote - remote->begin - key->offset_bytes);
        }
        operation = key ? aim_operation(job, &aim, OPERATION_FLUSH, now_ns) : NULL;
        if (!key)
            job_fail(job, EKV_EREMOTEREGION, 0, "the peer's region went away");
        if (!operation)
            return key ? TURN_BLOCKED : TURN_OVER;
        turn = operation_posted(
            group, job, &aim, operation,
            rail_post_flush(aim.rail, operation, aim.address, aim.remote_address, aim.key));
        flush->posted = turn == TURN_POSTED;
        return turn == TURN_AGAIN ? TURN_BLOCKED : turn; /* no other rail will do */
    }
    return TURN_OVER;
}

/* With job->lock held. */
static enum turn job_post_notice(struct group *group, struct job *job, uint64_t now_ns)
{
    ekv_notice notice = job->notice;
    struct operation *operation;
    struct aim aim = {0};
    enum choice choice;
    enum turn turn;

    if (job->unsettled > 0 || job->notice_over)
        return TURN_OVER; /* it is under way, or given up */
    notice.bytes = atomic_load(&job->bytes);
    notice.sender = group->engine->incarnation;
    if (job->near) {
        job->notice_status = near_notify(job, &notice);
        job->notice_over = true;
        return TURN_OVER;
    }
    choice = choose_for_message(group, job, now_ns, &aim.rail, &aim.nic);
    if (choice == CHOICE_HOPELESS) {
        job->notice_status = EKV_EPEER;
        job->notice_over = true;
    }
    if (choice != CHOICE_MADE)
        return choice == CHOICE_WAIT ? TURN_BLOCKED : TURN_OVER;
    if (!group_path(job->peer, aim.rail, aim.nic, &aim.address))
        return TURN_BLOCKED;
    operation = aim_operation(job, &aim, OPERATION_NOTICE, now_ns);
    if (!operation)
        return TURN_BLOCKED;
    notice_encode(operation->message, NOTICE_KIND_JOB, &notice);
    turn = operation_posted(group, job, &aim, operation,
                            rail_post_message(aim.rail, operation, aim.address));
    if (turn == TURN_OVER) { /* the data has landed all the same */
        job->notice_status = job->status;
        job->notice_over = true;
        job->status = EKV_OK;
    }
    return turn;
}

/* Memory copies by this thread, a few megabytes at a time. With job->lock held. */
static enum turn job_copy_near(struct group *group, struct job *job)
{
    struct rail *rail = &group->engine->rails[group->rail_first];
    struct piece piece;
    uint64_t copied = 0;

    while (copied < POST_NEAR_TURN_BYTES) {
        int code;

        if (!plan_peek(&job->plan, &piece)) {
            job->plan_over = true;
            return TURN_OVER;
        }
        code = near_copy(group->engine, job, &piece);
        if (code != EKV_OK) {
            job_fail(job, code, 0, "the engine of this process refused the copy");
            return TURN_OVER;
        }
        plan_consume(&job->plan, piece.length);
        copied += piece.length;
        atomic_fetch_add(&job->bytes, piece.length);
        atomic_fetch_add(&job->descriptors, 1);
        counter_add(&rail->counters.operations_near, 1);
        counter_add(&rail->counters.bytes_near, piece.length);
    }
    return TURN_POSTED;
}

/* Copies by the kernel into another process, one batch. With job->lock and, for
 * reading, the peer's lock held. */
static enum turn job_copy_neighbour(struct group *group, struct job *job)
{
    switch (near_process_turn(group, job)) {
    case NEAR_MOVED:
        return TURN_POSTED;
    case NEAR_BLOCKED:
        return TURN_BLOCKED;
    default:
        return TURN_OVER;
    }
}

static enum turn job_post_one(struct group *group, struct job *job, uint64_t now_ns)
{
    if (job->status != EKV_OK || job->stage == JOB_SETTLED)
        return TURN_OVER;
    if (now_ns < job->rests_ns)
        return TURN_BLOCKED;
    if (now_ns >= job->deadline_ns) {
        if (job->stage != JOB_NOTIFYING)
            job_fail(job, EKV_EDEADLINE, 0, "the deadline passed");
        return job->stage != JOB_NOTIFYING ? TURN_OVER : TURN_BLOCKED;
    }
    switch (job->stage) {
    case JOB_MOVING:
        if (job->near)
            return job_copy_near(group, job);
        return job->neighbour ? job_copy_neighbour(group, job)
                              : job_post_stripe(group, job, now_ns);
    case JOB_FLUSHING:
        return job_post_flush(group, job, now_ns);
    default:
        return job_post_notice(group, job, now_ns);
    }
}

/* One job's turn. True: the job stays in the list. */
static bool group_take_turn(struct group *group, struct job *job, uint64_t now_ns, uint32_t *posted)
{
    enum turn turn = TURN_POSTED;
    enum job_stage stage;
    bool over = false;
    bool stays = true;

    group->turn++;
    pthread_mutex_lock(&job->lock);
    if (!job->near)
        pthread_rwlock_rdlock(&job->peer->lock);
    for (uint32_t i = 0; i < POST_TURN_STRIPES && turn <= TURN_AGAIN; i++) {
        /* A copy takes as long here as its bytes; others get their turn after one. */
        uint32_t weight = job->neighbour ? POST_TURN_STRIPES : 1;

        turn = job_post_one(group, job, now_ns);
        *posted += turn == TURN_POSTED ? weight : 0;
        i += weight - 1;
    }
    if (!job->near)
        pthread_rwlock_unlock(&job->peer->lock);
    stage = job->stage;
    if (turn == TURN_OVER) {
        over = job_advance(group, job);
        stays = !over && job->stage != stage; /* the next stage has something to post */
        if (!stays)
            atomic_fetch_and(&job->active_groups, ~(1u << group->index));
    }
    pthread_mutex_unlock(&job->lock);
    if (over)
        job_conclude(group, job);
    return stays;
}

bool group_post(struct group *group, uint64_t now_ns)
{
    uint32_t posted_total = 0;
    uint32_t posted = 1;

    while (posted > 0 && posted_total < POST_ROUND_STRIPES && group->active_count > 0) {
        uint32_t turns = group->active_count;

        posted = 0;
        while (turns-- > 0 && group->active_count > 0) {
            struct job *job;
            uint32_t at = group->active_next % group->active_count;

            job = group->active[at];
            if (group_take_turn(group, job, now_ns, &posted)) {
                group->active_next = at + 1;
                continue;
            }
            /* The last job takes the place; it is next. */
            group->active[at] = group->active[--group->active_count];
            group->active_next = at;
            job_drop(&group->engine->jobs, job);
            posted++;
        }
        posted_total += posted;
    }
    return posted_total > 0;
}
