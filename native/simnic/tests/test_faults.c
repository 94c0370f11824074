/* Faults, queue limits, order and pace: each case has its settings in the environment. */
#include "harness.h"

#include <sched.h>
#include <string.h>

static fi_addr_t insert_self(struct rail *rail)
{
    char name[32];
    size_t size = sizeof name;
    fi_addr_t address;
    CHECK_EQUAL(fi_getname(&rail->endpoint->fid, name, &size), 0);
    CHECK_EQUAL(fi_av_insert(rail->addresses, name, 1, &address, 0, NULL), 1);
    return address;
}

/* A rail that writes from the first half of its memory to the second. */
static ssize_t write_self(struct rail *rail, fi_addr_t self, size_t size, void *context)
{
    return fi_write(rail->endpoint, rail->memory, size, rail->descriptor, self,
                    (uintptr_t)rail->memory + rail->memory_bytes / 2, fi_mr_key(rail->region),
                    context);
}

static void queue_depth(void)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    CHECK_EQUAL(rail.info->tx_attr->size, 32);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 32; i++)
            CHECK_EQUAL(write_self(&rail, self, 64, NULL), 0);
        CHECK_EQUAL(write_self(&rail, self, 64, NULL), -FI_EAGAIN);
        for (int i = 0; i < 32; i++)
            expect_completion(rail.completions);
    }
    CHECK(nothing_completes(rail.completions, 0.01));
    rail_close(&rail);
}

static void spurious_eagain(void)
{
    struct rail rail;
    int refused = 0, posted = 0;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    while (posted < 1000) {
        ssize_t result = write_self(&rail, self, 64, NULL);
        CHECK(result == 0 || result == -FI_EAGAIN);
        posted += result == 0;
        refused += result != 0;
    }
    CHECK(refused > 200 && refused < 500);
    for (int i = 0; i < posted; i++)
        expect_completion(rail.completions);
    CHECK(nothing_completes(rail.completions, 0.01));
    rail_close(&rail);
}

enum { ORDERED_WRITES = 200 };

/* How many completions came earlier than one that was posted before them. */
static int count_inversions(uint64_t *checksum)
{
    struct rail rail;
    static char contexts[ORDERED_WRITES];
    int inversions = 0;
    ptrdiff_t last = -1;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    for (int i = 0; i < ORDERED_WRITES; i++)
        CHECK_EQUAL(write_self(&rail, self, 64, &contexts[i]), 0);
    *checksum = 0;
    for (int i = 0; i < ORDERED_WRITES; i++) {
        ptrdiff_t position = (char *)expect_completion(rail.completions).op_context - contexts;
        inversions += position < last;
        last = position;
        *checksum = *checksum * 31 + (uint64_t)position;
    }
    rail_close(&rail);
    return inversions;
}

static void out_of_order(void)
{
    uint64_t checksum;
    CHECK(count_inversions(&checksum) > ORDERED_WRITES / 8);
    /* The order of a seed is always the same one. */
    CHECK_EQUAL(checksum, (uint64_t)-2636272571430403662ll);
}

static void in_order(void)
{
    uint64_t checksum;
    CHECK_EQUAL(count_inversions(&checksum), 0);
}

static void injected_error(void)
{
    struct rail rail, other;
    char contexts[10];
    rail_open(&rail, (struct rail_options){.nic = 0});
    rail_open(&other, (struct rail_options){.nic = 1});
    fi_addr_t self = insert_self(&rail), other_self = insert_self(&other);
    int errors = 0;
    for (int i = 0; i < 10; i++) {
        CHECK_EQUAL(write_self(&rail, self, 64, &contexts[i]), 0);
        CHECK_EQUAL(write_self(&other, other_self, 64, NULL), 0);
    }
    for (int i = 0; i < 10; i++) {
        struct fi_cq_data_entry entry;
        struct fi_cq_err_entry error;
        CHECK(next_completion(rail.completions, &entry, &error, PAIR_TIMEOUT_S));
        if (!error.err)
            continue;
        errors++;
        CHECK_EQUAL(error.prov_errno, 8);
        CHECK_EQUAL(error.err, FI_ECONNABORTED);
        CHECK(error.op_context == &contexts[4]);
        CHECK_EQUAL(error.flags, FI_RMA | FI_WRITE);
    }
    CHECK_EQUAL(errors, 1);
    for (int i = 0; i < 10; i++)
        expect_completion(other.completions);
    rail_close(&rail);
    rail_close(&other);
}

static void nic_dies(void)
{
    struct rail rail;
    char contexts[100];
    int in_flight_lost = 0;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    for (int i = 0; i < 100; i++)
        CHECK_EQUAL(write_self(&rail, self, 64, &contexts[i]), 0);
    for (int i = 0; i < 100; i++) {
        struct fi_cq_data_entry entry;
        struct fi_cq_err_entry error;
        CHECK(next_completion(rail.completions, &entry, &error, PAIR_TIMEOUT_S));
        char *context = error.err ? error.op_context : entry.op_context;
        if (context - contexts >= 49)
            CHECK_EQUAL(error.prov_errno, 2);
        else if (error.err)
            CHECK_EQUAL(error.prov_errno, 1);
        in_flight_lost += error.err && error.prov_errno == 1;
    }
    CHECK(in_flight_lost > 0);
    CHECK_EQUAL(write_self(&rail, self, 64, NULL), 0);
    expect_error(rail.completions, 2);
    usleep(250000);
    CHECK_EQUAL(write_self(&rail, self, 64, NULL), 0);
    expect_completion(rail.completions);
    rail_close(&rail);
}

static void nic_stalls(void)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    for (int i = 0; i < 100; i++)
        CHECK_EQUAL(write_self(&rail, self, 64, NULL), 0);
    double start = now_s();
    for (int i = 0; i < 100; i++)
        expect_completion(rail.completions);
    CHECK(now_s() - start > 0.15);
    rail_close(&rail);
}

static void nic_dies_after_time(void)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    usleep(60000);
    CHECK_EQUAL(write_self(&rail, self, 64, NULL), 0);
    expect_error(rail.completions, 2);
    rail_close(&rail);
}

static void write_to_dead_nic(int socket, pid_t target)
{
    struct rail dead, good;
    struct remote dead_remote, good_remote;
    (void)target;
    rail_open(&dead, (struct rail_options){.nic = 0});
    rail_open(&good, (struct rail_options){.nic = 1});
    exchange(&dead, socket, &dead_remote);
    exchange(&good, socket, &good_remote);
    usleep(5000);
    CHECK_EQUAL(fi_write(dead.endpoint, dead.memory, 64, dead.descriptor, dead_remote.address,
                         dead_remote.memory, dead_remote.key, NULL),
                0);
    CHECK_EQUAL(expect_error(dead.completions, 15).err, FI_EHOSTUNREACH);
    CHECK_EQUAL(fi_write(good.endpoint, good.memory, 64, good.descriptor, good_remote.address,
                         good_remote.memory, good_remote.key, NULL),
                0);
    expect_completion(good.completions);
    send_word(socket, 0);
    rail_close(&dead);
    rail_close(&good);
}

static void have_dead_nic(int socket, pid_t self)
{
    struct rail dead, good;
    struct remote remote;
    (void)self;
    CHECK_EQUAL(setenv("EFA_KV_SIM_FAULTS", "nic=0,die_after_ms=0", 1), 0);
    rail_open(&dead, (struct rail_options){.nic = 0});
    rail_open(&good, (struct rail_options){.nic = 1});
    exchange(&dead, socket, &remote);
    exchange(&good, socket, &remote);
    receive_word(socket);
    rail_close(&dead);
    rail_close(&good);
}

static void target_nic_dies(void)
{
    run_pair(write_to_dead_nic, have_dead_nic);
}

static void peers_vanish(void)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    for (int i = 1; i < 10; i++) {
        CHECK_EQUAL(write_self(&rail, self, 64, NULL), 0);
        expect_completion(rail.completions);
    }
    for (int i = 0; i < 10; i++) {
        CHECK_EQUAL(write_self(&rail, self, 64, NULL), 0);
        expect_error(rail.completions, 13);
    }
    rail_close(&rail);
}

/* Seconds for a number of writes, all posted at once. */
static double time_on_rail(struct rail *rail, fi_addr_t self, int count, size_t size)
{
    double start = now_s();
    for (int i = 0; i < count; i++)
        CHECK_EQUAL(write_self(rail, self, size, NULL), 0);
    for (int i = 0; i < count; i++)
        expect_completion(rail->completions);
    return now_s() - start;
}

static double time_writes(int nic, int count, size_t size)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = nic, .memory_bytes = 2 << 20});
    double elapsed = time_on_rail(&rail, insert_self(&rail), count, size);
    rail_close(&rail);
    return elapsed;
}

/* Environment: 1 Gbit/s. A simulated NIC may be later than its rate, never earlier. */
static void line_rate(void)
{
    CHECK(time_writes(0, 16, 1 << 20) > 16 * 8.0 * (1 << 20) / 1e9 * 0.99);
}

/* Environment: 10 Gbit/s, NIC 1 at a tenth */
static void slow_nic(void)
{
    CHECK(time_writes(1, 16, 1 << 20) > 16 * 8.0 * (1 << 20) / 1e9 * 0.99);
}

/* Environment: 10000 operations per second */
static void operation_rate(void)
{
    CHECK(time_writes(0, 1000, 8) > 0.099);
}

static void share(int socket, bool is_judge)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0, .memory_bytes = 2 << 20});
    fi_addr_t self = insert_self(&rail);
    double start = now_s();
    send_word(socket, 0);
    receive_word(socket);
    time_on_rail(&rail, self, 8, 1 << 20);
    send_word(socket, 0);
    receive_word(socket);
    if (is_judge)
        CHECK(now_s() - start > 16 * 8.0 * (1 << 20) / 1e9 * 0.98);
    rail_close(&rail);
}

static void share_first(int socket, pid_t target)
{
    (void)target;
    share(socket, true);
}

static void share_second(int socket, pid_t self)
{
    (void)self;
    share(socket, false);
}

/* Environment: 1 Gbit/s on a host that both processes belong to */
static void shared_host_rate(void)
{
    run_pair(share_first, share_second);
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {
        {"queue_depth", queue_depth},
        {"spurious_eagain", spurious_eagain},
        {"out_of_order", out_of_order},
        {"in_order", in_order},
        {"injected_error", injected_error},
        {"nic_dies", nic_dies},
        {"nic_stalls", nic_stalls},
        {"nic_dies_after_time", nic_dies_after_time},
        {"target_nic_dies", target_nic_dies},
        {"peers_vanish", peers_vanish},
        {"line_rate", line_rate},
        {"slow_nic", slow_nic},
        {"operation_rate", operation_rate},
        {"shared_host_rate", shared_host_rate},
    };
    return run_case(cases, sizeof cases / sizeof cases[0], count, arguments);
}
