/* Peers that are killed or stopped: no byte may come late, and no silence may last. */
#include "harness.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

static ssize_t write_to(struct rail *rail, const struct remote *remote, uint64_t offset,
                        size_t size, uint64_t key)
{
    return fi_write(rail->endpoint, rail->memory, size, rail->descriptor, remote->address,
                    remote->memory + offset, key, NULL);
}

enum { HAMMER_BYTES = 256 << 10, HAMMER_WINDOW = 16, ROUNDS = 60 };

/* Writes without pause; each refusal is answered with a new key from the target, 0 being the end.
 */
static void hammer(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error;
    int outstanding = 0;
    (void)target;
    rail_open(&rail, (struct rail_options){.nic = 0, .memory_bytes = HAMMER_BYTES});
    exchange(&rail, socket, &remote);
    memset(rail.memory, 0x77, HAMMER_BYTES);
    while (remote.key) {
        bool refused = false;
        for (; outstanding < HAMMER_WINDOW; outstanding++)
            CHECK_EQUAL(write_to(&rail, &remote, 0, HAMMER_BYTES, remote.key), 0);
        while (outstanding > (refused ? 0 : HAMMER_WINDOW / 2)) {
            CHECK(next_completion(rail.completions, &entry, &error, PAIR_TIMEOUT_S));
            outstanding--;
            if (error.err)
                CHECK_EQUAL(error.prov_errno, 7);
            refused = refused || error.err;
        }
        if (refused)
            remote.key = receive_word(socket);
    }
    send_word(socket, 0); /* nothing is under way any more */
    rail_close(&rail);
}

static bool is_all(const char *memory, size_t size, char value)
{
    for (size_t i = 0; i < size; i++)
        if (((const volatile char *)memory)[i] != value)
            return false;
    return true;
}

static void hammered(int socket, bool stops_the_peer)
{
    struct rail rail;
    struct remote remote;
    rail_open(&rail, (struct rail_options){.nic = 0, .memory_bytes = HAMMER_BYTES});
    exchange(&rail, socket, &remote);
    for (int round = 0; round < ROUNDS; round++) {
        while (((volatile char *)rail.memory)[HAMMER_BYTES - 1] != 0x77)
            sched_yield();
        usleep((unsigned)(round * 37 % 1000));
        if (stops_the_peer)
            CHECK_EQUAL(kill(getppid(), SIGSTOP), 0);
        double start = now_s();
        CHECK_EQUAL(fi_close(&rail.region->fid), 0);
        CHECK(now_s() - start < PAIR_TIMEOUT_S);
        memset(rail.memory, 0x11, HAMMER_BYTES);
        if (stops_the_peer)
            CHECK_EQUAL(kill(getppid(), SIGCONT), 0);
        double until = now_s() + 0.01;
        while (now_s() < until)
            CHECK(is_all(rail.memory, HAMMER_BYTES, 0x11));
        CHECK_EQUAL(fi_mr_reg(rail.domain, rail.memory, HAMMER_BYTES, ALL_ACCESS, 0, 0, 0,
                              &rail.region, NULL),
                    0);
        if (round < ROUNDS - 1)
            send_word(socket, fi_mr_key(rail.region));
    }
    send_word(socket, 0);
    receive_word(socket);
    rail_close(&rail);
}

static void hammered_running(int socket, pid_t self)
{
    (void)self;
    hammered(socket, false);
}

static void hammered_stopping(int socket, pid_t self)
{
    (void)self;
    hammered(socket, true);
}

static void late_bytes(void)
{
    run_pair(hammer, hammered_running);
}

static void late_bytes_of_a_stopped_peer(void)
{
    run_pair(hammer, hammered_stopping);
}

/* The peer is killed in the middle of its writes: removing the region must not wait for the dead.
 */
static void kill_hammer(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    rail_open(&rail, (struct rail_options){.nic = 0, .memory_bytes = HAMMER_BYTES});
    exchange(&rail, socket, &remote);
    while (((volatile char *)rail.memory)[HAMMER_BYTES - 1] != 0x77)
        sched_yield();
    CHECK_EQUAL(kill(target, SIGKILL), 0);
    expect_target_killed();
    double start = now_s();
    CHECK_EQUAL(fi_close(&rail.region->fid), 0);
    CHECK(now_s() - start < PAIR_TIMEOUT_S);
    memset(rail.memory, 0x11, HAMMER_BYTES);
    usleep(20000);
    CHECK(is_all(rail.memory, HAMMER_BYTES, 0x11));
    rail.region = NULL;
    rail_close(&rail);
}

static void late_bytes_of_a_killed_peer(void)
{
    run_pair(kill_hammer, hammer);
}

/* A target that waits to be killed. */
static void idle_target(int socket, pid_t self)
{
    struct rail rail;
    struct remote remote;
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 0});
    exchange(&rail, socket, &remote);
    for (;;)
        pause();
}

enum { POSTED_TO_THE_DEAD = 100 };

static void kill_target(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    siginfo_t info;
    rail_open(&rail, (struct rail_options){.nic = 0});
    exchange(&rail, socket, &remote);
    CHECK_EQUAL(write_to(&rail, &remote, 0, 64, remote.key), 0);
    expect_completion(rail.completions);
    /* One message that nobody will ever receive is under way already. */
    CHECK_EQUAL(fi_send(rail.endpoint, rail.memory, 64, rail.descriptor, remote.address, NULL), 0);
    CHECK(nothing_completes(rail.completions, 0.02));
    CHECK_EQUAL(kill(target, SIGKILL), 0);
    expect_target_killed();
    /* Dead, but not yet collected by its parent. */
    CHECK_EQUAL(waitid(P_PID, (id_t)target, &info, WEXITED | WNOWAIT), 0);
    CHECK_EQUAL(expect_error(rail.completions, 13).err, FI_ECONNABORTED);
    usleep(5000);
    for (int i = 0; i < POSTED_TO_THE_DEAD; i++)
        CHECK_EQUAL(write_to(&rail, &remote, 0, 64, remote.key), 0);
    for (int i = 0; i < POSTED_TO_THE_DEAD; i++)
        expect_error(rail.completions, 13);
    CHECK(nothing_completes(rail.completions, 0.02));
    rail_close(&rail);
}

static void killed_target(void)
{
    run_pair(kill_target, idle_target);
}

static void stop_target(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    rail_open(&rail, (struct rail_options){.nic = 0});
    exchange(&rail, socket, &remote);
    receive_word(socket);
    CHECK_EQUAL(kill(target, SIGSTOP), 0);
    usleep(20000);
    memset(rail.memory, 0x42, 4096);
    CHECK_EQUAL(write_to(&rail, &remote, 0, 4096, remote.key), 0);
    expect_completion(rail.completions);
    struct iovec segment = {rail.memory, 16};
    struct fi_msg message = {
        .msg_iov = &segment, .desc = &rail.descriptor, .iov_count = 1, .addr = remote.address};
    CHECK_EQUAL(fi_sendmsg(rail.endpoint, &message, FI_DELIVERY_COMPLETE | FI_COMPLETION), 0);
    CHECK(nothing_completes(rail.completions, 0.05));
    CHECK_EQUAL(kill(target, SIGCONT), 0);
    CHECK_EQUAL(expect_completion(rail.completions).flags, FI_MSG | FI_SEND);
    rail_close(&rail);
}

static void stopped_process(int socket, pid_t self)
{
    struct rail rail;
    struct remote remote;
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 0});
    exchange(&rail, socket, &remote);
    CHECK_EQUAL(
        fi_recv(rail.endpoint, rail.memory + 8192, 64, rail.descriptor, FI_ADDR_UNSPEC, NULL), 0);
    send_word(socket, 0);
    expect_completion(rail.completions);
    CHECK_EQUAL(rail.memory[4095], 0x42);
    CHECK_EQUAL(rail.memory[8192], 0x42);
    rail_close(&rail);
}

static void stopped_target(void)
{
    run_pair(stop_target, stopped_process);
}

static int files_of(pid_t pid)
{
    char prefix[64];
    int count = 0;
    snprintf(prefix, sizeof prefix, "efa-kv-sim.%d.", (int)pid);
    DIR *directory = opendir("/dev/shm");
    CHECK(directory);
    for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory))
        count += strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
    closedir(directory);
    return count;
}

static void kill_and_sweep(int socket, pid_t target)
{
    struct rail rail;
    receive_word(socket);
    CHECK_EQUAL(files_of(target), 2); /* the process and its endpoint */
    CHECK_EQUAL(kill(target, SIGKILL), 0);
    expect_target_killed();
    siginfo_t info;
    CHECK_EQUAL(waitid(P_PID, (id_t)target, &info, WEXITED | WNOWAIT), 0);
    CHECK_EQUAL(files_of(target), 2);
    rail_open(&rail, (struct rail_options){.nic = 0});
    CHECK_EQUAL(files_of(target), 0);
    CHECK_EQUAL(files_of(getpid()), 2);
    rail_close(&rail);
    CHECK_EQUAL(files_of(getpid()), 1);
}

static void open_and_wait(int socket, pid_t self)
{
    struct rail rail;
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 0});
    send_word(socket, 0);
    for (;;)
        pause();
}

static void sweeps_after_the_killed(void)
{
    run_pair(kill_and_sweep, open_and_wait);
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {
        {"late_bytes", late_bytes},
        {"late_bytes_of_a_stopped_peer", late_bytes_of_a_stopped_peer},
        {"late_bytes_of_a_killed_peer", late_bytes_of_a_killed_peer},
        {"killed_target", killed_target},
        {"killed_target_without_copy", killed_target},
        {"stopped_target", stopped_target},
        {"sweeps_after_the_killed", sweeps_after_the_killed},
    };
    return run_case(cases, sizeof cases / sizeof cases[0], count, arguments);
}
