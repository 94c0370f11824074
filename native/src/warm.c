/* warm.c - moving one empty message over every pair of NICs; see engine.h. */
#include <rdma/fi_errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "engine.h"

void warm_drop(struct warm *warm)
{
    if (atomic_fetch_sub(&warm->users, 1) > 1)
        return;
    atomic_fetch_sub(&warm->peer->jobs, 1);
    free(warm);
}

void warm_settle(struct warm *warm, int code)
{
    if (code != EKV_OK) {
        int none = EKV_OK;

        atomic_compare_exchange_strong(&warm->code, &none, code);
    }
    atomic_fetch_sub(&warm->remaining, 1);
    warm_drop(warm);
}

static bool warm_item_put(struct group *group, struct warm *warm, uint32_t rail, uint32_t nic)
{
    if (group->warm_count == group->warm_capacity) {
        uint32_t capacity = group->warm_capacity ? group->warm_capacity * 2 : 64;
        struct warm_item *grown = realloc(group->warms, capacity * sizeof *grown);

        if (!grown)
            return false;
        group->warms = grown;
        group->warm_capacity = capacity;
    }
    atomic_fetch_add(&warm->users, 1);
    atomic_fetch_add(&warm->remaining, 1);
    group->warms[group->warm_count++] = (struct warm_item){.warm = warm, .rail = rail, .nic = nic};
    return true;
}

void warm_run(struct group *group, struct command *command)
{
    struct peer *peer = command->peer;

    command->code = EKV_OK;
    for (uint32_t r = group->rail_first; r < group->rail_first + group->rail_count; r++)
        for (uint32_t n = 0; n < peer->nic_count; n++) {
            if (!peer->rails[r].paths[n].usable)
                continue;
            if (!warm_item_put(group, command->warm, r, n))
                command->code = EKV_ENOMEM;
        }
}

/* True: the item is dealt with; false: it has to wait for room. */
static bool warm_item_post(struct group *group, const struct warm_item *item, uint64_t now_ns)
{
    struct rail *rail = &group->engine->rails[item->rail];
    struct peer *peer = item->warm->peer;
    struct operation *operation;
    ekv_notice nothing = {.sender = group->engine->incarnation};
    bool reachable;
    fi_addr_t address;
    ssize_t answer;

    pthread_rwlock_rdlock(&peer->lock);
    reachable = rail->endpoint && atomic_load(&peer->state) == PEER_READY &&
                group_path(peer, rail, item->nic, &address);
    pthread_rwlock_unlock(&peer->lock);
    if (!reachable) {
        warm_settle(item->warm, EKV_EPEER);
        return true;
    }
    if (rail->in_flight >= rail->depth)
        return false;
    operation = inflight_take(&rail->inflight, now_ns);
    if (!operation)
        return false;
    operation->kind = OPERATION_WARM;
    operation->peer = peer;
    operation->nic = item->nic;
    operation->version = peer->rails[item->rail].paths[item->nic].version;
    operation->warm = item->warm;
    notice_encode(operation->message, NOTICE_KIND_EMPTY, &nothing);
    answer = rail_post_message(rail, operation, address);
    if (answer == 0) {
        operation_begin(rail, operation);
        return true;
    }
    inflight_give(&rail->inflight, operation, 0);
    if (answer == -FI_EAGAIN && atomic_load(&item->warm->users) > 1)
        return false;
    warm_settle(item->warm, rail_classify(rail, (int)-answer, 0));
    return true;
}

bool group_post_warms(struct group *group, uint64_t now_ns)
{
    uint32_t left = 0;
    bool any = false;

    for (uint32_t i = 0; i < group->warm_count; i++) {
        struct warm_item item = group->warms[i];

        if (warm_item_post(group, &item, now_ns))
            any = true;
        else
            group->warms[left++] = item;
    }
    group->warm_count = left;
    return any;
}
