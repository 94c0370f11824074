/* ring.c - see ring.h. */
#include "ring.h"

#include <stdlib.h>

bool ring_open(struct ring *ring, size_t capacity)
{
    size_t size = 2;

    while (size < capacity)
        size *= 2;
    ring->cells = calloc(size, sizeof *ring->cells);
    if (!ring->cells)
        return false;
    ring->mask = size - 1;
    for (size_t i = 0; i < size; i++)
        atomic_init(&ring->cells[i].sequence, i);
    atomic_init(&ring->tail, 0);
    atomic_init(&ring->head, 0);
    return true;
}

void ring_close(struct ring *ring)
{
    free(ring->cells);
    ring->cells = NULL;
}

bool ring_push(struct ring *ring, uint64_t value)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);

    for (;;) {
        struct ring_cell *cell = &ring->cells[tail & ring->mask];
        uint64_t sequence = atomic_load_explicit(&cell->sequence, memory_order_acquire);

        if (sequence == tail) {
            if (atomic_compare_exchange_weak_explicit(&ring->tail, &tail, tail + 1,
                                                      memory_order_relaxed, memory_order_relaxed)) {
                cell->value = value;
                atomic_store_explicit(&cell->sequence, tail + 1, memory_order_release);
                return true;
            }
        } else if ((int64_t)(sequence - tail) < 0) {
            return false; /* the consumer has not emptied this cell of the last lap */
        } else {
            tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
        }
    }
}

bool ring_pop(struct ring *ring, uint64_t *value)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    struct ring_cell *cell = &ring->cells[head & ring->mask];

    if (atomic_load_explicit(&cell->sequence, memory_order_acquire) != head + 1)
        return false;
    *value = cell->value;
    atomic_store_explicit(&cell->sequence, head + ring->mask + 1, memory_order_release);
    atomic_store_explicit(&ring->head, head + 1, memory_order_relaxed);
    return true;
}

bool ring_is_empty(struct ring *ring)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    struct ring_cell *cell = &ring->cells[head & ring->mask];

    /* Sequentially consistent: pairs with the sleeping flag of the progress thread. */
    return atomic_load(&cell->sequence) != head + 1;
}
