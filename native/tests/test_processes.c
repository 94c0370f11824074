/* test_processes.c - two processes: every byte checked, a target that never calls in,
 * targets that are killed or stopped, wrong keys, silent peers beside healthy ones. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pair.h"

#define BYTES (16u << 20)
#define SOURCE_INCARNATION 0x5151

static const char *protocol;
static uint8_t *source;
static struct card source_card;

struct target {
    pid_t process;
    int socket;
    struct card card;
    uint8_t *view; /* the target's memory, shared with us for checking */
};

static double now_s(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void target_main(int socket, uint8_t *memory, uint64_t incarnation)
{
    ekv_options options = pair_options(protocol, incarnation);
    ekv_engine *engine;
    struct card card;
    ekv_region_id region;
    char order;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    engine = pair_open(&options);
    region = pair_register(engine, memory, BYTES);
    pair_card(engine, incarnation, region, memory, BYTES, &card);
    CHECK(write(socket, &card, sizeof card) == sizeof card);
    /* From here on this process sleeps in read and never calls the library. */
    while (read(socket, &order, 1) == 1) {
        ekv_error error = {.struct_size = sizeof error};
        ekv_notice notice = {.struct_size = sizeof notice};
        uint64_t generation = 0;
        struct card again;

        if (order == 'n') {
            /* A notice that was sent may still be on its way. */
            for (int i = 0; i < 2000 && generation == 0; i++) {
                while (ekv_notices(engine, &notice, 1) == 1)
                    generation = notice.generation;
                usleep(1000);
            }
            CHECK(write(socket, &generation, sizeof generation) == sizeof generation);
        } else if (order == 'r') {
            CHECK_OK(ekv_region_rotate(engine, region, 1, &error));
            pair_card(engine, incarnation, region, memory, BYTES, &again);
            CHECK(write(socket, &again, sizeof again) == sizeof again);
        } else if (order == 'c') {
            /* EFA's lighter fabric serves only peers that it knows itself. */
            CHECK(recv(socket, &again, sizeof again, MSG_WAITALL) == sizeof again);
            pair_connect(engine, &again, 0);
            CHECK(write(socket, "c", 1) == 1);
        } else {
            break;
        }
    }
    ekv_engine_close(engine, 0.5);
    _exit(0);
}

static void target_start(struct target *target, uint64_t incarnation)
{
    int sockets[2];

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    target->view = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(target->view != MAP_FAILED);
    fflush(stdout);
    target->process = fork();
    CHECK(target->process >= 0);
    if (target->process == 0) {
        close(sockets[0]);
        target_main(sockets[1], target->view, incarnation);
    }
    close(sockets[1]);
    target->socket = sockets[0];
    CHECK(read(target->socket, &target->card, sizeof target->card) == sizeof target->card);
}

static void target_end(struct target *target)
{
    kill(target->process, SIGCONT);
    close(target->socket);
    kill(target->process, SIGKILL);
    CHECK(waitpid(target->process, NULL, 0) == target->process);
    munmap(target->view, BYTES);
}

static ekv_engine *source_open(uint32_t max_in_flight)
{
    ekv_options options = pair_options(protocol, SOURCE_INCARNATION);
    ekv_engine *engine;

    options.max_in_flight = max_in_flight;
    engine = pair_open(&options);
    for (size_t i = 0; i < BYTES; i++)
        source[i] = (uint8_t)(i * 7 + (i >> 13));
    pair_card(engine, SOURCE_INCARNATION, pair_register(engine, source, BYTES), source, BYTES,
              &source_card);
    return engine;
}

/* Makes the two known to each other. */
static ekv_peer_id introduce(ekv_engine *engine, const struct target *target)
{
    char answer;

    CHECK(write(target->socket, "c", 1) == 1);
    CHECK(write(target->socket, &source_card, sizeof source_card) == sizeof source_card);
    CHECK(read(target->socket, &answer, 1) == 1);
    return pair_connect(engine, &target->card, 0);
}

/* A job of many pieces of the whole buffer. */
static ekv_job_id submit_pieces(ekv_engine *engine, ekv_peer_id peer, const struct target *target,
                                uint64_t piece_bytes, double deadline_s, uint32_t operation,
                                uint32_t flags)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options = pair_job(peer, operation, deadline_s);
    size_t count = BYTES / piece_bytes;
    uint64_t *local = malloc(count * 8), *remote = malloc(count * 8), *length = malloc(count * 8);
    ekv_job_id job;

    options.flags = flags;
    options.notice.generation = 99;
    for (size_t i = 0; i < count; i++) {
        size_t at = (i * 97) % count; /* scattered, so that nothing merges */

        local[i] = (uint64_t)(uintptr_t)source + at * piece_bytes;
        remote[i] = target->card.address + at * piece_bytes;
        length[i] = piece_bytes;
    }
    CHECK_OK(ekv_submit(engine, &options, local, remote, length, count, &job, &error));
    free(local);
    free(remote);
    free(length);
    return job;
}

static void test_sleeping_target(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;
    ekv_result result;
    uint64_t generation;

    target_start(&target, 0x7001);
    engine = source_open(0);
    peer = introduce(engine, &target);
    for (uint64_t size = 4096; size <= 1 << 20; size *= 16) {
        memset(target.view, 0, BYTES);
        result = pair_finish(
            engine, submit_pieces(engine, peer, &target, size, 20, EKV_WRITE, EKV_JOB_NOTICE), 20);
        CHECK_INT(result.status, EKV_OK);
        CHECK_INT(result.bytes, BYTES);
        CHECK_INT(result.notice_status, EKV_OK);
        CHECK(memcmp(source, target.view, BYTES) == 0); /* landed means landed */
        CHECK(write(target.socket, "n", 1) == 1);
        CHECK(read(target.socket, &generation, 8) == 8);
        CHECK_INT(generation, 99);
        memset(source, 0, BYTES);
        result =
            pair_finish(engine, submit_pieces(engine, peer, &target, size, 20, EKV_READ, 0), 20);
        CHECK_INT(result.status, EKV_OK);
        CHECK(memcmp(source, target.view, BYTES) == 0);
    }
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    target_end(&target);
}

/* Some say "unreachable" at once, some only give up at the deadline; nothing hangs. */
static void test_killed_target(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;
    ekv_result result;
    ekv_job_id job;
    double began;

    target_start(&target, 0x7002);
    engine = source_open(0);
    peer = introduce(engine, &target);
    result = pair_finish(engine, submit_pieces(engine, peer, &target, 65536, 20, EKV_WRITE, 0), 20);
    CHECK_INT(result.status, EKV_OK);
    for (int round = 0; round < 3; round++) {
        began = now_s();
        job = submit_pieces(engine, peer, &target, 4096, 5, EKV_WRITE, EKV_JOB_NOTICE);
        if (round == 0)
            kill(target.process, SIGKILL);
        result.struct_size = sizeof result;
        CHECK_INT(ekv_job_wait(engine, job, 30, 0, &result), EKV_OK);
        CHECK_INT(ekv_job_wait(engine, job, 30, 1, &result), EKV_OK);
        printf("  killed, round %d: %s after %.2f s, fenced %u, \"%s\"\n", round,
               ekv_code_name(result.status), now_s() - began, result.fenced, result.text);
        if (round > 0)
            CHECK(result.status == EKV_EPEER || result.status == EKV_EDEADLINE ||
                  result.status == EKV_EPROVIDER);
        CHECK_INT(ekv_job_release(engine, job), EKV_OK);
    }
    began = now_s();
    ekv_engine_close(engine, 0.5);
    CHECK(now_s() - began < 2);
    target_end(&target);
}

static void test_stopped_target(void)
{
    struct target target, healthy;
    ekv_engine *engine;
    ekv_peer_id peer, healthy_peer;
    ekv_result result = {.struct_size = sizeof result};
    ekv_job_id job;
    double began;

    target_start(&target, 0x7003);
    target_start(&healthy, 0x7004);
    engine = source_open(0);
    peer = introduce(engine, &target);
    healthy_peer = introduce(engine, &healthy);
    result = pair_finish(engine, submit_pieces(engine, peer, &target, 65536, 20, EKV_WRITE, 0), 20);
    CHECK_INT(result.status, EKV_OK);
    kill(target.process, SIGSTOP);
    job = submit_pieces(engine, peer, &target, 4096, 1.5, EKV_WRITE, 0);
    /* The silent peer must not hold up the healthy one - except over shm, where libfabric
     * takes responses strictly in the order of the requests. */
    for (int round = 0; round < (strcmp(protocol, "shm") ? 3 : 0); round++) {
        began = now_s();
        result = pair_finish(
            engine,
            submit_pieces(engine, healthy_peer, &healthy, 65536, 20, EKV_WRITE, EKV_JOB_NOTICE),
            20);
        CHECK_INT(result.status, EKV_OK);
        CHECK(memcmp(source, healthy.view, BYTES) == 0);
        printf("  beside a stopped peer: %.3f s\n", now_s() - began);
    }
    result.struct_size = sizeof result;
    CHECK_INT(ekv_job_wait(engine, job, 30, 0, &result), EKV_OK);
    printf("  stopped: %s, fenced %u, bytes %llu\n", ekv_code_name(result.status), result.fenced,
           (unsigned long long)result.bytes);
    if (result.status == EKV_EDEADLINE) { /* shm may write without the target's help */
        /* The rail gets a new endpoint, and with it our memory comes back. */
        CHECK_INT(ekv_job_wait(engine, job, 30, 1, &result), EKV_OK);
        CHECK_INT(result.fenced, 1);
        CHECK_INT(result.status, EKV_EDEADLINE);
        CHECK_INT(result.stray, 1);
    }
    CHECK_INT(ekv_job_release(engine, job), EKV_OK);
    result = pair_finish(
        engine, submit_pieces(engine, healthy_peer, &healthy, 65536, 20, EKV_WRITE, 0), 20);
    CHECK_INT(result.status, EKV_OK);
    CHECK(memcmp(source, healthy.view, BYTES) == 0);
    job = submit_pieces(engine, peer, &target, 4096, 30, EKV_WRITE, 0);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    began = now_s();
    printf("  closed with %d jobs unsettled\n", ekv_engine_close(engine, 0.5));
    CHECK(now_s() - began < 2);
    target_end(&target);
    target_end(&healthy);
}

/* A key that the target has replaced must not let a byte in. */
static void test_rotated_key(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct target target;
    struct card fresh;
    ekv_engine *engine;
    ekv_peer_id peer;
    ekv_job_id job;
    ekv_result result = {.struct_size = sizeof result};

    target_start(&target, 0x7005);
    engine = source_open(0);
    peer = introduce(engine, &target);
    result = pair_finish(engine, submit_pieces(engine, peer, &target, 65536, 20, EKV_WRITE, 0), 20);
    CHECK_INT(result.status, EKV_OK);
    CHECK(write(target.socket, "r", 1) == 1);
    CHECK(read(target.socket, &fresh, sizeof fresh) == sizeof fresh);
    CHECK(fresh.keys[0].key != target.card.keys[0].key);
    memset(target.view, 0, BYTES);
    /* Over shm the target drops such a write without a word. */
    job = submit_pieces(engine, peer, &target, 65536, 1, EKV_WRITE, 0);
    CHECK_INT(ekv_job_wait(engine, job, 30, 0, &result), EKV_OK);
    printf("  old key: %s \"%s\", fenced %u\n", ekv_code_name(result.status), result.text,
           result.fenced);
    CHECK(result.status != EKV_OK);
    CHECK_INT(ekv_job_wait(engine, job, 30, 1, &result), EKV_OK);
    CHECK_INT(result.fenced, 1);
    CHECK_INT(ekv_job_release(engine, job), EKV_OK);
    for (size_t i = 0; i < BYTES; i++)
        CHECK(target.view[i] == 0);
    CHECK_OK(ekv_peer_region_add(engine, peer, fresh.region, fresh.address, fresh.length,
                                 fresh.keys, fresh.key_count, &error));
    result = pair_finish(engine, submit_pieces(engine, peer, &target, 65536, 20, EKV_WRITE, 0), 20);
    printf("  new key: %s \"%s\"\n", ekv_code_name(result.status), result.text);
    CHECK_INT(result.status, EKV_OK);
    CHECK(memcmp(source, target.view, BYTES) == 0);
    ekv_engine_close(engine, 1);
    target_end(&target);
}

int main(int count, char **arguments)
{
    const char *protocols[] = {"tcp", "shm"};

    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    source = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(source != MAP_FAILED);
    for (int i = 0; i < (count > 1 ? 1 : 2); i++) {
        protocol = count > 1 ? arguments[1] : protocols[i];
        printf("protocol %s\n", protocol);
        RUN(test_sleeping_target);
        RUN(test_rotated_key);
        RUN(test_stopped_target);
        RUN(test_killed_target);
    }
    return 0;
}
