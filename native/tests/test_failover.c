/* test_failover.c - the engine on simulated EFA NICs that fail: what is still moved, what
 * is refused, and what is told.  Source and target are processes of their own, and so are
 * the scenarios, because the simulation reads its settings once per process.
 *
 * CHECK_ONLY=name runs some of them, CHECK_SEED=n repeats a run. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pair.h"

#define NICS 4u
#define STRIPE (UINT64_C(1) << 16)
#define BYTES (UINT64_C(16) << 20)
#define DEADLINE_S 60
#define PIECES 10000u

static uint8_t *source, *target; /* both seen by both processes */

struct ends {
    ekv_engine *engine;
    ekv_region_id region;
    ekv_peer_id peer;
    struct card card;
    pid_t target;
    int socket;
};

/* ---- the target's process -------------------------------------------------- */

static void target_unregister(ekv_engine *engine, ekv_region_id region)
{
    ekv_error error = {.struct_size = sizeof error};

    CHECK_OK(ekv_region_remove(engine, region, 20, &error));
    memset(target, 0xAB, BYTES); /* it has another owner now */
}

static void target_main(int socket)
{
    ekv_options options = pair_options("efa", 0x22);
    struct card own, other;
    ekv_engine *engine;
    ekv_region_id region;
    char host[32], request;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(host, sizeof host, "target-%d", (int)getpid());
    CHECK_INT(setenv("EFA_KV_SIM_HOST", host, 1), 0);
    engine = pair_open(&options);
    region = pair_register(engine, target, BYTES);
    CHECK(recv(socket, &other, sizeof other, MSG_WAITALL) == sizeof other);
    pair_connect(engine, &other, 0);
    pair_card(engine, 0x22, region, target, BYTES, &own);
    CHECK(write(socket, &own, sizeof own) == sizeof own);
    while (recv(socket, &request, 1, MSG_WAITALL) == 1) {
        target_unregister(engine, region);
        CHECK(write(socket, &request, 1) == 1);
    }
    ekv_engine_close(engine, 1);
    _exit(0);
}

/* ---- the source's ---------------------------------------------------------- */

static void fill(void)
{
    for (uint64_t i = 0; i < BYTES; i++)
        source[i] = (uint8_t)(i * 11 + (i >> 12));
    memset(target, 0, BYTES);
}

static void ends_open_with(struct ends *ends, ekv_options options)
{
    struct card own;
    int sockets[2];
    char host[32];

    fill();
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    fflush(stdout);
    ends->target = fork();
    CHECK(ends->target >= 0);
    if (ends->target == 0) {
        close(sockets[0]);
        target_main(sockets[1]);
    }
    close(sockets[1]);
    ends->socket = sockets[0];
    /* The faults name this host, and the target has none. */
    snprintf(host, sizeof host, "source-%d", (int)getppid());
    CHECK_INT(setenv("EFA_KV_SIM_HOST", host, 1), 0);
    ends->engine = pair_open(&options);
    ends->region = pair_register(ends->engine, source, BYTES);
    pair_card(ends->engine, 0x11, ends->region, source, BYTES, &own);
    CHECK(write(ends->socket, &own, sizeof own) == sizeof own);
    CHECK(recv(ends->socket, &ends->card, sizeof ends->card, MSG_WAITALL) == sizeof ends->card);
    ends->peer = pair_connect(ends->engine, &ends->card, 0);
}

static void ends_open(struct ends *ends, uint32_t threads)
{
    ekv_options options = pair_options("efa", 0x11);

    options.progress_threads = threads;
    options.stripe_bytes = STRIPE;
    ends_open_with(ends, options);
}

static void ends_close(struct ends *ends)
{
    CHECK_INT(ekv_engine_close(ends->engine, 5), 0);
    kill(ends->target, SIGKILL);
    CHECK(waitpid(ends->target, NULL, 0) == ends->target);
    close(ends->socket);
}

static ekv_job_id submit(struct ends *ends, double deadline_s, uint32_t flags)
{
    ekv_job_options options = pair_job(ends->peer, EKV_WRITE, deadline_s);
    uint64_t local = (uint64_t)(uintptr_t)source, remote = ends->card.address, length = BYTES;
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_id job;

    options.flags = flags;
    CHECK_OK(ekv_submit(ends->engine, &options, &local, &remote, &length, 1, &job, &error));
    return job;
}

static ekv_result finish(struct ends *ends, ekv_job_id job)
{
    ekv_result result = pair_finish(ends->engine, job, 2 * DEADLINE_S);

    printf("  %s, notice %s, fenced %u: %s\n", ekv_code_name(result.status),
           ekv_code_name(result.notice_status), result.fenced, result.text);
    return result;
}

static void expect_move(struct ends *ends)
{
    ekv_result result;

    memset(target, 0, BYTES);
    result = finish(ends, submit(ends, DEADLINE_S, EKV_JOB_NOTICE));
    CHECK_INT(result.status, EKV_OK);
    CHECK_INT(result.notice_status, EKV_OK);
    CHECK_INT(result.bytes, BYTES);
    CHECK(memcmp(source, target, BYTES) == 0);
}

static ekv_rail_counters counters_of(struct ends *ends, uint32_t rail)
{
    ekv_rail_counters counters[NICS] = {{.struct_size = sizeof counters[0]}};
    size_t count;

    CHECK_INT(ekv_counters(ends->engine, counters, NICS, &count), EKV_OK);
    CHECK(rail < count);
    return counters[rail];
}

static bool is_down(struct ends *ends, uint32_t rail)
{
    ekv_nic nics[NICS] = {{.struct_size = sizeof nics[0]}};
    size_t count;

    CHECK_INT(ekv_engine_rails(ends->engine, nics, NICS, &count), EKV_OK);
    CHECK(rail < count);
    return nics[rail].flags & EKV_NIC_DOWN;
}

/* Whether a line of the log holds both; reads the log up to there. */
static bool log_says(struct ends *ends, const char *first, const char *second)
{
    ekv_log_record record = {.struct_size = sizeof record};

    while (ekv_log_read(ends->engine, &record, 1) == 1)
        if (strstr(record.text, first) && strstr(record.text, second)) {
            printf("  log: %s\n", record.text);
            return true;
        }
    return false;
}

/* Rail 1, and no other, went out, and everybody was told. */
static void expect_out(struct ends *ends)
{
    CHECK(is_down(ends, 1));
    CHECK_INT(counters_of(ends, 1).failures, 1);
    for (uint32_t rail = 0; rail < NICS; rail++)
        CHECK(rail == 1 || (!is_down(ends, rail) && counters_of(ends, rail).failures == 0));
    CHECK(log_says(ends, "rail 1 (", "is out, because"));
}

/* ---- what is refused ------------------------------------------------------- */

static void scenario_refuses_a_wrong_key(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct ends ends;
    struct card wrong;

    ends_open(&ends, 2);
    wrong = ends.card;
    for (size_t i = 0; i < wrong.key_count; i++)
        wrong.keys[i].key ^= 0x5a5a;
    CHECK_OK(ekv_peer_region_add(ends.engine, ends.peer, wrong.region, wrong.address, wrong.length,
                                 wrong.keys, wrong.key_count, &error));
    CHECK_INT(finish(&ends, submit(&ends, DEADLINE_S, 0)).status, EKV_EACCESS);
    for (uint64_t i = 0; i < BYTES; i++)
        CHECK(target[i] == 0);
    CHECK_OK(ekv_peer_region_add(ends.engine, ends.peer, wrong.region, wrong.address, wrong.length,
                                 ends.card.keys, ends.card.key_count, &error));
    expect_move(&ends); /* the way itself is as good as before */
    for (uint32_t rail = 0; rail < NICS; rail++)
        CHECK(!is_down(&ends, rail));
    ends_close(&ends);
}

static void scenario_lets_the_target_unregister(void)
{
    struct ends ends;
    ekv_job_id job;
    ekv_result result;
    char request = 'u';

    ends_open(&ends, 2);
    job = submit(&ends, DEADLINE_S, 0);
    while (__atomic_load_n(&target[1], __ATOMIC_RELAXED) != source[1])
        usleep(100);
    CHECK(write(ends.socket, &request, 1) == 1);
    CHECK(recv(ends.socket, &request, 1, MSG_WAITALL) == 1);
    result = finish(&ends, job);
    CHECK_INT(result.status, EKV_EACCESS);
    CHECK_INT(result.fenced, 1);
    for (uint64_t i = 0; i < BYTES; i++)
        CHECK(target[i] == 0xAB);
    ends_close(&ends);
}

/* ---- what is moved all the same -------------------------------------------- */

static void scenario_moves_many_pieces_through_a_short_queue(void)
{
    static uint64_t local[PIECES], remote[PIECES], lengths[PIECES];
    ekv_options options = pair_options("efa", 0x11);
    ekv_error error = {.struct_size = sizeof error};
    uint64_t at = 0;
    struct ends ends;
    ekv_job_options wanted;
    ekv_result result;
    ekv_job_id job;

    options.max_in_flight = 8;
    options.progress_threads = 2;
    ends_open_with(&ends, options);
    srandom((unsigned)strtoul(getenv("EFA_KV_SIM_SEED"), NULL, 10));
    for (uint32_t i = 0; i < PIECES; i++) {
        lengths[i] = (uint64_t)random() % (random() % 8 ? 512 : 8192) + 1;
        local[i] = (uint64_t)(uintptr_t)source + at;
        remote[i] = ends.card.address + at;
        at += lengths[i] + 1; /* a gap, so that pieces do not become one */
    }
    CHECK(at <= BYTES);
    wanted = pair_job(ends.peer, EKV_WRITE, DEADLINE_S);
    CHECK_OK(ekv_submit(ends.engine, &wanted, local, remote, lengths, PIECES, &job, &error));
    result = finish(&ends, job);
    CHECK_INT(result.status, EKV_OK);
    for (uint32_t i = 0; i < PIECES; i++) {
        uint64_t offset = local[i] - (uint64_t)(uintptr_t)source;

        CHECK(memcmp(source + offset, target + offset, lengths[i]) == 0);
        CHECK(target[offset + lengths[i]] == 0);
    }
    for (uint32_t rail = 0; rail < NICS; rail++) {
        CHECK(counters_of(&ends, rail).in_flight_peak <= 8);
        CHECK(counters_of(&ends, rail).again > 0); /* the faults did strike */
    }
    ends_close(&ends);
}

/* Bytes land in a process that is stopped; its notice waits, until the deadline. */
static void scenario_writes_to_a_target_that_never_calls_in(void)
{
    struct ends ends;
    ekv_result result;
    ekv_job_id job;

    ends_open(&ends, 2);
    CHECK_INT(kill(ends.target, SIGSTOP), 0);
    result = finish(&ends, submit(&ends, DEADLINE_S, 0));
    CHECK_INT(result.status, EKV_OK);
    CHECK(memcmp(source, target, BYTES) == 0);
    job = submit(&ends, 2, EKV_JOB_NOTICE);
    CHECK_INT(ekv_job_wait(ends.engine, job, DEADLINE_S, 0, &result), EKV_OK);
    CHECK_INT(result.status, EKV_OK);
    CHECK_INT(result.notice_status, EKV_EDEADLINE);
    CHECK_INT(kill(ends.target, SIGCONT), 0);
    CHECK_INT(finish(&ends, job).fenced, 1);
    ends_close(&ends);
}

static void lose_a_nic(uint32_t threads)
{
    struct ends ends;

    ends_open(&ends, threads);
    for (int i = 0; i < 3; i++)
        expect_move(&ends);
    expect_out(&ends);
    ends_close(&ends);
}

static void scenario_goes_on_without_a_dead_nic(void)
{
    lose_a_nic(1);
}

static void scenario_goes_on_over_another_group(void)
{
    lose_a_nic(NICS);
}

static void scenario_goes_on_without_a_silent_nic(void)
{
    lose_a_nic(1);
}

static void scenario_finds_silence_across_groups(void)
{
    lose_a_nic(NICS);
}

/* Only one rail is left, in a group that is not the one which ends the job. */
static void scenario_goes_on_over_the_last_nic(void)
{
    struct ends ends;

    ends_open(&ends, NICS);
    for (int i = 0; i < 4; i++)
        expect_move(&ends);
    for (uint32_t rail = 0; rail < NICS; rail++)
        CHECK_INT(is_down(&ends, rail), rail != 3);
    ends_close(&ends);
}

static void probe_back(uint32_t threads)
{
    time_t until = time(NULL) + DEADLINE_S;
    uint64_t written;
    struct ends ends;

    ends_open(&ends, threads);
    while (counters_of(&ends, 1).failures == 0 && time(NULL) < until)
        expect_move(&ends);
    CHECK(log_says(&ends, "rail 1 (", "is out, because"));
    while (is_down(&ends, 1) && time(NULL) < until) {
        expect_move(&ends);
        usleep(50000);
    }
    CHECK(!is_down(&ends, 1));
    CHECK(log_says(&ends, "rail 1 (", "is back after"));
    written = counters_of(&ends, 1).bytes_written;
    while (counters_of(&ends, 1).bytes_written == written && time(NULL) < until)
        expect_move(&ends);
    CHECK(counters_of(&ends, 1).bytes_written > written);
    CHECK_INT(counters_of(&ends, 1).failures, 1);
    ends_close(&ends);
}

static void scenario_uses_a_nic_again(void)
{
    probe_back(1);
}

static void scenario_uses_a_group_again(void)
{
    probe_back(NICS);
}

/* ---- what fails, in time and with a reason --------------------------------- */

static void scenario_says_that_all_nics_are_dead(void)
{
    struct ends ends;
    ekv_result result;

    ends_open(&ends, 2);
    result = finish(&ends, submit(&ends, 5, 0));
    CHECK(result.status == EKV_ERAIL || result.status == EKV_EPEER ||
          result.status == EKV_EDEADLINE);
    CHECK_INT(result.fenced, 1);
    CHECK(result.text[0] && result.bytes < BYTES);
    for (uint32_t rail = 0; rail < NICS; rail++)
        CHECK(is_down(&ends, rail));
    ends_close(&ends);
}

/* Nothing ends at all: the deadline ends the job, the reset ends what was in flight. */
static void scenario_fences_what_silent_nics_hold(void)
{
    ekv_result result = {.struct_size = sizeof result};
    struct ends ends;
    ekv_job_id job;

    ends_open(&ends, 2);
    job = submit(&ends, 1, 0);
    CHECK_INT(ekv_job_wait(ends.engine, job, DEADLINE_S, 0, &result), EKV_OK);
    CHECK_INT(result.status, EKV_EDEADLINE);
    CHECK_INT(result.fenced, 0);
    result = finish(&ends, job);
    CHECK_INT(result.status, EKV_EDEADLINE);
    CHECK_INT(result.fenced, 1);
    ends_close(&ends);
}

static void scenario_notices_a_killed_peer(void)
{
    struct ends ends;
    ekv_result result;
    ekv_job_id job;

    ends_open(&ends, 2);
    job = submit(&ends, DEADLINE_S, 0);
    while (__atomic_load_n(&target[1], __ATOMIC_RELAXED) != source[1])
        usleep(100);
    CHECK_INT(kill(ends.target, SIGKILL), 0);
    result = finish(&ends, job);
    CHECK_INT(result.status, EKV_EPEER);
    CHECK_INT(result.fenced, 1);
    for (uint32_t rail = 0; rail < NICS; rail++)
        CHECK(!is_down(&ends, rail)); /* our own NICs are well */
    ends_close(&ends);
}

/* ---- each in its own process ----------------------------------------------- */

static void scenario_run(const char *name, void (*scenario)(void), const char *faults,
                         const char *settings, const char *seed)
{
    char text[512], *rest = text, host[32];
    pid_t child;
    int status;

    if (getenv("CHECK_ONLY") && !strstr(name, getenv("CHECK_ONLY")))
        return;
    printf("%s, seed %s\n", name, seed);
    fflush(stdout);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        snprintf(host, sizeof host, "host=source-%d", (int)getppid());
        if (faults[0]) {
            size_t at = 0;

            while (*faults && at < sizeof text - sizeof host) {
                if (*faults == '@') {
                    at += (size_t)snprintf(text + at, sizeof text - at, "%s", host);
                    faults++;
                } else {
                    text[at++] = *faults++;
                }
            }
            text[at] = '\0';
            CHECK_INT(setenv("EFA_KV_SIM_FAULTS", text, 1), 0);
        }
        CHECK_INT(setenv("EFA_KV_SIM_SEED", seed, 1), 0);
        CHECK_INT(setenv("EFA_KV_SIM_NICS", "4", 0), 0);
        snprintf(text, sizeof text, "%s", settings);
        for (char *setting; (setting = strsep(&rest, " "));)
            if (setting[0])
                CHECK(putenv(setting) == 0);
        scenario();
        fflush(stdout);
        _exit(0);
    }
    while (waitpid(child, &status, 0) < 0)
        CHECK(errno == EINTR);
    CHECK_INT(status, 0);
}

#define SCENARIO(name, faults, settings)                                                           \
    scenario_run(#name, scenario_##name, faults, settings, seed)

int main(void)
{
    char seed[16];
    const char *wanted = getenv("CHECK_SEED");

    setvbuf(stdout, NULL, _IOLBF, 0);
    snprintf(seed, sizeof seed, "%s", wanted ? wanted : "");
    if (!wanted)
        snprintf(seed, sizeof seed, "%u", (unsigned)time(NULL) % 100000 + 1);
    source = mmap(NULL, 2 * BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(source != MAP_FAILED);
    target = source + BYTES;
    SCENARIO(refuses_a_wrong_key, "", "");
    SCENARIO(lets_the_target_unregister, "", "EFA_KV_SIM_RATE_GBPS=0.05");
    SCENARIO(moves_many_pieces_through_a_short_queue, "eagain=0.1",
             "FI_EFA_TX_SIZE=8 EFA_KV_SIM_REORDER=64");
    SCENARIO(writes_to_a_target_that_never_calls_in, "", "");
    SCENARIO(goes_on_without_a_dead_nic, "nic=1,@,die_at_op=20", "");
    SCENARIO(goes_on_over_another_group, "nic=1,@,die_at_op=20", "");
    SCENARIO(goes_on_without_a_silent_nic, "nic=1,@,stall_at_op=20", "");
    SCENARIO(finds_silence_across_groups, "nic=1,@,stall_at_op=20", "");
    SCENARIO(goes_on_over_the_last_nic,
             "nic=0,@,die_at_op=10;nic=1,@,die_at_op=15;nic=2,@,die_at_op=20", "");
    SCENARIO(uses_a_nic_again, "nic=1,@,die_at_op=20,recover_after_ms=600", "");
    SCENARIO(uses_a_group_again, "nic=1,@,die_at_op=20,recover_after_ms=600", "");
    SCENARIO(says_that_all_nics_are_dead, "@,die_at_op=10", "");
    SCENARIO(fences_what_silent_nics_hold, "@,stall_at_op=10", "");
    SCENARIO(notices_a_killed_peer, "", "EFA_KV_SIM_RATE_GBPS=0.05");
    return 0;
}
