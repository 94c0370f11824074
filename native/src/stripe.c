/* stripe.c - see stripe.h. */
#include "stripe.h"

#include <assert.h>

int stripe_choose(const struct stripe_rail *rails, size_t count)
{
    int best = -1;

    for (size_t i = 0; i < count; i++) {
        if (!rails[i].usable)
            continue;
        if (best < 0 || rails[i].outstanding_bytes < rails[best].outstanding_bytes ||
            (rails[i].outstanding_bytes == rails[best].outstanding_bytes &&
             rails[i].carried_bytes < rails[best].carried_bytes))
            best = (int)i;
    }
    return best;
}

void stripe_prefer(struct stripe_rail *rails, size_t count, bool bound, uint64_t spill_bytes)
{
    uint32_t nearest = UINT32_MAX;

    for (size_t i = 0; i < count; i++)
        if (rails[i].reachable && rails[i].rank < nearest)
            nearest = rails[i].rank;
    for (size_t i = 0; i < count; i++) {
        if (rails[i].rank <= nearest)
            continue;
        if (bound)
            rails[i].usable = 0;
        else
            rails[i].outstanding_bytes += spill_bytes;
    }
}

bool stripe_even(const struct stripe_rail *one, const struct stripe_rail *best, uint64_t bytes)
{
    return one->outstanding_bytes <= best->outstanding_bytes + bytes &&
           one->carried_bytes <= best->carried_bytes + bytes;
}

uint64_t stripe_cut(uint64_t length, uint64_t local_left, uint64_t remote_left)
{
    if (length > local_left)
        length = local_left;
    return length < remote_left ? length : remote_left;
}

uint32_t stripe_aligned_nic(uint32_t rail, uint32_t nic_count)
{
    assert(nic_count > 0);
    return rail % nic_count;
}

uint32_t stripe_peer_limit(uint32_t depth, uint32_t in_flight, uint32_t own, uint32_t peers)
{
    uint32_t free_now;
    uint32_t limit;

    assert(own <= in_flight);
    if (peers <= 1)
        return depth;
    free_now = in_flight < depth ? depth - in_flight : 0;
    limit = (uint32_t)((uint64_t)(free_now + own) * 2 / 3);
    return limit > 0 ? limit : 1;
}
