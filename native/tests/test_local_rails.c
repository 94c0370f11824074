/* test_local_rails.c - rails by nearness, balance over groups and registration at scale,
 * on simulated NICs.  The simulation reads its settings once per process, so each
 * scenario runs in a process of its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "pair.h"
#include "place.h"

#define RAILS 32u
#define SMALL_STRIPE (UINT64_C(1) << 16)
#define LARGE_STRIPE (UINT64_C(1) << 20)
/* As the simulated p5en and p6-b200 show their GPUs, see native/simnic/src/instance.c. */
#define P5EN_GPU_0 "0000:57:00.0" /* beside rails 0 and 1 */
#define P5EN_GPU_3 "0000:8a:00.0" /* beside rails 6 and 7 */
#define B200_GPU_0 "0000:50:00.0" /* beside rail 0 */
#define B200_GPU_5 "0000:a5:00.0" /* beside rail 5 */

static char tree[64];
static uint64_t stripe = SMALL_STRIPE;
static uint64_t bytes;
static uint8_t *source, *target;

struct ends {
    ekv_engine *left, *right;
    struct card left_card, right_card;
    ekv_peer_id peer;
};

static uint8_t *memory_of(uint64_t length)
{
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(memory != MAP_FAILED);
    return memory;
}

static int region_add_at(ekv_engine *engine, void *memory, uint64_t length, const char *place,
                         ekv_region_id *region, ekv_error *error)
{
    ekv_memory description = {.struct_size = sizeof description,
                              .kind = EKV_MEMORY_HOST,
                              .address = (uint64_t)(uintptr_t)memory,
                              .length_bytes = length,
                              .device = -1,
                              .access = EKV_ACCESS_REMOTE_WRITE | EKV_ACCESS_REMOTE_READ};

    snprintf(description.place, sizeof description.place, "%s", place);
    return ekv_region_add(engine, &description, region, error);
}

static ekv_options efa_options(uint64_t incarnation, uint32_t threads)
{
    ekv_options options = pair_options("efa", incarnation);

    options.progress_threads = threads;
    options.sysfs_root = tree;
    options.stripe_bytes = stripe;
    return options;
}

static void ends_open(struct ends *ends, uint32_t threads, uint64_t length, const char *left_place,
                      const char *right_place)
{
    ekv_options left = efa_options(0x11, threads), right = efa_options(0x22, threads);
    ekv_error error = {.struct_size = sizeof error};
    ekv_region_id left_region, right_region;

    bytes = length;
    source = memory_of(bytes);
    target = memory_of(bytes);
    for (uint64_t i = 0; i < bytes; i++)
        source[i] = (uint8_t)(i * 11 + (i >> 12));
    ends->left = pair_open(&left);
    ends->right = pair_open(&right);
    CHECK_OK(region_add_at(ends->left, source, bytes, left_place, &left_region, &error));
    CHECK_OK(region_add_at(ends->right, target, bytes, right_place, &right_region, &error));
    pair_card(ends->left, 0x11, left_region, source, bytes, &ends->left_card);
    pair_card(ends->right, 0x22, right_region, target, bytes, &ends->right_card);
    pair_connect(ends->right, &ends->left_card, 0);
    ends->peer = pair_connect(ends->left, &ends->right_card, 0);
}

static ekv_job_id ends_submit(struct ends *ends, uint32_t operation, uint64_t length)
{
    ekv_job_options options = pair_job(ends->peer, operation, 30);
    uint64_t local = (uint64_t)(uintptr_t)source, remote = (uint64_t)(uintptr_t)target;
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_id job;

    CHECK_OK(ekv_submit(ends->left, &options, &local, &remote, &length, 1, &job, &error));
    return job;
}

static void ends_move(struct ends *ends, uint64_t length)
{
    ekv_result result = pair_finish(ends->left, ends_submit(ends, EKV_WRITE, length), 40);

    if (result.status != EKV_OK)
        printf("  %s: %s\n", ekv_code_name(result.status), result.text);
    CHECK_INT(result.status, EKV_OK);
    CHECK_INT(result.bytes, length);
    if (!getenv("EFA_KV_SIM_NO_COPY"))
        CHECK(memcmp(source, target, length) == 0);
}

/* Bytes that each rail of the left engine has written. */
static size_t ends_bytes(struct ends *ends, uint64_t written[RAILS])
{
    ekv_rail_counters counters[RAILS] = {{.struct_size = sizeof counters[0]}};
    size_t count;

    CHECK_INT(ekv_counters(ends->left, counters, RAILS, &count), EKV_OK);
    CHECK(count <= RAILS);
    for (size_t i = 0; i < count; i++) {
        written[i] = counters[i].bytes_written;
        printf("%s%llu",
               i ? " " : "  stripes per rail: ", (unsigned long long)(written[i] / stripe));
    }
    printf("\n");
    return count;
}

static void ends_close(struct ends *ends)
{
    CHECK_INT(ekv_engine_close(ends->left, 5), 0);
    CHECK_INT(ekv_engine_close(ends->right, 5), 0);
    munmap(source, bytes);
    munmap(target, bytes);
}

static uint64_t rails_of(const struct card *card)
{
    uint64_t rails = 0;

    for (size_t i = 0; i < card->key_count; i++)
        rails |= UINT64_C(1) << card->keys[i].nic;
    return rails;
}

/* ---- nearness ------------------------------------------------------------- */

static void scenario_shows_places(void)
{
    ekv_options options = efa_options(0x11, 1);
    ekv_engine *engine = pair_open(&options);
    ekv_log_record record = {.struct_size = sizeof record};
    ekv_nic nics[16] = {{.struct_size = sizeof nics[0]}};
    size_t count;
    int said = 0;

    CHECK_INT(ekv_engine_rails(engine, nics, 16, &count), EKV_OK);
    CHECK_INT(count, 16);
    CHECK(strcmp(nics[0].pci, "0000:55:00.0") == 0 && strcmp(nics[15].pci, "0000:cd:00.0") == 0);
    CHECK_INT(nics[0].numa_node, 0);
    CHECK_INT(nics[15].numa_node, 1);
    while (ekv_log_read(engine, &record, 1) == 1)
        said |= strstr(record.text, "PCI 0000:55:00.0, NUMA node 0") != NULL;
    CHECK(said);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
}

/* Memory of a GPU moves over the NICs of its switch, to the NICs of the other one's,
 * whichever group they belong to. */
static void scenario_stays_behind_the_switch(void)
{
    const uint32_t threads[] = {1, 2, 8, 16};

    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        uint64_t written[RAILS], most;
        struct ends ends;

        ends_open(&ends, threads[i], 64 * stripe, P5EN_GPU_0, P5EN_GPU_3);
        CHECK_INT(rails_of(&ends.left_card), 0x3);
        CHECK_INT(rails_of(&ends.right_card), 0xc0);
        ends_move(&ends, bytes);
        CHECK_INT(ends_bytes(&ends, written), 16);
        most = written[0] > written[1] ? written[0] : written[1];
        CHECK_INT(written[0] + written[1], bytes);
        /* With a thread each, what the scheduler does to them shows in deep queues. */
        CHECK(threads[i] == 16 || most * 2 * 100 <= bytes * 105);
        ends_close(&ends);
    }
}

/* One of the two near NICs dies: the other one carries the rest. When both are gone there
 * is nothing left, and that is said. */
static void scenario_loses_a_near_nic(void)
{
    uint64_t written[RAILS];
    struct ends ends;

    ends_open(&ends, 2, 64 * stripe, P5EN_GPU_0, P5EN_GPU_3);
    ends_move(&ends, bytes);
    ends_bytes(&ends, written);
    CHECK(written[0] < 16 * stripe);
    CHECK_INT(written[0] + written[1], bytes);
    ends_close(&ends);
}

static void scenario_loses_both_near_nics(void)
{
    struct ends ends;
    ekv_result result;

    ends_open(&ends, 2, 64 * stripe, P5EN_GPU_0, P5EN_GPU_3);
    result = pair_finish(ends.left, ends_submit(&ends, EKV_WRITE, bytes), 40);
    printf("  %s: %s\n", ekv_code_name(result.status), result.text);
    CHECK(result.status < 0 && result.bytes < bytes);
    CHECK(result.text[0]);
    ends_close(&ends);
}

/* A GPU with a single NIC has those of its processor as spares, used when it is gone. */
static void scenario_uses_spares(void)
{
    uint64_t written[RAILS];
    struct ends ends;

    ends_open(&ends, 4, 64 * stripe, B200_GPU_0, B200_GPU_5);
    CHECK_INT(rails_of(&ends.left_card), 0x0f);
    CHECK_INT(rails_of(&ends.right_card), 0xf0);
    CHECK_INT(ends.right_card.keys[0].nic, 5); /* its nearest is named first */
    ends_move(&ends, 4 * stripe);
    ends_bytes(&ends, written);
    CHECK_INT(written[0], 4 * stripe);
    ends_move(&ends, bytes); /* it dies at the 20th operation */
    CHECK_INT(ends_bytes(&ends, written), 8);
    CHECK(written[0] < 24 * stripe);
    CHECK(written[1] && written[2] && written[3]);
    for (uint32_t i = 4; i < 8; i++)
        CHECK_INT(written[i], 0);
    ends_close(&ends);
}

/* Host memory: a light load stays on its own side, a heavy one has all NICs. */
static void scenario_spills_from_host_memory(void)
{
    uint64_t written[RAILS];
    uint8_t probe = 1;
    struct ends ends;

    if (place_node_of_memory((uint64_t)(uintptr_t)&probe, 1) != 0) {
        printf("  the kernel does not say that this memory is on node 0: skipped\n");
        return;
    }
    stripe = LARGE_STRIPE;
    ends_open(&ends, 2, 192 * stripe, "", "");
    CHECK_INT(rails_of(&ends.left_card), 0xffff);
    ends_move(&ends, 8 * stripe);
    ends_bytes(&ends, written);
    for (uint32_t i = 0; i < 8; i++)
        CHECK_INT(written[i], stripe);
    ends_move(&ends, bytes);
    ends_bytes(&ends, written);
    for (uint32_t i = 0; i < 8; i++)
        CHECK(written[i] > stripe && written[i + 8] > 0);
    ends_close(&ends);
}

/* ---- balance -------------------------------------------------------------- */

/* A loaded machine leaves a thread without a processor, and its completions unread, so
 * that its rails look busy for a while; later stripes make up for it.  So all bytes that
 * were moved must be even after two of a few jobs at least, not after each. */
#define ROUNDS 5
#define ROUNDS_EVEN 2

static int is_even(const uint64_t *written, size_t count)
{
    uint64_t most = 0, sum = 0;

    for (size_t r = 0; r < count; r++) {
        most = written[r] > most ? written[r] : most;
        sum += written[r];
    }
    return most * count * 100 <= sum * 105;
}

static void scenario_balances(void)
{
    const uint32_t threads[] = {1, 2, 3, 4, 8};

    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        uint64_t written[RAILS];
        struct ends ends;
        int even = 0;

        ends_open(&ends, threads[i], 64 * stripe, "", "");
        for (int round = 0; round < ROUNDS; round++) {
            ends_move(&ends, bytes);
            printf("  %u groups:", threads[i]);
            even += is_even(written, ends_bytes(&ends, written));
        }
        CHECK(even >= ROUNDS_EVEN);
        ends_close(&ends);
    }
}

/* ---- registration --------------------------------------------------------- */

/* The device takes 12 MiB in total; the engine's own buffers are in it. */
static void scenario_fills_a_device(void)
{
    ekv_options options = efa_options(0x11, 2);
    ekv_engine *engine = pair_open(&options);
    uint8_t *memory = memory_of(12 << 20);
    ekv_error error = {.struct_size = sizeof error};
    ekv_region_id first, second;

    CHECK_OK(region_add_at(engine, memory, 6 << 20, "", &first, &error));
    CHECK_INT(region_add_at(engine, memory + (6 << 20), 6 << 20, "", &second, &error),
              EKV_EREGISTER);
    printf("  %s\n", error.text);
    CHECK(strstr(error.text, "already registered 6291456 bytes, 1536 page-table entries in 1"));
    CHECK(strstr(error.text, "rdmap")); /* which one */
    CHECK_OK(ekv_region_remove(engine, first, 1, &error));
    CHECK_OK(region_add_at(engine, memory + (6 << 20), 6 << 20, "", &second, &error));
    CHECK_INT(ekv_engine_close(engine, 1), 0);
}

/* Limits that the operator knows are kept without asking the device. */
static void scenario_keeps_known_limits(void)
{
    ekv_options options = efa_options(0x11, 2);
    uint8_t *memory = memory_of(12 << 20);
    ekv_error error = {.struct_size = sizeof error};
    ekv_region_id region;
    ekv_engine *engine;

    options.device_bytes_max = 8 << 20;
    engine = pair_open(&options);
    CHECK_OK(region_add_at(engine, memory, 4 << 20, "", &region, &error));
    CHECK_INT(region_add_at(engine, memory, 5 << 20, "", &region, &error), EKV_EREGISTER);
    CHECK(strstr(error.text, "limit 8388608 bytes"));
    CHECK_OK(region_add_at(engine, memory + (4 << 20), 4 << 20, "", &region, &error));
    CHECK_INT(ekv_engine_close(engine, 1), 0);

    options.device_bytes_max = 0;
    options.device_entries_max = 1500;
    engine = pair_open(&options);
    CHECK_OK(region_add_at(engine, memory, 4 << 20, "", &region, &error)); /* 1024 */
    CHECK_INT(region_add_at(engine, memory, 4 << 20, "", &region, &error), EKV_EREGISTER);
    CHECK(strstr(error.text, "1024 page-table entries") && strstr(error.text, "limit 1500"));
    CHECK_INT(ekv_engine_close(engine, 1), 0);
}

/* Large enough for a thread per rail; moved, given new keys, moved again. */
static void scenario_registers_in_parallel(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_region_key keys[2 * RAILS] = {{.struct_size = sizeof keys[0]}};
    struct ends ends;
    size_t count;

    ends_open(&ends, 2, 96u << 20, "", "");
    CHECK_INT(ends.right_card.key_count, 8);
    ends_move(&ends, bytes);
    CHECK_OK(ekv_region_rotate(ends.right, ends.right_card.region, 5, &error));
    CHECK_INT(ekv_region_keys(ends.right, ends.right_card.region, keys, 2 * RAILS, &count), EKV_OK);
    CHECK_INT(count, 8);
    for (size_t i = 0; i < count; i++) {
        CHECK(keys[i].key != ends.right_card.keys[i].key);
        ends.right_card.keys[i].key = keys[i].key;
    }
    CHECK_OK(ekv_peer_region_add(ends.left, ends.peer, ends.right_card.region,
                                 ends.right_card.address, bytes, ends.right_card.keys, count,
                                 &error));
    memset(target, 0, bytes);
    ends_move(&ends, bytes);
    ends_close(&ends);
}

/* ---- each in its own process ---------------------------------------------- */

static void scenario_run(const char *name, void (*scenario)(void), const char *settings)
{
    char command[96], text[512], *rest = text;
    pid_t child;
    int status;

    if (getenv("CHECK_ONLY") && !strstr(name, getenv("CHECK_ONLY")))
        return;
    printf("%s\n", name);
    fflush(stdout);
    snprintf(tree, sizeof tree, "/tmp/efa-kv-tree-%d-%s", (int)getpid(), "XXXXXX");
    CHECK(mkdtemp(tree));
    snprintf(text, sizeof text, settings, tree);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        for (char *setting; (setting = strsep(&rest, " "));)
            CHECK(putenv(setting) == 0);
        scenario();
        fflush(stdout);
        _exit(0);
    }
    while (waitpid(child, &status, 0) < 0)
        CHECK(errno == EINTR);
    snprintf(command, sizeof command, "rm -r '%s'", tree);
    CHECK(system(command) == 0);
    CHECK_INT(status, 0);
}

#define SCENARIO(name, settings) scenario_run(#name, scenario_##name, settings)

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    SCENARIO(shows_places, "EFA_KV_SIM_INSTANCE=p5en.48xlarge EFA_KV_SIM_SYSFS=%s");
    SCENARIO(stays_behind_the_switch, "EFA_KV_SIM_INSTANCE=p5en.48xlarge EFA_KV_SIM_SYSFS=%s");
    SCENARIO(loses_a_near_nic, "EFA_KV_SIM_INSTANCE=p5en.48xlarge EFA_KV_SIM_SYSFS=%s "
                               "EFA_KV_SIM_FAULTS=nic=0,die_at_op=10");
    SCENARIO(loses_both_near_nics, "EFA_KV_SIM_INSTANCE=p5en.48xlarge EFA_KV_SIM_SYSFS=%s "
                                   "EFA_KV_SIM_FAULTS=nic=0,die_at_op=10;nic=1,die_at_op=10");
    SCENARIO(uses_spares, "EFA_KV_SIM_INSTANCE=p6-b200.48xlarge EFA_KV_SIM_SYSFS=%s "
                          "EFA_KV_SIM_FAULTS=nic=0,die_at_op=20");
    SCENARIO(spills_from_host_memory, "EFA_KV_SIM_INSTANCE=p5en.48xlarge EFA_KV_SIM_SYSFS=%s");
    SCENARIO(balances, "EFA_KV_SIM_NICS=16");
    SCENARIO(balances, "EFA_KV_SIM_INSTANCE=p5.48xlarge EFA_KV_SIM_RATE_GBPS=20");
    SCENARIO(fills_a_device, "EFA_KV_SIM_NICS=4 EFA_KV_SIM_MAX_REGISTERED_BYTES=12582912");
    SCENARIO(keeps_known_limits, "EFA_KV_SIM_NICS=4");
    SCENARIO(registers_in_parallel, "EFA_KV_SIM_NICS=8");
    return 0;
}
