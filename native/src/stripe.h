/* stripe.h - PURE: which rail takes the next stripe, and how much of it fits between
 * the registration seams of both sides. */
#ifndef EKV_STRIPE_H
#define EKV_STRIPE_H

#include <stddef.h>
#include <stdint.h>

struct stripe_rail {
    uint64_t outstanding_bytes;
    uint64_t carried_bytes; /* in its life; breaks ties, so that idle rails take turns */
    uint32_t usable;        /* healthy, a path to the peer, and credit left */
};

/* Index of the usable rail with the least bytes outstanding, or -1. */
int stripe_choose(const struct stripe_rail *rails, size_t count);

/* The smallest of a piece's length and the distances to both seams. */
uint64_t stripe_cut(uint64_t length, uint64_t local_left, uint64_t remote_left);

/* The remote NIC that local rail number rail pairs with. */
uint32_t stripe_aligned_nic(uint32_t rail, uint32_t nic_count);

/* How many operations a peer may have in flight on a rail: everything while it is
 * alone; with company twice what it would leave free, so that peers that never answer
 * cannot take the whole queue between them. */
uint32_t stripe_peer_limit(uint32_t depth, uint32_t in_flight, uint32_t own, uint32_t peers);

#endif
