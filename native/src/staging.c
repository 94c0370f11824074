/* staging.c - see staging.h. */
#define _GNU_SOURCE
#include "staging.h"

#include <assert.h>
#include <rdma/fi_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "clock.h"
#include "cuda.h"
#include "engine.h"
#include "error.h"
#include "post.h"

#define STAGE_MAGIC UINT32_C(0x53464b45) /* "EKFS" */
#define STAGE_VERSION 1u
#define STAGE_COOKIE_SLOT_BITS 20u
/* How long a failed job waits for answers, which tell what has landed of it. */
#define STAGE_PATIENCE_NS (500 * NS_PER_MS)
#define STAGE_KEY_SLOT_BITS 20u

/* What is sent happens before what is received, which the thread sanitizer cannot see where
 * two engines of one process talk by way of libfabric. */
#ifdef __SANITIZE_THREAD__
void __tsan_acquire(void *place);
void __tsan_release(void *place);
static char wire;
#define BEFORE_SENDING() __tsan_release(&wire)
#define AFTER_RECEIVING() __tsan_acquire(&wire)
#else
#define BEFORE_SENDING() ((void)0)
#define AFTER_RECEIVING() ((void)0)
#endif

static size_t stage_slab_bytes(void)
{
    return sizeof(struct staged_message) + STAGE_BYTES;
}

static struct staged_message *slab_at(const struct stage *stage, uint32_t slab)
{
    return (struct staged_message *)(stage->room + slab * stage_slab_bytes());
}

uint64_t stage_key_draw(uint32_t slot)
{
    uint64_t key = 0;

    if (getrandom(&key, sizeof key, 0) != sizeof key)
        key = clock_now_ns() * UINT64_C(0x9e3779b97f4a7c15);
    return (key | UINT64_C(1) << 63) << STAGE_KEY_SLOT_BITS | slot;
}

int stage_open(struct rail *rail, struct cuda *cuda, ekv_error *error)
{
    struct stage *stage = calloc(1, sizeof *stage);
    size_t count = rail->receive_count + STAGE_REQUESTS + STAGE_ANSWERS;
    size_t bytes = count * stage_slab_bytes();
    void *room = NULL;
    uint32_t next = 0;
    int answer;

    rail->stage = stage;
    if (!stage || posix_memalign(&room, 4096, bytes) != 0)
        return error_set(error, EKV_ENOMEM, 0, "stage_open", "out of memory");
    memset(room, 0, bytes);
    stage->room = room;
    stage->cuda = cuda;
    stage->receive_count = rail->receive_count;
    stage->deferred = calloc(rail->receive_count, sizeof(struct operation *));
    if (!stage->deferred)
        return error_set(error, EKV_ENOMEM, 0, "stage_open", "out of memory");
    answer = rail_register(
        rail, &(struct rail_memory){.address = room, .length = bytes, .device = -1, .dmabuf = -1},
        FI_SEND | FI_RECV, UINT64_C(1) << 61 | rail->index, &stage->mr);
    if (answer != 0)
        return error_set(error, EKV_EREGISTER, -answer, "fi_mr_reg",
                         "%s refused %zu bytes for staging GPU memory: %s", rail->nic.name, bytes,
                         rail_strerror(rail, answer));
    stage->descriptor = fi_mr_desc(stage->mr);
    for (size_t i = 0; i < rail->inflight.count; i++)
        if (rail->inflight.slots[i].kind == OPERATION_RECEIVE)
            rail->inflight.slots[i].message = (void *)slab_at(stage, next++);
    assert(next == rail->receive_count);
    for (uint32_t i = 0; i < STAGE_REQUESTS; i++)
        stage->free_requests[stage->free_request_count++] = next++;
    for (uint32_t i = 0; i < STAGE_ANSWERS; i++)
        stage->free_answers[stage->free_answer_count++] = next++;
    rail->receive_bytes = stage_slab_bytes();
    rail->receive_descriptor = stage->descriptor;
    return EKV_OK;
}

void stage_close(struct rail *rail)
{
    struct stage *stage = rail->stage;

    if (!stage)
        return;
    if (stage->mr)
        fi_close(&stage->mr->fid);
    if (stage->pinned)
        cuda_unpin(stage->cuda, stage->room);
    free(stage->deferred);
    free(stage->room);
    free(stage);
    rail->stage = NULL;
}

void stage_reset(struct rail *rail)
{
    if (rail->stage)
        rail->stage->deferred_count = 0;
}

/* Once, when GPU memory is first met: by then its device is in use. */
static void stage_announce(struct rail *rail)
{
    struct stage *stage = rail->stage;
    size_t bytes = (stage->receive_count + STAGE_REQUESTS + STAGE_ANSWERS) * stage_slab_bytes();

    if (stage->announced)
        return;
    stage->announced = true;
    stage->pinned = cuda_pin(stage->cuda, stage->room, bytes);
    log_write(rail->log, LOG_WARNING,
              "rail %u (%s): provider %s does not reach GPU memory, which goes through %zu KiB "
              "of %shost memory; this is slow. Use EFA, or name another provider",
              rail->index, rail->nic.name, rail->nic.provider, bytes >> 10,
              stage->pinned ? "pinned " : "");
}

/* Between a slab and memory of a region. */
static bool stage_copy(struct rail *rail, const struct region *region, void *to, const void *from,
                       size_t length)
{
    int code;

    if (region->kind != EKV_MEMORY_CUDA) {
        memcpy(to, from, length);
        return true;
    }
    stage_announce(rail);
    code = cuda_copy(rail->stage->cuda, region->device, to, from, length);
    if (code != 0)
        log_write(rail->log, LOG_ERROR, "rail %u: GPU %d failed to copy %zu bytes: %s", rail->index,
                  region->device, length, cuda_error(rail->stage->cuda, code));
    return code == 0;
}

static void staged_begin(struct staged_message *message, enum staged_kind kind, uint64_t sender,
                         uint64_t cookie)
{
    memset(message, 0, sizeof *message);
    message->magic = STAGE_MAGIC;
    message->version = STAGE_VERSION;
    message->kind = (uint16_t)kind;
    message->sender = sender;
    message->cookie = cookie;
}

static void slab_give(struct stage *stage, uint32_t slab)
{
    if (slab < stage->receive_count + STAGE_REQUESTS)
        stage->free_requests[stage->free_request_count++] = slab;
    else
        stage->free_answers[stage->free_answer_count++] = slab;
}

void stage_settle(struct rail *rail, struct operation *operation)
{
    if (operation->has_slab)
        slab_give(rail->stage, operation->slab);
    operation->has_slab = false;
    if (operation->sent && !operation->answered)
        rail->stage->waiting--;
    operation->sent = false;
}

/* ---- at the side that asks ------------------------------------------------- */

bool aim_is_staged(const struct aim *aim)
{
    return aim->region->staged || (aim->remote->nic_count == 0 && aim->remote->stage_key != 0);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Whether both sides can do it; else the job has failed. */
static bool aim_can_be_staged(struct job *job, const struct aim *aim)
{
    if (!aim->rail->stage)
        job_fail(job, EKV_ENOTSUP, 0,
                 "the peer's GPU memory is reached by messages, and no CUDA driver is here");
    else if (aim->remote->stage_key == 0)
        job_fail(job, EKV_ENOTSUP, 0,
                 "GPU memory here is reached by messages, and the peer has no CUDA driver");
    return job->status == EKV_OK;
}

/* The request, with the bytes behind it where it brings some. */
static ssize_t request_send(struct group *group, struct aim *aim, struct operation *operation)
{
    struct rail *rail = aim->rail;
    bool is_get = operation->kind == OPERATION_GET;
    struct staged_message *message = slab_at(rail->stage, operation->slab);

    staged_begin(message, is_get ? STAGED_GET : STAGED_PUT, group->engine->incarnation,
                 operation->cookie);
    message->key = aim->remote->stage_key;
    message->address = aim->piece.remote;
    message->length = aim->piece.length;
    if (!is_get && !stage_copy(rail, aim->region, message + 1, (void *)(uintptr_t)aim->piece.local,
                               aim->piece.length))
        return -FI_EIO;
    BEFORE_SENDING();
    return rail_post_buffer(rail, operation, message,
                            sizeof *message + (is_get ? 0 : aim->piece.length),
                            rail->stage->descriptor, aim->address);
}

enum turn aim_post_staged(struct group *group, struct job *job, struct aim *aim, uint32_t attempts,
                          uint64_t now_ns)
{
    struct operation *operation;
    struct stage *stage;
    enum choice choice = choose_for_message(group, job, now_ns, &aim->rail, &aim->nic);
    uint32_t slab;
    enum turn turn;
    bool is_get = job->operation == EKV_READ;

    if (choice == CHOICE_HOPELESS)
        job_fail(job, EKV_EPEER, 0, "no path to the peer is left");
    if (choice != CHOICE_MADE)
        return choice == CHOICE_WAIT ? TURN_BLOCKED : TURN_OVER;
    if (!aim_can_be_staged(job, aim))
        return TURN_OVER;
    stage = aim->rail->stage;
    if (stage->free_request_count == 0)
        return TURN_BLOCKED;
    aim->piece.length = least(aim->piece.length, STAGE_BYTES);
    aim->piece.length = least(aim->piece.length, aim->region->end - aim->piece.local);
    aim->piece.length = least(aim->piece.length, aim->remote->end - aim->piece.remote);
    if (!group_path(job->peer, aim->rail, aim->nic, &aim->address))
        return TURN_BLOCKED;
    operation = aim_operation(job, aim, is_get ? OPERATION_GET : OPERATION_PUT, now_ns);
    if (!operation)
        return TURN_BLOCKED;
    if (!region_enter(aim->region)) {
        inflight_give(&aim->rail->inflight, operation, 0);
        return TURN_BLOCKED;
    }
    operation->is_read = is_get;
    operation->region = aim->region;
    operation->piece = aim->piece;
    operation->attempts = attempts;
    operation->sent = operation->answered = false;
    operation->cookie = ++stage->cookies << STAGE_COOKIE_SLOT_BITS |
                        (uint64_t)(operation - aim->rail->inflight.slots);
    operation->has_slab = true;
    operation->slab = slab = stage->free_requests[--stage->free_request_count];
    turn = operation_posted(group, job, aim, operation, request_send(group, aim, operation));
    if (turn == TURN_POSTED) {
        counter_add(&aim->rail->counters.operations_staged, 1);
        counter_add(&aim->rail->counters.bytes_staged, aim->piece.length);
        return TURN_POSTED;
    }
    slab_give(stage, slab);
    region_leave(aim->region);
    return turn;
}

static void staged_finish(struct group *group, struct rail *rail, struct operation *operation,
                          int status, uint64_t now_ns)
{
    struct outcome outcome = {.code = status, .blameless = true};

    if (status == EKV_EACCESS)
        snprintf(outcome.text, sizeof outcome.text,
                 "the peer refused it: its keys have changed, or the memory is gone");
    else if (status != EKV_OK)
        snprintf(outcome.text, sizeof outcome.text, "%s (staged)", ekv_code_text(status));
    operation_settle(group, rail, operation, &outcome, now_ns);
}

void stage_sent(struct group *group, struct rail *rail, struct operation *operation,
                uint64_t now_ns)
{
    if (operation->sent) { /* some providers complete an operation twice when its peer dies */
        counter_add(&rail->counters.stray_completions, 1);
        return;
    }
    if (operation->answered) {
        staged_finish(group, rail, operation, operation->answer, now_ns);
        return;
    }
    operation->sent = true;
    rail->stage->waiting++;
}

static void stage_take_answer(struct group *group, struct rail *rail,
                              const struct staged_message *message, uint64_t now_ns)
{
    size_t slot = message->cookie & ((UINT64_C(1) << STAGE_COOKIE_SLOT_BITS) - 1);
    struct operation *operation;
    int status = message->status;

    if (slot >= rail->inflight.count)
        return;
    operation = &rail->inflight.slots[slot];
    /* Of an operation that was given up: the slot may have another tenant. */
    if ((operation->kind != OPERATION_PUT && operation->kind != OPERATION_GET) ||
        operation->cookie != message->cookie || operation->answered ||
        operation->peer->incarnation != message->sender)
        return;
    if (operation->kind == OPERATION_GET && status == EKV_OK) {
        if (message->kind != STAGED_DATA || message->length != operation->piece.length)
            status = EKV_EPROVIDER;
        else if (!stage_copy(rail, operation->region, (void *)(uintptr_t)operation->piece.local,
                             message + 1, message->length))
            status = EKV_EPROVIDER;
    }
    if (!operation->sent) { /* the provider still has its message */
        operation->answered = true;
        operation->answer = status;
        return;
    }
    staged_finish(group, rail, operation, status, now_ns);
}

void stage_check(struct group *group, struct rail *rail, uint64_t now_ns)
{
    for (size_t i = 0; rail->stage && rail->stage->waiting > 0 && i < rail->inflight.count; i++) {
        struct operation *operation = &rail->inflight.slots[i];
        uint64_t failed_ns;

        if ((operation->kind != OPERATION_PUT && operation->kind != OPERATION_GET) ||
            !operation->sent)
            continue;
        failed_ns = atomic_load(&operation->job->failed_ns);
        if ((failed_ns != 0 && now_ns > failed_ns + STAGE_PATIENCE_NS) ||
            atomic_load(&operation->peer->state) == PEER_REMOVING)
            staged_finish(group, rail, operation, EKV_EPEER, now_ns);
    }
}

/* ---- at the side that is asked --------------------------------------------- */

static bool staged_is_sound(const struct staged_message *message, size_t length)
{
    bool carries = message->kind == STAGED_PUT || message->kind == STAGED_DATA;

    return message->version == STAGE_VERSION && message->kind >= STAGED_PUT &&
           message->kind <= STAGED_DATA && message->length <= STAGE_BYTES &&
           length == sizeof *message + (carries ? message->length : 0);
}

/* The region that a message means, counted as in use; or NULL and why not. */
static struct region *stage_enter_region(struct memory *memory,
                                         const struct staged_message *message, int *status)
{
    uint32_t slot = message->key & ((UINT64_C(1) << STAGE_KEY_SLOT_BITS) - 1);
    uint32_t access =
        message->kind == STAGED_PUT ? EKV_ACCESS_REMOTE_WRITE : EKV_ACCESS_REMOTE_READ;
    struct region *region = NULL;

    *status = EKV_EACCESS;
    pthread_rwlock_rdlock(&memory->lock);
    if (slot < memory->used)
        region = &memory->regions[slot];
    if (region && (region->state != REGION_READY || region->stage_key != message->key ||
                   !(region->access & access) || message->address < region->begin ||
                   message->address > region->end ||
                   message->length > region->end - message->address || !region_enter(region)))
        region = NULL;
    pthread_rwlock_unlock(&memory->lock);
    if (region)
        *status = EKV_OK;
    return region;
}

/* Does what is asked, into or out of an answer. */
static int stage_obey(struct group *group, struct rail *rail, const struct staged_message *asked,
                      struct staged_message *answer)
{
    void *place = (void *)(uintptr_t)asked->address;
    int status;
    struct region *region = stage_enter_region(&group->engine->memory, asked, &status);
    bool done;

    if (!region)
        return status;
    done = asked->kind == STAGED_PUT ? stage_copy(rail, region, place, asked + 1, asked->length)
                                     : stage_copy(rail, region, answer + 1, place, asked->length);
    region_leave(region);
    return done ? EKV_OK : EKV_EPROVIDER;
}

/* The peer of an incarnation, held as by a job, or NULL. */
static struct peer *peer_hold_sender(struct ekv_engine *engine, uint64_t incarnation)
{
    struct peer_table *table = &engine->peers;
    struct peer *found = NULL;

    pthread_rwlock_rdlock(&table->lock);
    for (uint32_t i = 0; i < table->used && !found; i++)
        if (table->peers[i] && atomic_load(&table->peers[i]->state) == PEER_READY &&
            table->peers[i]->incarnation == incarnation)
            found = table->peers[i];
    if (found)
        atomic_fetch_add(&found->jobs, 1);
    pthread_rwlock_unlock(&table->lock);
    return found;
}

/* A slot, and a slab where bytes go back; NULL: not now. */
static struct operation *answer_take(struct rail *rail, bool with_slab, uint64_t now_ns)
{
    struct stage *stage = rail->stage;
    struct operation *operation;

    if (with_slab && stage->free_answer_count == 0)
        return NULL;
    operation = inflight_take(&rail->inflight, now_ns);
    if (!operation)
        return NULL;
    operation->kind = OPERATION_ANSWER;
    operation->job = NULL;
    operation->region = NULL;
    operation->is_read = false;
    operation->sent = operation->answered = false;
    operation->piece = (struct piece){0};
    operation->has_slab = with_slab;
    if (with_slab)
        operation->slab = stage->free_answers[--stage->free_answer_count];
    return operation;
}

/* What became of a request. */
enum served {
    SERVED_LATER,    /* there is no room for an answer now */
    SERVED_ANSWERED, /* the answer is on its way, and holds the peer */
    SERVED_DROPPED   /* there is no way to the one who asked */
};

/* The way back to the one who asked; false: there is none. */
static bool answer_aim(struct rail *rail, struct operation *operation, uint64_t now_ns,
                       fi_addr_t *address)
{
    struct peer *peer = operation->peer;
    bool found;
    int nic;

    pthread_rwlock_rdlock(&peer->lock);
    nic = peer_choose_nic(peer, rail->index, now_ns, true);
    found = nic >= 0 && group_path(peer, rail, (uint32_t)nic, address);
    if (found) {
        operation->nic = (uint32_t)nic;
        operation->version = peer->rails[rail->index].paths[nic].version;
    }
    pthread_rwlock_unlock(&peer->lock);
    return found;
}

/* Obeys and posts the answer; libfabric's code.  Nothing is locked meanwhile. */
static ssize_t answer_post(struct group *group, struct rail *rail, struct operation *operation,
                           const struct staged_message *asked, bool busy, uint64_t now_ns)
{
    bool brings = operation->has_slab;
    struct staged_message *answer = brings ? slab_at(rail->stage, operation->slab)
                                           : (struct staged_message *)operation->message;
    fi_addr_t address;

    if (!answer_aim(rail, operation, now_ns, &address))
        return -FI_EHOSTUNREACH;
    staged_begin(answer, brings ? STAGED_DATA : STAGED_DONE, group->engine->incarnation,
                 asked->cookie);
    answer->status = busy ? EKV_EBUSY : stage_obey(group, rail, asked, answer);
    answer->length = brings && answer->status == EKV_OK ? asked->length : 0;
    BEFORE_SENDING();
    return rail_post_buffer(rail, operation, answer, sizeof *answer + answer->length,
                            brings ? rail->stage->descriptor : rail->messages_descriptor, address);
}

static enum served stage_answer(struct group *group, struct rail *rail, struct peer *peer,
                                const struct staged_message *asked, bool busy, uint64_t now_ns)
{
    struct operation *operation = answer_take(rail, asked->kind == STAGED_GET && !busy, now_ns);
    ssize_t posted;

    if (!operation)
        return SERVED_LATER;
    operation->peer = peer;
    posted = answer_post(group, rail, operation, asked, busy, now_ns);
    if (posted == 0) {
        operation_begin(rail, operation);
        return SERVED_ANSWERED;
    }
    stage_settle(rail, operation);
    inflight_give(&rail->inflight, operation, 0);
    if (posted == -FI_EAGAIN)
        return SERVED_LATER;
    log_write(rail->log, LOG_DEBUG, "rail %u: a staged request cannot be answered: %s", rail->index,
              rail_strerror(rail, (int)posted));
    return SERVED_DROPPED;
}

/* False: not now, come again with the same message.  busy: the one who asked is to. */
static bool stage_serve(struct group *group, struct rail *rail, const struct staged_message *asked,
                        bool busy, uint64_t now_ns)
{
    struct peer *peer = peer_hold_sender(group->engine, asked->sender);
    enum served served = SERVED_DROPPED;

    if (peer)
        served = stage_answer(group, rail, peer, asked, busy, now_ns);
    if (peer && served != SERVED_ANSWERED)
        atomic_fetch_sub(&peer->jobs, 1);
    return served != SERVED_LATER;
}

bool stage_receive(struct group *group, struct rail *rail, struct operation *receive, size_t length,
                   uint64_t now_ns)
{
    const struct staged_message *message = (const struct staged_message *)receive->message;
    struct stage *stage = rail->stage;

    if (!stage || length < sizeof *message || message->magic != STAGE_MAGIC)
        return false;
    AFTER_RECEIVING();
    if (!staged_is_sound(message, length)) {
        log_write(rail->log, LOG_WARNING, "rail %u: a staged message of %zu bytes is malformed",
                  rail->index, length);
    } else if (message->kind == STAGED_DONE || message->kind == STAGED_DATA) {
        stage_take_answer(group, rail, message, now_ns);
    } else if (stage->deferred_count > 0 || !stage_serve(group, rail, message, false, now_ns)) {
        if (stage->deferred_count < rail->receive_count / 2) {
            stage->deferred[stage->deferred_count++] = receive;
            return true;
        }
        stage_serve(group, rail, message, true, now_ns);
    }
    rail_receive_again(rail, receive);
    return true;
}

bool stage_answer_deferred(struct group *group, uint64_t now_ns)
{
    bool any = false;

    for (uint32_t r = group->rail_first; r < group->rail_first + group->rail_count; r++) {
        struct rail *rail = &group->engine->rails[r];
        struct stage *stage = rail->stage;
        uint32_t served = 0;

        while (stage && rail->endpoint && served < stage->deferred_count &&
               stage_serve(group, rail,
                           (const struct staged_message *)stage->deferred[served]->message, false,
                           now_ns))
            served++;
        for (uint32_t i = 0; i < served; i++)
            rail_receive_again(rail, stage->deferred[i]);
        if (served > 0) {
            stage->deferred_count -= served;
            memmove(stage->deferred, stage->deferred + served,
                    stage->deferred_count * sizeof(struct operation *));
            any = true;
        }
    }
    return any;
}
