#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct address_vector *from_fid(struct fid_av *fid)
{
    return (struct address_vector *)(void *)fid;
}

static uint64_t address_number(const struct simnic_address *address)
{
    uint64_t number = address->process * 0x9e3779b97f4a7c15u;
    number ^= ((uint64_t)address->queue_key << 32 | address->queue_pair) * 0xc2b2ae3d27d4eb4fu;
    return number ? number : 1;
}

struct peer *address_vector_peer(struct address_vector *vector, fi_addr_t address)
{
    return address < vector->peer_count ? vector->peers[address] : NULL;
}

fi_addr_t address_vector_find(const struct address_vector *vector,
                              const struct simnic_address *address)
{
    const uint32_t *index = number_map_find(&vector->index_of_address, address_number(address));
    if (!index || memcmp(&vector->peers[*index]->address, address, sizeof *address) != 0)
        return FI_ADDR_NOTAVAIL;
    return *index;
}

void address_vector_publish(struct address_vector *vector, struct endpoint *endpoint)
{
    for (size_t i = 0; i < vector->peer_count; i++)
        if (vector->peers[i])
            known_peers_add(endpoint->shared, vector->peers[i]->nic_number);
}

static void peer_free(struct domain *domain, struct peer *peer)
{
    if (peer->remote)
        registry_unmap_endpoint(peer->remote);
    if (peer->lane)
        lane_release(domain, peer->lane);
    free(peer);
}

void peer_release(struct domain *domain, struct peer *peer)
{
    if (--peer->references == 0 && peer->is_removed)
        peer_free(domain, peer);
}

bool peer_connect(struct domain *domain, struct peer *peer)
{
    if (peer->lane)
        return true;
    struct lane *lane = lane_acquire(domain, address_identity(&peer->address));
    if (!lane)
        return false;
    peer->remote =
        registry_map_endpoint(address_identity(&peer->address), peer->address.queue_pair);
    if (!peer->remote) {
        lane_release(domain, lane);
        return false;
    }
    peer->lane = lane;
    return true;
}

/* A free place, the lowest first. */
static bool find_place(struct address_vector *vector, size_t *place)
{
    /* Places are scanned only after a removal has made a hole. */
    if (vector->index_of_address.count < vector->peer_count)
        for (size_t i = 0; i < vector->peer_count; i++)
            if (!vector->peers[i]) {
                *place = i;
                return true;
            }
    if (vector->peer_count == vector->peer_capacity) {
        size_t capacity = vector->peer_capacity ? vector->peer_capacity * 2 : 64;
        struct peer **larger = realloc(vector->peers, capacity * sizeof(struct peer *));
        if (!larger)
            return false;
        vector->peers = larger;
        vector->peer_capacity = capacity;
    }
    *place = vector->peer_count++;
    vector->peers[*place] = NULL;
    return true;
}

static fi_addr_t insert_one(struct address_vector *vector, const struct simnic_address *address)
{
    size_t place;
    fi_addr_t existing = address_vector_find(vector, address);
    if (existing != FI_ADDR_NOTAVAIL) /* as EFA: one entry per address */
        return existing;
    if (address->process == 0 || address->nic >= SIMNIC_MAX_NICS)
        return FI_ADDR_NOTAVAIL;
    struct peer *peer = calloc(1, sizeof *peer);
    if (!peer || !find_place(vector, &place)) {
        free(peer);
        return FI_ADDR_NOTAVAIL;
    }
    peer->address = *address;
    peer->nic_number = address_nic_number(address);
    uint32_t *index = number_map_put(&vector->index_of_address, address_number(address));
    uint32_t *uses = number_map_put(&vector->uses_of_nic, peer->nic_number);
    if (!index || !uses) {
        free(peer);
        return FI_ADDR_NOTAVAIL;
    }
    vector->peers[place] = peer;
    *index = (uint32_t)place;
    if (++*uses == 1)
        for (struct endpoint *endpoint = vector->endpoints; endpoint;
             endpoint = endpoint->next_in_address_vector)
            if (endpoint->shared)
                known_peers_add(endpoint->shared, peer->nic_number);
    return place;
}

static int insert(struct fid_av *fid, const void *addresses, size_t count, fi_addr_t *results,
                  uint64_t flags, void *context)
{
    struct address_vector *vector = from_fid(fid);
    int inserted = 0;
    (void)flags;
    (void)context;
    domain_enter(vector->domain);
    for (size_t i = 0; i < count; i++) {
        struct simnic_address address;
        memcpy(&address, (const char *)addresses + i * sizeof address, sizeof address);
        fi_addr_t result = insert_one(vector, &address);
        inserted += result != FI_ADDR_NOTAVAIL;
        if (results)
            results[i] = result;
    }
    domain_leave(vector->domain);
    return inserted;
}

static void remove_one(struct address_vector *vector, size_t place)
{
    struct peer *peer = vector->peers[place];
    uint32_t *uses = number_map_find(&vector->uses_of_nic, peer->nic_number);
    if (uses && --*uses == 0) {
        number_map_remove(&vector->uses_of_nic, peer->nic_number);
        for (struct endpoint *endpoint = vector->endpoints; endpoint;
             endpoint = endpoint->next_in_address_vector)
            if (endpoint->shared)
                known_peers_remove(endpoint->shared, peer->nic_number);
    }
    number_map_remove(&vector->index_of_address, address_number(&peer->address));
    vector->peers[place] = NULL;
    peer->is_removed = true;
    if (peer->references == 0)
        peer_free(vector->domain, peer);
}

static int remove_peers(struct fid_av *fid, fi_addr_t *addresses, size_t count, uint64_t flags)
{
    struct address_vector *vector = from_fid(fid);
    int result = 0;
    (void)flags;
    domain_enter(vector->domain);
    for (size_t i = 0; i < count; i++) {
        if (address_vector_peer(vector, addresses[i]))
            remove_one(vector, addresses[i]);
        else
            result = -FI_EINVAL;
    }
    domain_leave(vector->domain);
    return result;
}

static int lookup(struct fid_av *fid, fi_addr_t address, void *result, size_t *size)
{
    struct address_vector *vector = from_fid(fid);
    const struct peer *peer = address_vector_peer(vector, address);
    if (!peer)
        return -FI_EINVAL;
    memcpy(result, &peer->address, *size < sizeof peer->address ? *size : sizeof peer->address);
    *size = sizeof peer->address;
    return 0;
}

static const char *to_text(struct fid_av *fid, const void *raw, char *text, size_t *size)
{
    struct simnic_address address;
    (void)fid;
    memcpy(&address, raw, sizeof address);
    struct process_identity identity = address_identity(&address);
    int length = snprintf(text, *size, "fi_addr_efa://[fe80::%llx]:%u:%u?pid=%u",
                          (unsigned long long)address_nic_number(&address), address.queue_pair,
                          address.queue_key, identity.pid);
    *size = (size_t)length + 1;
    return text;
}

static int insert_service(struct fid_av *fid, const char *node, const char *service,
                          fi_addr_t *result, uint64_t flags, void *context)
{
    (void)fid;
    (void)node;
    (void)service;
    (void)result;
    (void)flags;
    (void)context;
    return -FI_ENOSYS;
}

static struct fi_ops_av vector_ops = {
    .size = sizeof vector_ops,
    .insert = insert,
    .insertsvc = insert_service,
    .remove = remove_peers,
    .lookup = lookup,
    .straddr = to_text,
};

static int close_vector(struct fid *fid)
{
    struct address_vector *vector = from_fid((struct fid_av *)(void *)fid);
    struct domain *domain = vector->domain;
    domain_enter(domain);
    if (vector->endpoints) {
        domain_leave(domain);
        return -FI_EBUSY;
    }
    for (size_t i = 0; i < vector->peer_count; i++)
        if (vector->peers[i])
            remove_one(vector, i);
    domain->users--;
    domain_leave(domain);
    number_map_free(&vector->index_of_address);
    number_map_free(&vector->uses_of_nic);
    free(vector->peers);
    free(vector);
    return 0;
}

static int bind(struct fid *fid, struct fid *other, uint64_t flags)
{
    (void)fid;
    (void)flags;
    return other->fclass == FI_CLASS_EQ ? 0 : -FI_EINVAL;
}

static struct fi_ops fid_ops = {sizeof fid_ops,       close_vector, bind, unsupported_control,
                                unsupported_ops_open, NULL,         NULL};

int address_vector_open(struct fid_domain *fid, struct fi_av_attr *attributes,
                        struct fid_av **result, void *context)
{
    struct domain *domain = (struct domain *)(void *)fid;
    struct address_vector *vector = calloc(1, sizeof *vector);
    if (!vector)
        return -FI_ENOMEM;
    if (attributes && attributes->flags & FI_EVENT) {
        free(vector);
        return -FI_ENOSYS;
    }
    vector->domain = domain;
    vector->fid.fid.fclass = FI_CLASS_AV;
    vector->fid.fid.context = context;
    vector->fid.fid.ops = &fid_ops;
    vector->fid.ops = &vector_ops;
    if (attributes)
        attributes->type = FI_AV_TABLE;
    domain_enter(domain);
    domain->users++;
    domain_leave(domain);
    *result = &vector->fid;
    return 0;
}
