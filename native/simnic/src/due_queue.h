/* Operations in the order of the time at which they are due: a binary heap. */
#ifndef SIMNIC_DUE_QUEUE_H
#define SIMNIC_DUE_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct operation;
struct endpoint;

struct due_queue {
    struct operation **entries;
    size_t count;
    size_t capacity;
};

void due_queue_free(struct due_queue *queue);
bool due_queue_reserve(struct due_queue *queue, size_t capacity);
void due_queue_push(struct due_queue *queue, struct operation *operation);
/* The operation due first if its time has come, else NULL. */
struct operation *due_queue_pop(struct due_queue *queue, uint64_t now_ns);
/* Takes one operation of the endpoint out, whenever it is due; NULL when there is none. */
struct operation *due_queue_take(struct due_queue *queue, const struct endpoint *endpoint);

#endif
