/* range.h - PURE: address ranges sorted by their first byte, found by binary search.
 *
 * Ranges may overlap.  reach[i] is the furthest end among items[0..i], which tells a
 * search when it can stop walking back.  The owner provides the locking. */
#ifndef EKV_RANGE_H
#define EKV_RANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct range {
    uint64_t begin;
    uint64_t end;  /* one past the last byte */
    uint32_t slot; /* the owner's number for it */
};

struct range_table {
    struct range *items;
    uint64_t *reach;
    size_t count;
    size_t capacity;
};

void range_table_close(struct range_table *table);

/* False: out of memory, nothing changed. */
bool range_insert(struct range_table *table, uint64_t begin, uint64_t end, uint32_t slot);

/* Removes the range of that slot; false if there is none. */
bool range_remove(struct range_table *table, uint32_t slot);

/* Of the ranges that hold the byte at address, the one that reaches furthest (and so
 * holds address + length if any does), or NULL. */
const struct range *range_find(const struct range_table *table, uint64_t address, uint64_t length);

/* True when every byte lies in some range; else *gap is the first one that does not. */
bool range_covers(const struct range_table *table, uint64_t address, uint64_t length,
                  uint64_t *gap);

/* The range whose begin or end is nearest to address, or NULL if the table is empty. */
const struct range *range_nearest(const struct range_table *table, uint64_t address);

#endif
