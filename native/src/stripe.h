/* stripe.h - PURE: which rail takes the next stripe, and how much of it fits between
 * the registration seams of both sides. */
#ifndef EKV_STRIPE_H
#define EKV_STRIPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct stripe_rail {
    uint64_t outstanding_bytes;
    uint64_t carried_bytes; /* in its life; breaks ties, so that idle rails take turns */
    uint32_t reachable;     /* healthy, with a key and a path to the peer */
    uint32_t usable;        /* and credit left */
    uint32_t rank;          /* nearness to the buffer, 0: nearest */
};

/* Index of the usable rail with the least bytes outstanding, or -1. */
int stripe_choose(const struct stripe_rail *rails, size_t count);

/* Nearness, before the choice.  Bound: only the nearest of the reachable rails stay
 * usable, so farther ones stand in for near ones that are out, not for busy ones.
 * Otherwise a far rail counts as having spill_bytes more to do than it has. */
void stripe_prefer(struct stripe_rail *rails, size_t count, bool bound, uint64_t spill_bytes);

/* Whether the one is as good a choice as the best, but for some bytes. */
bool stripe_even(const struct stripe_rail *one, const struct stripe_rail *best, uint64_t bytes);

/* The smallest of a piece's length and the distances to both seams. */
uint64_t stripe_cut(uint64_t length, uint64_t local_left, uint64_t remote_left);

/* The remote NIC that local rail number rail pairs with. */
uint32_t stripe_aligned_nic(uint32_t rail, uint32_t nic_count);

/* How many operations a peer may have in flight on a rail: everything while it is
 * alone; with company twice what it would leave free, so that peers that never answer
 * cannot take the whole queue between them. */
uint32_t stripe_peer_limit(uint32_t depth, uint32_t in_flight, uint32_t own, uint32_t peers);

#endif
