/* A hash map from 64-bit numbers (never 0) to 32-bit ones. */
#ifndef SIMNIC_NUMBER_MAP_H
#define SIMNIC_NUMBER_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct number_map_entry {
    uint64_t key;
    uint32_t value;
};

struct number_map {
    struct number_map_entry *entries;
    size_t capacity; /* a power of two */
    size_t count;
};

void number_map_free(struct number_map *map);
uint32_t *number_map_find(const struct number_map *map, uint64_t key);
/* The place of the value, 0 when it is new; NULL without memory. */
uint32_t *number_map_put(struct number_map *map, uint64_t key);
void number_map_remove(struct number_map *map, uint64_t key);

#endif
