/* topology.c - see topology.h. */
#include "topology.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* "0000:4f:00.0"; false: the text is something else. */
static bool address_parse(const char *text, size_t length, uint64_t *address)
{
    static const char separators[] = "::.";
    uint64_t parts[4];
    const char *at = text;

    for (int i = 0; i < 4; i++) {
        char *end;

        if (at >= text + length || !strchr("0123456789abcdefABCDEF", *at))
            return false;
        parts[i] = strtoul(at, &end, 16);
        if (i < 3 ? *end != separators[i] : end != text + length)
            return false;
        at = end + 1;
    }
    *address = parts[0] << 32 | parts[1] << 16 | parts[2] << 8 | parts[3];
    return true;
}

bool place_parse(const char *path, struct place *place)
{
    place->hop_count = 0;
    place->root = 0;
    while (*path) {
        size_t length = strcspn(path, "/");
        uint64_t address;

        if (length > 3 && strncmp(path, "pci", 3) == 0 && strchr("0123456789abcdef", path[3])) {
            char *end;

            place->root = strtoul(path + 3, &end, 16) << 16;
            if (*end == ':')
                place->root |= strtoul(end + 1, NULL, 16);
            place->root |= UINT64_C(1) << 63; /* 0 is for unknown */
            place->hop_count = 0;
        } else if (address_parse(path, length, &address) && place->hop_count < TOPOLOGY_HOPS_MAX) {
            place->hops[place->hop_count++] = address;
        }
        path += length;
        path += *path == '/';
    }
    return place->hop_count > 0;
}

uint32_t topology_distance(const struct place *a, const struct place *b)
{
    uint32_t shared = 0;

    while (shared < a->hop_count && shared < b->hop_count && a->hops[shared] == b->hops[shared])
        shared++;
    if (shared > 0)
        return TOPOLOGY_SAME_SWITCH + TOPOLOGY_HOPS_MAX - shared;
    if (a->root && a->root == b->root)
        return TOPOLOGY_SAME_ROOT;
    if (a->numa_node < 0 || b->numa_node < 0)
        return TOPOLOGY_UNKNOWN;
    return a->numa_node == b->numa_node ? TOPOLOGY_SAME_NODE : TOPOLOGY_OTHER_NODE;
}

void topology_rank(const struct place *rails, uint32_t count, const struct place *buffer,
                   struct reach *reach)
{
    uint32_t distances[TOPOLOGY_RAILS_MAX];
    uint32_t seated = 0;
    uint8_t rank = 0;

    assert(count <= TOPOLOGY_RAILS_MAX);
    for (uint32_t i = 0; i < count; i++)
        distances[i] = topology_distance(&rails[i], buffer);
    while (seated < count) {
        uint32_t nearest = UINT32_MAX;

        for (uint32_t i = 0; i < count; i++)
            if (distances[i] < nearest)
                nearest = distances[i];
        for (uint32_t i = 0; i < count; i++)
            if (distances[i] == nearest) {
                distances[i] = UINT32_MAX;
                reach->ranks[i] = rank;
                reach->seats[i] = (uint8_t)seated++;
            }
        rank++;
    }
}

void topology_plan(const struct place *rails, uint32_t count, const struct place *buffer,
                   bool is_device, bool everywhere, struct reach *reach)
{
    uint8_t last = 0;
    uint32_t nearest = 0;

    memset(reach, 0, sizeof *reach);
    topology_rank(rails, count, buffer, reach);
    for (uint32_t i = 0; i < count; i++)
        nearest += reach->ranks[i] == 0;
    reach->bound = is_device;
    if (!is_device || everywhere)
        last = UINT8_MAX;
    else if (nearest == 1)
        last = 1;
    for (uint32_t i = 0; i < count; i++)
        if (reach->ranks[i] <= last) {
            reach->rails |= UINT64_C(1) << i;
            reach->count++;
        }
}

uint32_t reach_rail_at(const struct reach *reach, uint32_t count, uint32_t seat)
{
    uint32_t rail = 0;

    assert(seat < count);
    while (reach->seats[rail] != seat)
        rail++;
    return rail;
}
