/* range.c - see range.h. */
#include "range.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

void range_table_close(struct range_table *table)
{
    free(table->items);
    free(table->reach);
    memset(table, 0, sizeof *table);
}

/* Number of ranges that begin at or before address. */
static size_t range_upper(const struct range_table *table, uint64_t address)
{
    size_t low = 0;
    size_t high = table->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (table->items[middle].begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void range_refresh(struct range_table *table, size_t from)
{
    uint64_t furthest = from ? table->reach[from - 1] : 0;

    for (size_t i = from; i < table->count; i++) {
        if (table->items[i].end > furthest)
            furthest = table->items[i].end;
        table->reach[i] = furthest;
    }
}

static bool range_reserve(struct range_table *table)
{
    size_t capacity = table->capacity ? table->capacity * 2 : 16;
    struct range *items;
    uint64_t *reach;

    if (table->count < table->capacity)
        return true;
    items = realloc(table->items, capacity * sizeof *items);
    if (!items)
        return false;
    table->items = items;
    reach = realloc(table->reach, capacity * sizeof *reach);
    if (!reach)
        return false;
    table->reach = reach;
    table->capacity = capacity;
    return true;
}

bool range_insert(struct range_table *table, uint64_t begin, uint64_t end, uint32_t slot)
{
    size_t at;

    assert(begin < end);
    if (!range_reserve(table))
        return false;
    at = range_upper(table, begin);
    memmove(&table->items[at + 1], &table->items[at], (table->count - at) * sizeof *table->items);
    table->items[at] = (struct range){.begin = begin, .end = end, .slot = slot};
    table->count++;
    range_refresh(table, at);
    return true;
}

bool range_remove(struct range_table *table, uint32_t slot)
{
    for (size_t i = 0; i < table->count; i++) {
        if (table->items[i].slot != slot)
            continue;
        memmove(&table->items[i], &table->items[i + 1],
                (table->count - i - 1) * sizeof *table->items);
        table->count--;
        range_refresh(table, i);
        return true;
    }
    return false;
}

const struct range *range_find(const struct range_table *table, uint64_t address, uint64_t length)
{
    const struct range *best = NULL;

    for (size_t i = range_upper(table, address); i > 0 && table->reach[i - 1] > address; i--) {
        const struct range *item = &table->items[i - 1];

        if (item->end <= address)
            continue;
        if (!best || item->end > best->end)
            best = item;
        if (best->end - address >= length)
            break;
    }
    return best;
}

bool range_covers(const struct range_table *table, uint64_t address, uint64_t length, uint64_t *gap)
{
    while (length > 0) {
        const struct range *found = range_find(table, address, length);
        uint64_t held;

        if (!found) {
            *gap = address;
            return false;
        }
        held = found->end - address;
        if (held >= length)
            return true;
        address += held;
        length -= held;
    }
    return true;
}

static uint64_t range_distance(const struct range *item, uint64_t address)
{
    if (address < item->begin)
        return item->begin - address;
    return address < item->end ? 0 : address - item->end + 1;
}

const struct range *range_nearest(const struct range_table *table, uint64_t address)
{
    const struct range *best = NULL;

    for (size_t i = 0; i < table->count; i++)
        if (!best || range_distance(&table->items[i], address) < range_distance(best, address))
            best = &table->items[i];
    return best;
}
