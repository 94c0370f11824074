#include "due_queue.h"

#include <stdlib.h>

#include "objects.h"

void due_queue_free(struct due_queue *queue)
{
    free(queue->entries);
    *queue = (struct due_queue){NULL, 0, 0};
}

bool due_queue_reserve(struct due_queue *queue, size_t capacity)
{
    if (capacity <= queue->capacity)
        return true;
    struct operation **larger = realloc(queue->entries, capacity * sizeof(struct operation *));
    if (!larger)
        return false;
    queue->entries = larger;
    queue->capacity = capacity;
    return true;
}

static void swap(struct operation **a, struct operation **b)
{
    struct operation *kept = *a;
    *a = *b;
    *b = kept;
}

static void rise(struct due_queue *queue, size_t at)
{
    for (; at > 0; at = (at - 1) / 2) {
        struct operation **parent = &queue->entries[(at - 1) / 2];
        if ((*parent)->due_ns <= queue->entries[at]->due_ns)
            return;
        swap(parent, &queue->entries[at]);
    }
}

static void sink(struct due_queue *queue, size_t at)
{
    for (;;) {
        size_t first = at;
        for (size_t child = 2 * at + 1; child <= 2 * at + 2 && child < queue->count; child++)
            if (queue->entries[child]->due_ns < queue->entries[first]->due_ns)
                first = child;
        if (first == at)
            return;
        swap(&queue->entries[first], &queue->entries[at]);
        at = first;
    }
}

void due_queue_push(struct due_queue *queue, struct operation *operation)
{
    queue->entries[queue->count] = operation;
    rise(queue, queue->count++);
}

static struct operation *take_at(struct due_queue *queue, size_t at)
{
    struct operation *taken = queue->entries[at];
    queue->entries[at] = queue->entries[--queue->count];
    if (at < queue->count) {
        sink(queue, at);
        rise(queue, at);
    }
    return taken;
}

struct operation *due_queue_pop(struct due_queue *queue, uint64_t now_ns)
{
    if (queue->count == 0 || queue->entries[0]->due_ns > now_ns)
        return NULL;
    return take_at(queue, 0);
}

struct operation *due_queue_take(struct due_queue *queue, const struct endpoint *endpoint)
{
    for (size_t i = 0; i < queue->count; i++)
        if (queue->entries[i]->endpoint == endpoint)
            return take_at(queue, i);
    return NULL;
}
