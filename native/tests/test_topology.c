/* test_topology.c - the pure part of nearness: paths, distances, which rails a region
 * gets; and the budget of a device. */
#include "budget.h"
#include "check.h"
#include "topology.h"

static struct place place_at(const char *path, int32_t numa_node)
{
    struct place place = {.numa_node = numa_node};

    CHECK(place_parse(path, &place));
    return place;
}

/* GPU and NICs of two switches of one processor, and of one of the other, as a p5 shows
 * them. */
#define FIRST "/sys/devices/pci0000:44/0000:44:00.0/0000:45:00.0/"
#define SECOND "/sys/devices/pci0000:55/0000:55:00.0/0000:56:00.0/"
#define THIRD "/sys/devices/pci0000:99/0000:99:00.0/0000:9a:00.0/"

static uint32_t rails_fill(struct place *rails)
{
    rails[0] = place_at(FIRST "0000:46:01.0/0000:4f:00.0", 0);
    rails[1] = place_at(FIRST "0000:46:01.1/0000:50:00.0", 0);
    rails[2] = place_at(SECOND "0000:57:01.0/0000:60:00.0", 0);
    rails[3] = place_at(SECOND "0000:57:01.1/0000:61:00.0", 0);
    rails[4] = place_at(THIRD "0000:9b:01.0/0000:a4:00.0", 1);
    rails[5] = place_at(THIRD "0000:9b:01.1/0000:a5:00.0", 1);
    return 6;
}

static void test_paths(void)
{
    struct place place = place_at(FIRST "0000:46:01.2/0000:53:00.0", 0);

    CHECK_INT(place.hop_count, 4);
    CHECK(place.hops[3] == 0x530000ull && place.root != 0);
    /* A tree that lies elsewhere, in a folder with a number in its name. */
    CHECK(place_parse("/tmp/1234/sys/devices/pci10000:00/10000:00:1f.7", &place));
    CHECK_INT(place.hop_count, 1);
    CHECK(place.hops[0] == (0x10000ull << 32 | 0x1f00 | 7));
    CHECK(!place_parse("/sys/devices/virtual/net/lo", &place));
    CHECK(!place_parse("", &place));
    CHECK(!place_parse("/sys/devices/pci0000:00/usb1/1-1:1.0", &place));
    CHECK_INT(place.hop_count, 0);
}

static void test_distances(void)
{
    struct place rails[6], flat, flat_other, host = {.numa_node = 0}, nowhere = {.numa_node = -1};
    struct place gpu = place_at(FIRST "0000:46:01.2/0000:53:00.0", 0);

    rails_fill(rails);
    CHECK(topology_distance(&gpu, &rails[0]) < TOPOLOGY_SAME_ROOT);
    CHECK_INT(topology_distance(&gpu, &rails[0]), topology_distance(&rails[1], &gpu));
    CHECK_INT(topology_distance(&gpu, &rails[2]), TOPOLOGY_SAME_NODE);
    CHECK_INT(topology_distance(&gpu, &rails[4]), TOPOLOGY_OTHER_NODE);
    CHECK_INT(topology_distance(&host, &rails[2]), TOPOLOGY_SAME_NODE);
    CHECK_INT(topology_distance(&host, &rails[4]), TOPOLOGY_OTHER_NODE);
    CHECK_INT(topology_distance(&nowhere, &rails[4]), TOPOLOGY_UNKNOWN);
    /* Without bridges, as a p4d shows them: the root is what they share. */
    flat = place_at("/sys/devices/pci0000:10/0000:10:1b.0", 0);
    flat_other = place_at("/sys/devices/pci0000:10/0000:10:1c.0", 0);
    CHECK_INT(topology_distance(&flat, &flat_other), TOPOLOGY_SAME_ROOT);
    /* A switch below a switch. */
    flat = place_at(FIRST "0000:46:01.2/0000:47:00.0/0000:48:00.0/0000:49:00.0", 0);
    flat_other = place_at(FIRST "0000:46:01.2/0000:47:00.0/0000:48:01.0/0000:4a:00.0", 0);
    CHECK(topology_distance(&flat, &flat_other) < topology_distance(&flat, &rails[0]));
}

static void test_device_memory(void)
{
    struct place gpu = place_at(FIRST "0000:46:01.2/0000:53:00.0", 0);
    struct place rails[6];
    uint32_t count = rails_fill(rails);
    struct reach reach;

    topology_plan(rails, count, &gpu, true, false, &reach);
    CHECK_INT(reach.rails, 0x3);
    CHECK_INT(reach.count, 2);
    CHECK(reach.bound);
    topology_plan(rails, count, &gpu, true, true, &reach);
    CHECK_INT(reach.rails, 0x3f);
    /* One near NIC alone: the other ones of its processor stand by. */
    topology_plan(rails + 1, count - 1, &gpu, true, false, &reach);
    CHECK_INT(reach.rails, 0x7);
    CHECK(reach.ranks[0] == 0 && reach.ranks[1] == 1 && reach.ranks[3] == 2);
    /* Nothing known of it: any NIC is as good as any other. */
    gpu = (struct place){.numa_node = -1};
    topology_plan(rails, count, &gpu, true, false, &reach);
    CHECK_INT(reach.rails, 0x3f);
}

static void test_host_memory(void)
{
    struct place rails[6], host = {.numa_node = 1};
    uint32_t count = rails_fill(rails);
    struct reach reach;

    topology_plan(rails, count, &host, false, false, &reach);
    CHECK_INT(reach.rails, 0x3f);
    CHECK(!reach.bound);
    CHECK(reach.ranks[4] == 0 && reach.ranks[5] == 0 && reach.ranks[0] == 1);
    CHECK_INT(reach.seats[4], 0);
    CHECK_INT(reach.seats[0], 2);
    for (uint32_t seat = 0; seat < count; seat++)
        CHECK_INT(reach.seats[reach_rail_at(&reach, count, seat)], seat);
}

static void test_budget(void)
{
    struct budget budget = {.bytes_max = 1 << 20, .entries_max = 100};
    char text[192];

    CHECK_INT(budget_entries(4095, 2, 4096), 2);
    CHECK_INT(budget_entries(4096, 4096, 4096), 1);
    CHECK_INT(budget_entries(65535, 65538, 65536), 3);
    CHECK(budget_allows(&budget, 1 << 20, 100));
    CHECK(!budget_allows(&budget, (1 << 20) + 1, 1));
    CHECK(!budget_allows(&budget, 1, 101));
    budget_take(&budget, 1 << 19, 60, 2);
    CHECK(budget_allows(&budget, 1 << 19, 40));
    CHECK(!budget_allows(&budget, UINT64_MAX, 0));
    CHECK(!budget_allows(&budget, 1, 41)); /* the sum counts, not the single one */
    budget_describe(&budget, text, sizeof text);
    CHECK(strstr(text, "524288 bytes, 60 page-table entries in 2 registrations"));
    CHECK(strstr(text, "limit 1048576 bytes") && strstr(text, "limit 100 entries"));
    budget_give(&budget, 1 << 19, 60, 2);
    CHECK(budget_allows(&budget, 1 << 20, 100));
    budget = (struct budget){.bytes = 1};
    CHECK(budget_allows(&budget, UINT64_MAX / 2, UINT64_MAX));
}

int main(void)
{
    RUN(test_paths);
    RUN(test_distances);
    RUN(test_device_memory);
    RUN(test_host_memory);
    RUN(test_budget);
    return 0;
}
