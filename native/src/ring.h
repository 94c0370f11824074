/* ring.h - a bounded ring of 64-bit values, many producers and one consumer.
 *
 * Each cell carries a sequence number that says whose turn it is, so producers only
 * contend on the tail and nobody ever waits for a lock.  Any thread pushes; only the
 * owning progress thread pops. */
#ifndef EKV_RING_H
#define EKV_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ring_cell {
    _Atomic uint64_t sequence;
    uint64_t value;
};

struct ring {
    struct ring_cell *cells;
    uint64_t mask;
    _Alignas(64) _Atomic uint64_t tail; /* next cell to fill */
    _Alignas(64) _Atomic uint64_t head; /* next cell to empty; written by the consumer */
};

/* Capacity is rounded up to a power of two.  Returns false when out of memory. */
bool ring_open(struct ring *ring, size_t capacity);
void ring_close(struct ring *ring);

/* False: full. */
bool ring_push(struct ring *ring, uint64_t value);

/* False: empty. */
bool ring_pop(struct ring *ring, uint64_t *value);

/* May be stale as soon as it is known, unless the consumer asks. */
bool ring_is_empty(struct ring *ring);

#endif
