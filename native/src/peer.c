/* peer.c - see peer.h. */
#include "peer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "error.h"
#include "identifier.h"
#include "near_process.h"
#include "stripe.h"

#define PATH_REST_FIRST_NS (250 * NS_PER_MS)
#define PATH_REST_LONGEST_NS (16 * NS_PER_SECOND)

bool peer_table_open(struct peer_table *table, uint32_t capacity)
{
    memset(table, 0, sizeof *table);
    table->peers = calloc(capacity, sizeof *table->peers);
    if (!table->peers || pthread_rwlock_init(&table->lock, NULL) != 0) {
        free(table->peers);
        table->peers = NULL;
        return false;
    }
    table->capacity = capacity;
    return true;
}

static void remote_region_free(struct remote_region *region)
{
    if (!region)
        return;
    free(region->keys);
    free(region->first_key);
    free(region->nics);
    free(region);
}

static void peer_empty(struct peer *peer, uint32_t rail_count)
{
    for (uint32_t i = 0; i < peer->region_capacity; i++)
        remote_region_free(peer->regions[i]);
    free(peer->regions);
    range_table_close(&peer->ranges);
    for (uint32_t i = 0; peer->rails && i < rail_count; i++)
        free(peer->rails[i].paths);
    free(peer->rails);
    free(peer->nics);
    free((void *)peer->nic_versions);
    neighbour_close(peer->neighbour);
    peer->neighbour = NULL;
    peer->regions = NULL;
    peer->region_capacity = 0;
    peer->rails = NULL;
    peer->nics = NULL;
    peer->nic_versions = NULL;
    peer->nic_count = 0;
}

void peer_table_close(struct peer_table *table, uint32_t rail_count)
{
    if (!table->peers)
        return;
    for (uint32_t i = 0; i < table->used; i++) {
        peer_empty(table->peers[i], rail_count);
        pthread_rwlock_destroy(&table->peers[i]->lock);
        free(table->peers[i]);
    }
    pthread_rwlock_destroy(&table->lock);
    free(table->peers);
    table->peers = NULL;
}

/* With the table's lock held for writing. */
static struct peer *peer_free_slot(struct peer_table *table)
{
    struct peer *peer;

    for (uint32_t i = 0; i < table->used; i++)
        if (atomic_load(&table->peers[i]->state) == PEER_FREE)
            return table->peers[i];
    if (table->used == table->capacity)
        return NULL;
    peer = calloc(1, sizeof *peer);
    if (!peer)
        return NULL;
    if (pthread_rwlock_init(&peer->lock, NULL) != 0) {
        free(peer);
        return NULL;
    }
    peer->index = table->used;
    table->peers[table->used++] = peer;
    return peer;
}

static bool peer_fill(struct peer *peer, const ekv_nic *nics, uint32_t nic_count,
                      uint32_t rail_count)
{
    peer->nics = calloc(nic_count ? nic_count : 1, sizeof *peer->nics);
    peer->nic_versions = calloc(nic_count ? nic_count : 1, sizeof *peer->nic_versions);
    peer->rails = calloc(rail_count, sizeof *peer->rails);
    if (!peer->nics || !peer->nic_versions || !peer->rails)
        return false;
    peer->nic_count = nic_count;
    memcpy(peer->nics, nics, nic_count * sizeof *nics);
    for (uint32_t i = 0; i < rail_count; i++) {
        peer->rails[i].paths = calloc(nic_count ? nic_count : 1, sizeof(struct path));
        if (!peer->rails[i].paths)
            return false;
    }
    return true;
}

struct peer *peer_take(struct peer_table *table, const ekv_peer_options *options,
                       const ekv_nic *nics, uint32_t nic_count, uint32_t rail_count, int *code)
{
    struct peer *peer;

    pthread_rwlock_wrlock(&table->lock);
    peer = peer_free_slot(table);
    *code = peer ? EKV_OK : EKV_EBUSY;
    if (peer && !peer_fill(peer, nics, nic_count, rail_count)) {
        peer_empty(peer, rail_count);
        peer = NULL;
        *code = EKV_ENOMEM;
    }
    if (peer) {
        peer->generation = (peer->generation + 1) & IDENTIFIER_GENERATION_MASK;
        peer->same_process = options->same_process != 0;
        peer->incarnation = options->incarnation;
        atomic_store(&peer->jobs, 0);
        atomic_store(&peer->state, PEER_OPENING);
        atomic_fetch_add(&table->count, 1);
    }
    pthread_rwlock_unlock(&table->lock);
    return peer;
}

void peer_give(struct peer_table *table, struct peer *peer, uint32_t rail_count)
{
    pthread_rwlock_wrlock(&table->lock);
    peer_empty(peer, rail_count);
    atomic_store(&peer->state, PEER_FREE);
    atomic_fetch_sub(&table->count, 1);
    pthread_rwlock_unlock(&table->lock);
}

struct peer *peer_find(struct peer_table *table, uint8_t tag, ekv_peer_id id)
{
    struct peer *peer;
    int state;

    if (!identifier_is(id, IDENTIFIER_PEER, tag) || identifier_index(id) >= table->used)
        return NULL;
    peer = table->peers[identifier_index(id)];
    state = atomic_load(&peer->state);
    if (peer->generation != identifier_generation(id) ||
        (state != PEER_READY && state != PEER_REMOVING))
        return NULL;
    return peer;
}

bool peer_nics_move(struct peer *peer, const ekv_nic *nics, size_t count)
{
    bool same = count == peer->nic_count;

    pthread_rwlock_wrlock(&peer->lock);
    for (size_t i = 0; same && i < count; i++)
        same = strncmp(nics[i].name, peer->nics[i].name, EKV_NAME_BYTES) == 0 &&
               nics[i].address_length > 0 && nics[i].address_length <= EKV_ADDRESS_BYTES;
    for (size_t i = 0; same && i < count; i++) {
        ekv_nic *nic = &peer->nics[i];

        if (nics[i].address_length == nic->address_length &&
            memcmp(nics[i].address, nic->address, nic->address_length) == 0)
            continue;
        memcpy(nic->address, nics[i].address, sizeof nic->address);
        nic->address_length = nics[i].address_length;
        atomic_fetch_add(&peer->nic_versions[i], 1);
    }
    pthread_rwlock_unlock(&peer->lock);
    return same;
}

bool peer_nic_matches(const ekv_nic *ours, const ekv_nic *theirs, bool is_ip)
{
    /* Over IP a fabric is the name of a subnet, and routers join those. */
    return strncmp(ours->provider, theirs->provider, EKV_NAME_BYTES) == 0 &&
           (is_ip || strncmp(ours->fabric, theirs->fabric, EKV_NAME_BYTES) == 0) &&
           theirs->address_length > 0 && theirs->address_length <= EKV_ADDRESS_BYTES;
}

static void remote_region_list_nics(struct remote_region *region, uint32_t nic_count,
                                    const ekv_remote_key *keys, size_t key_count)
{
    for (size_t i = 0; i < key_count; i++) {
        uint32_t at = 0;

        while (at < region->nic_count && region->nics[at] != keys[i].nic)
            at++;
        if (at == region->nic_count && keys[i].nic < nic_count)
            region->nics[region->nic_count++] = keys[i].nic;
    }
}

static struct remote_region *remote_region_make(const struct peer *peer, uint64_t id,
                                                uint64_t begin, uint64_t length,
                                                const ekv_remote_key *keys, size_t key_count)
{
    struct remote_region *region = calloc(1, sizeof *region);
    uint32_t filled = 0;

    if (!region)
        return NULL;
    region->id = id;
    region->begin = begin;
    region->end = begin + length;
    region->keys = calloc(key_count ? key_count : 1, sizeof *region->keys);
    region->first_key = calloc(peer->nic_count + 1, sizeof *region->first_key);
    region->nics = calloc(peer->nic_count ? peer->nic_count : 1, sizeof *region->nics);
    if (!region->keys || !region->first_key || !region->nics) {
        remote_region_free(region);
        return NULL;
    }
    for (uint32_t nic = 0; nic < peer->nic_count; nic++) {
        region->first_key[nic] = filled;
        for (size_t i = 0; i < key_count; i++) {
            uint32_t at = filled;

            if (keys[i].nic != nic)
                continue;
            while (at > region->first_key[nic] &&
                   region->keys[at - 1].offset_bytes > keys[i].offset_bytes) {
                region->keys[at] = region->keys[at - 1];
                at--;
            }
            region->keys[at] = (struct remote_key){.key = keys[i].key,
                                                   .base = keys[i].base,
                                                   .offset_bytes = keys[i].offset_bytes,
                                                   .length_bytes = keys[i].length_bytes};
            filled++;
        }
    }
    region->first_key[peer->nic_count] = filled;
    remote_region_list_nics(region, peer->nic_count, keys, key_count);
    for (size_t i = 0; i < key_count; i++)
        if (keys[i].nic == EKV_KEY_NEAR)
            region->near_key = keys[i].key;
        else if (keys[i].nic == EKV_KEY_STAGED)
            region->stage_key = keys[i].key;
    return region;
}

/* With peer->lock held for writing. */
static int peer_region_slot(struct peer *peer, uint32_t *slot)
{
    struct remote_region **grown;
    uint32_t capacity = peer->region_capacity ? peer->region_capacity * 2 : 16;

    for (*slot = 0; *slot < peer->region_capacity; (*slot)++)
        if (!peer->regions[*slot])
            return EKV_OK;
    grown = realloc(peer->regions, capacity * sizeof(struct remote_region *));
    if (!grown)
        return EKV_ENOMEM;
    memset(grown + peer->region_capacity, 0,
           (capacity - peer->region_capacity) * sizeof(struct remote_region *));
    peer->regions = grown;
    peer->region_capacity = capacity;
    return EKV_OK;
}

/* With peer->lock held for writing. */
static bool peer_region_drop_locked(struct peer *peer, uint64_t id)
{
    for (uint32_t i = 0; i < peer->region_capacity; i++) {
        if (!peer->regions[i] || peer->regions[i]->id != id)
            continue;
        range_remove(&peer->ranges, i);
        remote_region_free(peer->regions[i]);
        peer->regions[i] = NULL;
        return true;
    }
    return false;
}

int peer_region_put(struct peer *peer, uint64_t id, uint64_t begin, uint64_t length,
                    const ekv_remote_key *keys, size_t key_count, ekv_error *error)
{
    struct remote_region *region = remote_region_make(peer, id, begin, length, keys, key_count);
    uint32_t slot = 0;
    int code = region ? EKV_OK : EKV_ENOMEM;

    if (code == EKV_OK) {
        pthread_rwlock_wrlock(&peer->lock);
        peer_region_drop_locked(peer, id); /* the same region with new keys */
        code = peer_region_slot(peer, &slot);
        if (code == EKV_OK && !range_insert(&peer->ranges, begin, begin + length, slot))
            code = EKV_ENOMEM;
        if (code == EKV_OK) {
            region->told = ++peer->region_tells;
            peer->regions[slot] = region;
        }
        pthread_rwlock_unlock(&peer->lock);
    }
    if (code != EKV_OK) {
        remote_region_free(region);
        return error_set(error, code, 0, "ekv_peer_region_add", "out of memory");
    }
    return EKV_OK;
}

bool peer_region_drop(struct peer *peer, uint64_t id)
{
    bool found;

    pthread_rwlock_wrlock(&peer->lock);
    found = peer_region_drop_locked(peer, id);
    pthread_rwlock_unlock(&peer->lock);
    return found;
}

const struct remote_region *peer_region_at(const struct peer *peer, uint64_t address,
                                           uint64_t length)
{
    const struct range *range = range_find(&peer->ranges, address, length);

    return range ? peer->regions[range->slot] : NULL;
}

const struct remote_key *remote_key_at(const struct remote_region *region, uint32_t nic,
                                       uint64_t address, uint64_t *left)
{
    uint64_t offset = address - region->begin;
    uint32_t low = region->first_key[nic];
    uint32_t high = region->first_key[nic + 1];
    const struct remote_key *key;

    while (low < high) { /* the last key that begins at or before offset */
        uint32_t middle = low + (high - low) / 2;

        if (region->keys[middle].offset_bytes <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == region->first_key[nic])
        return NULL;
    key = &region->keys[low - 1];
    if (offset - key->offset_bytes >= key->length_bytes)
        return NULL;
    *left = key->length_bytes - (offset - key->offset_bytes);
    return key;
}

int peer_choose_nic(const struct peer *peer, uint32_t rail, uint64_t now_ns, bool desperate)
{
    const struct peer_rail *side = &peer->rails[rail];
    uint32_t aligned;

    if (!side->compatible)
        return -1;
    aligned = stripe_aligned_nic(rail, peer->nic_count);
    for (uint32_t i = 0; i < peer->nic_count; i++) {
        uint32_t nic = (aligned + i) % peer->nic_count;
        const struct path *path = &side->paths[nic];

        if (!path->usable)
            continue;
        if (path->state != PATH_FAILED || desperate || now_ns >= path->retry_ns)
            return (int)nic;
    }
    return -1;
}

void path_fail(struct path *path, uint64_t now_ns)
{
    uint64_t rest_ns = PATH_REST_FIRST_NS;

    /* What was on its way when it failed says nothing new. */
    if (path->state == PATH_FAILED && now_ns < path->retry_ns)
        return;
    for (uint32_t i = 0; i < path->failures && rest_ns < PATH_REST_LONGEST_NS; i++)
        rest_ns *= 2;
    path->state = PATH_FAILED;
    path->failures++;
    path->retry_ns = now_ns + rest_ns;
}

void peer_path_fail(struct peer *peer, uint32_t rail, uint32_t nic, int code, uint64_t now_ns)
{
    struct path *paths = peer->rails[rail].paths;

    if (ekv_code_class(code) != EKV_CLASS_LOCAL) {
        path_fail(&paths[nic], now_ns);
        return;
    }
    for (uint32_t n = 0; n < peer->nic_count; n++)
        path_fail(&paths[n], now_ns);
}

void path_succeed(struct path *path)
{
    path->state = PATH_READY;
    path->failures = 0;
}
