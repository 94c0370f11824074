/* inflight.c - see inflight.h. */
#include "inflight.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"

/* How long a slot rests after an error. */
#define INFLIGHT_REST_NS NS_PER_SECOND

bool inflight_open(struct inflight *inflight, size_t count)
{
    assert(count > 0);
    memset(inflight, 0, sizeof *inflight);
    inflight->slots = calloc(count, sizeof *inflight->slots);
    if (!inflight->slots)
        return false;
    inflight->count = count;
    for (size_t i = 0; i + 1 < count; i++)
        inflight->slots[i].next = &inflight->slots[i + 1];
    inflight->free_first = &inflight->slots[0];
    inflight->free_last = &inflight->slots[count - 1];
    return true;
}

void inflight_close(struct inflight *inflight)
{
    free(inflight->slots);
    memset(inflight, 0, sizeof *inflight);
}

static void inflight_append(struct inflight *inflight, struct operation *operation)
{
    operation->next = NULL;
    if (inflight->free_last)
        inflight->free_last->next = operation;
    else
        inflight->free_first = operation;
    inflight->free_last = operation;
}

struct operation *inflight_take(struct inflight *inflight, uint64_t now_ns)
{
    /* One lap at most: every free slot may be resting, and then the first one (the
     * one that rested longest) serves, since stalling would be worse. */
    size_t tries = inflight->count - inflight->used;
    struct operation *operation = inflight->free_first;

    while (operation && operation->freed_ns != 0 &&
           now_ns - operation->freed_ns < INFLIGHT_REST_NS && --tries > 0) {
        inflight->free_first = operation->next;
        if (!inflight->free_first)
            inflight->free_last = NULL;
        inflight_append(inflight, operation);
        operation = inflight->free_first;
    }
    if (!operation)
        return NULL;
    inflight->free_first = operation->next;
    if (!inflight->free_first)
        inflight->free_last = NULL;
    operation->next = NULL;
    operation->freed_ns = 0;
    inflight->used++;
    return operation;
}

void inflight_give(struct inflight *inflight, struct operation *operation, uint64_t error_ns)
{
    struct notice_message *message = operation->message;

    assert(operation->kind != OPERATION_FREE && inflight->used > 0);
    memset(operation, 0, sizeof *operation);
    operation->message = message;
    operation->freed_ns = error_ns;
    inflight->used--;
    inflight_append(inflight, operation);
}

struct operation *inflight_find(const struct inflight *inflight, const void *context)
{
    uintptr_t first = (uintptr_t)inflight->slots;
    uintptr_t at = (uintptr_t)context;
    struct operation *operation;

    if (at < first || at >= first + inflight->count * sizeof *inflight->slots ||
        (at - first) % sizeof *inflight->slots != 0)
        return NULL;
    operation = &inflight->slots[(at - first) / sizeof *inflight->slots];
    return operation->kind == OPERATION_FREE ? NULL : operation;
}
