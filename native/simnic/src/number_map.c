#include "number_map.h"

#include <stdlib.h>

static size_t home(const struct number_map *map, uint64_t key)
{
    return (size_t)((key * 0x9e3779b97f4a7c15u) >> 32) & (map->capacity - 1);
}

/* Where the key is, or the free place where it belongs. */
static struct number_map_entry *probe(const struct number_map *map, uint64_t key)
{
    size_t at = home(map, key);
    while (map->entries[at].key != 0 && map->entries[at].key != key)
        at = (at + 1) & (map->capacity - 1);
    return &map->entries[at];
}

static bool grow(struct number_map *map)
{
    struct number_map larger = {NULL, map->capacity ? map->capacity * 2 : 64, map->count};
    larger.entries = calloc(larger.capacity, sizeof *larger.entries);
    if (!larger.entries)
        return false;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->entries[i].key != 0)
            *probe(&larger, map->entries[i].key) = map->entries[i];
    free(map->entries);
    *map = larger;
    return true;
}

void number_map_free(struct number_map *map)
{
    free(map->entries);
    *map = (struct number_map){NULL, 0, 0};
}

uint32_t *number_map_find(const struct number_map *map, uint64_t key)
{
    if (map->capacity == 0)
        return NULL;
    struct number_map_entry *entry = probe(map, key);
    return entry->key == key ? &entry->value : NULL;
}

uint32_t *number_map_put(struct number_map *map, uint64_t key)
{
    if (map->count * 2 >= map->capacity && !grow(map))
        return NULL;
    struct number_map_entry *entry = probe(map, key);
    if (entry->key == 0) {
        entry->key = key;
        entry->value = 0;
        map->count++;
    }
    return &entry->value;
}

void number_map_remove(struct number_map *map, uint64_t key)
{
    if (!number_map_find(map, key))
        return;
    size_t hole = (size_t)(probe(map, key) - map->entries), mask = map->capacity - 1;
    map->entries[hole].key = 0;
    map->count--;
    /* Entries that were pushed past the hole move back, so that probing never stops short of them.
     */
    for (size_t at = (hole + 1) & mask; map->entries[at].key != 0; at = (at + 1) & mask) {
        size_t wanted = home(map, map->entries[at].key);
        if (((at - wanted) & mask) < ((at - hole) & mask))
            continue;
        map->entries[hole] = map->entries[at];
        map->entries[at].key = 0;
        hole = at;
    }
}
