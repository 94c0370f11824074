/* peers.c - exported calls about peers, and the command that resolves their paths. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "engine.h"
#include "error.h"
#include "identifier.h"
#include "near_process.h"
#include "stripe.h"

#define PEER_NICS_MAX 256u
#define REMOTE_KEYS_MAX (1u << 20)

/* EFA drops what comes from an address that the target has not inserted.  Regions have
 * keys on some rails only, and paths fail, so any pair may be the one that is used. */
void rail_meet(struct rail *rail, struct peer *peer)
{
    fi_addr_t address;

    if (strncmp(rail->nic.provider, "efa", 3) != 0)
        return;
    for (uint32_t n = 0; n < peer->nic_count; n++)
        if (peer->rails[rail->index].paths[n].usable)
            group_path(peer, rail, n, &address);
}

/* Says which NICs can talk to which rail, and resolves the aligned pairs at once. */
static void command_resolve(struct group *group, struct command *command)
{
    struct ekv_engine *engine = group->engine;
    struct peer *peer = command->peer;
    uint32_t usable = 0;

    pthread_rwlock_rdlock(&peer->lock);
    for (uint32_t r = group->rail_first; r < group->rail_first + group->rail_count; r++) {
        struct rail *rail = &engine->rails[r];
        struct peer_rail *side = &peer->rails[r];
        bool is_ip = rail->info && (rail->info->addr_format == FI_SOCKADDR_IN ||
                                    rail->info->addr_format == FI_SOCKADDR_IN6);
        fi_addr_t address;

        for (uint32_t n = 0; n < peer->nic_count; n++) {
            side->paths[n].usable = peer_nic_matches(&rail->nic, &peer->nics[n], is_ip);
            side->compatible |= side->paths[n].usable;
            usable += side->paths[n].usable;
        }
        if (side->compatible) {
            int nic = peer_choose_nic(peer, r, clock_now_ns(), false);

            if (nic >= 0 && !group_path(peer, rail, (uint32_t)nic, &address))
                log_write(&engine->log, LOG_WARNING,
                          "rail %u: the address of NIC %s of a peer "
                          "is refused by the provider",
                          r, peer->nics[nic].name);
            rail_meet(rail, peer);
        }
    }
    pthread_rwlock_unlock(&peer->lock);
    command->code = (int)usable;
}

static void command_meet(struct group *group, struct command *command)
{
    pthread_rwlock_rdlock(&command->peer->lock);
    for (uint32_t r = group->rail_first; r < group->rail_first + group->rail_count; r++)
        rail_meet(&group->engine->rails[r], command->peer);
    pthread_rwlock_unlock(&command->peer->lock);
    command->code = EKV_OK;
}

static int peer_resolve(struct ekv_engine *engine, struct peer *peer, ekv_error *error)
{
    int usable = 0;

    for (uint32_t i = 0; i < engine->group_count; i++) {
        struct command command = {.run = command_resolve, .peer = peer};

        usable += group_call(&engine->groups[i], &command);
    }
    if (usable > 0 || (engine->near && peer->same_process))
        return EKV_OK;
    return error_set(error, EKV_EPEER, 0, "ekv_peer_add",
                     "none of the peer's %u NICs (first: provider \"%s\", fabric \"%s\") is on "
                     "the provider and fabric of a local rail (\"%s\", \"%s\")",
                     peer->nic_count, peer->nic_count ? peer->nics[0].provider : "",
                     peer->nic_count ? peer->nics[0].fabric : "", engine->rails[0].nic.provider,
                     engine->rails[0].nic.fabric);
}

/* Fails the peer's jobs and frees it in the progress threads, in their own time. */
static void peer_dismiss(struct ekv_engine *engine, struct peer *peer)
{
    for (uint32_t i = 0; i < engine->group_count; i++) {
        /* The ring has room for every peer. */
        bool queued =
            ring_push(&engine->groups[i].submissions, SUBMISSION_PEER_REMOVED | peer->index);

        assert(queued);
        (void)queued;
        group_wake(&engine->groups[i]);
    }
}

static ekv_nic *nics_import(const ekv_nic *nics, size_t count)
{
    ekv_nic *copies = calloc(count ? count : 1, sizeof *copies);
    size_t stride = count ? struct_stride(nics) : 0;

    for (size_t i = 0; copies && i < count; i++) {
        if (struct_import(&copies[i], sizeof copies[i], (const char *)nics + i * stride) !=
            EKV_OK) {
            free(copies);
            return NULL;
        }
        copies[i].name[EKV_NAME_BYTES - 1] = '\0';
        copies[i].fabric[EKV_NAME_BYTES - 1] = '\0';
        copies[i].provider[EKV_NAME_BYTES - 1] = '\0';
    }
    return copies;
}

/* The short way to the peer's process, if it is on this host and the kernel lets us. */
static void peer_approach(struct ekv_engine *engine, struct peer *peer,
                          const ekv_peer_options *options)
{
    enum near_refusal refusal;
    char reason[160];

    if (!engine->near || peer->same_process || !options->same_host)
        return;
    peer->neighbour = neighbour_open(options, engine->group_count, &refusal, reason, sizeof reason);
    if (peer->neighbour)
        return;
    atomic_fetch_add(&engine->rails[0].counters.near_refused[refusal], 1);
    log_write(&engine->log, LOG_INFO,
              "a peer on this host is reached through the provider (%s): %s",
              near_refusal_name(refusal), reason);
}

static int peer_add(struct ekv_engine *engine, const ekv_peer_options *options, const ekv_nic *nics,
                    size_t nic_count, ekv_peer_id *id, ekv_error *error)
{
    ekv_nic *copies = nics_import(nics, nic_count);
    struct peer *peer;
    int code;

    if (!copies)
        return error_set(error, EKV_EINVAL, 0, "ekv_peer_add", "a NIC's struct_size is wrong");
    peer =
        peer_take(&engine->peers, options, copies, (uint32_t)nic_count, engine->rail_count, &code);
    free(copies);
    if (!peer)
        return error_set(error, code, 0, "ekv_peer_add",
                         "all %u peers are in use (max_peers), or out of memory",
                         engine->peers.capacity);
    peer_approach(engine, peer, options);
    code = peer_resolve(engine, peer, error);
    if (code != EKV_OK) {
        atomic_store(&peer->groups_left, engine->group_count);
        atomic_store(&peer->state, PEER_REMOVING);
        peer_dismiss(engine, peer);
        return code;
    }
    *id = identifier_make(IDENTIFIER_PEER, engine->tag, peer->generation, peer->index);
    atomic_store(&peer->state, PEER_READY);
    return EKV_OK;
}

int ekv_peer_add(struct ekv_engine *engine, const ekv_peer_options *given, const ekv_nic *nics,
                 size_t nic_count, ekv_peer_id *peer, ekv_error *error)
{
    ekv_peer_options options;
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    if (!peer || (nic_count && !nics) || nic_count > PEER_NICS_MAX ||
        struct_import(&options, sizeof options, given) != EKV_OK)
        code = error_set(error, EKV_EINVAL, 0, "ekv_peer_add",
                         "an argument is missing, or there are more than %u NICs", PEER_NICS_MAX);
    else
        code = peer_add(engine, &options, nics, nic_count, peer, error);
    engine_leave(engine);
    return code;
}

/* A peer that is not being removed, kept alive as if by a job; NULL: stale. */
static struct peer *peer_hold(struct ekv_engine *engine, ekv_peer_id id)
{
    struct peer *peer;

    pthread_rwlock_rdlock(&engine->peers.lock);
    peer = peer_find(&engine->peers, engine->tag, id);
    if (peer && atomic_load(&peer->state) != PEER_READY)
        peer = NULL;
    if (peer)
        atomic_fetch_add(&peer->jobs, 1);
    pthread_rwlock_unlock(&engine->peers.lock);
    return peer;
}

static void peer_let_go(struct peer *peer)
{
    atomic_fetch_sub(&peer->jobs, 1);
}

static int peer_stale(ekv_peer_id id, const char *where, ekv_error *error)
{
    return error_set(error, EKV_ESTALE, 0, where, "peer 0x%llx is not (or no longer) known",
                     (unsigned long long)id);
}

int ekv_peer_nics(struct ekv_engine *engine, ekv_peer_id id, const ekv_nic *nics, size_t nic_count,
                  ekv_error *error)
{
    ekv_nic *copies = NULL;
    struct peer *peer;
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    peer = peer_hold(engine, id);
    if (!peer)
        code = peer_stale(id, "ekv_peer_nics", error);
    else if (nics && nic_count <= PEER_NICS_MAX)
        copies = nics_import(nics, nic_count);
    if (peer && (!copies || !peer_nics_move(peer, copies, nic_count)))
        code = error_set(error, EKV_EINVAL, 0, "ekv_peer_nics",
                         "these are not the %u NICs that the peer was added with, in their order",
                         peer->nic_count);
    if (code == EKV_OK)
        atomic_store(&engine->moved_ns, clock_now_ns());
    for (uint32_t i = 0; code == EKV_OK && i < engine->group_count; i++) {
        struct command command = {.run = command_meet, .peer = peer};

        group_call(&engine->groups[i], &command);
    }
    if (peer)
        peer_let_go(peer);
    free(copies);
    engine_leave(engine);
    return code;
}

static ekv_remote_key *keys_import(const ekv_remote_key *keys, size_t count)
{
    ekv_remote_key *copies = calloc(count ? count : 1, sizeof *copies);
    size_t stride = count ? struct_stride(keys) : 0;

    for (size_t i = 0; copies && i < count; i++)
        if (struct_import(&copies[i], sizeof copies[i], (const char *)keys + i * stride) !=
            EKV_OK) {
            free(copies);
            return NULL;
        }
    return copies;
}

static int remote_keys_check(const struct peer *peer, uint64_t length, const ekv_remote_key *keys,
                             size_t count, ekv_error *error)
{
    for (size_t i = 0; i < count; i++)
        if ((keys[i].nic >= peer->nic_count && keys[i].nic != EKV_KEY_NEAR &&
             keys[i].nic != EKV_KEY_STAGED) ||
            keys[i].offset_bytes >= length || keys[i].length_bytes > length - keys[i].offset_bytes)
            return error_set(error, EKV_EINVAL, 0, "ekv_peer_region_add",
                             "key %zu (NIC %u, offset %llu, %llu bytes) does not fit a region of "
                             "%llu bytes and %u NICs",
                             i, keys[i].nic, (unsigned long long)keys[i].offset_bytes,
                             (unsigned long long)keys[i].length_bytes, (unsigned long long)length,
                             peer->nic_count);
    return EKV_OK;
}

int ekv_peer_region_add(struct ekv_engine *engine, ekv_peer_id id, uint64_t remote_region,
                        uint64_t address, uint64_t length_bytes, const ekv_remote_key *given,
                        size_t key_count, ekv_error *error)
{
    ekv_remote_key *keys;
    struct peer *peer;
    uint64_t end;
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    keys = key_count <= REMOTE_KEYS_MAX && (given || !key_count) ? keys_import(given, key_count)
                                                                 : NULL;
    peer = peer_hold(engine, id);
    if (!peer)
        code = peer_stale(id, "ekv_peer_region_add", error);
    else if (!keys || length_bytes == 0 || __builtin_add_overflow(address, length_bytes, &end))
        code = error_set(error, EKV_EINVAL, 0, "ekv_peer_region_add",
                         "the keys are missing or the range is empty or overflows");
    else
        code = remote_keys_check(peer, length_bytes, keys, key_count, error);
    if (code == EKV_OK)
        code = peer_region_put(peer, remote_region, address, length_bytes, keys, key_count, error);
    if (peer)
        peer_let_go(peer);
    free(keys);
    engine_leave(engine);
    return code;
}

int ekv_peer_region_remove(struct ekv_engine *engine, ekv_peer_id id, uint64_t remote_region,
                           ekv_error *error)
{
    struct peer *peer;
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    peer = peer_hold(engine, id);
    if (!peer)
        code = peer_stale(id, "ekv_peer_region_remove", error);
    else if (!peer_region_drop(peer, remote_region))
        code = error_set(error, EKV_ESTALE, 0, "ekv_peer_region_remove",
                         "the peer has no region 0x%llx", (unsigned long long)remote_region);
    if (peer)
        peer_let_go(peer);
    engine_leave(engine);
    return code;
}

static int peer_warm(struct ekv_engine *engine, struct peer *peer, double timeout_s,
                     ekv_error *error)
{
    struct warm *warm = calloc(1, sizeof *warm);
    uint64_t until_ns = clock_after_ns(timeout_s);
    const struct timespec nap = {.tv_nsec = (long)(100 * NS_PER_US)};
    int code = EKV_OK;

    if (!warm) {
        peer_let_go(peer);
        return error_set(error, EKV_ENOMEM, 0, "ekv_peer_warm", "out of memory");
    }
    warm->peer = peer;
    atomic_store(&warm->users, 1);
    for (uint32_t i = 0; i < engine->group_count && code == EKV_OK; i++) {
        struct command command = {.run = warm_run, .peer = peer, .warm = warm};

        code = group_call(&engine->groups[i], &command);
    }
    while (code == EKV_OK && atomic_load(&warm->remaining) > 0) {
        if (atomic_load(&engine->closing))
            code = EKV_ECLOSED;
        else if (clock_now_ns() >= until_ns)
            code = EKV_EDEADLINE;
        else
            nanosleep(&nap, NULL);
    }
    if (code == EKV_OK)
        code = atomic_load(&warm->code);
    if (code != EKV_OK)
        error_set(error, code, 0, "ekv_peer_warm", "%u pairs of NICs are left unwarmed: %s",
                  atomic_load(&warm->remaining), ekv_code_text(code));
    warm_drop(warm);
    return code;
}

int ekv_peer_warm(struct ekv_engine *engine, ekv_peer_id id, double timeout_s, ekv_error *error)
{
    struct peer *peer;
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    peer = peer_hold(engine, id);
    code =
        peer ? peer_warm(engine, peer, timeout_s, error) : peer_stale(id, "ekv_peer_warm", error);
    engine_leave(engine);
    return code;
}

int ekv_peer_remove(struct ekv_engine *engine, ekv_peer_id id)
{
    struct peer *peer;
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    pthread_rwlock_wrlock(&engine->peers.lock);
    peer = peer_find(&engine->peers, engine->tag, id);
    if (peer && atomic_load(&peer->state) == PEER_READY) {
        atomic_store(&peer->groups_left, engine->group_count);
        atomic_store(&peer->state, PEER_REMOVING);
    } else {
        peer = NULL;
    }
    pthread_rwlock_unlock(&engine->peers.lock);
    if (peer)
        peer_dismiss(engine, peer);
    engine_leave(engine);
    return peer ? EKV_OK : EKV_ESTALE;
}
