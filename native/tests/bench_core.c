/* bench_core.c - bytes per second between two processes and the cost of submitting;
 * prints a table, asserts nothing about time.  Not a test: run it by hand. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "pair.h"

#define BYTES (64u << 20)

static double clock_s(clockid_t clock)
{
    struct timespec at;

    clock_gettime(clock, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void target_main(int socket, const char *protocol)
{
    ekv_options options = pair_options(protocol, 0x7777);
    uint8_t *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    ekv_engine *engine;
    struct card card;
    char order;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    engine = pair_open(&options);
    pair_card(engine, 0x7777, pair_register(engine, memory, BYTES), memory, BYTES, &card);
    CHECK(write(socket, &card, sizeof card) == sizeof card);
    CHECK(read(socket, &order, 1) >= 0);
    ekv_engine_close(engine, 0.2);
    _exit(0);
}

static void measure(ekv_engine *engine, ekv_peer_id peer, const struct card *card, uint8_t *source,
                    uint64_t size, uint32_t operation, size_t batch)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options = pair_job(peer, operation, 60);
    uint64_t *local = malloc(batch * 8), *remote = malloc(batch * 8), *length = malloc(batch * 8);
    size_t slots = BYTES / size, next = 0;
    double began = clock_s(CLOCK_MONOTONIC), cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID), submit = 0;
    uint64_t moved = 0, descriptors = 0;
    double wall;

    while (clock_s(CLOCK_MONOTONIC) - began < 1.5) {
        ekv_job_id jobs[4];

        for (int j = 0; j < 4; j++) {
            double before;

            for (size_t i = 0; i < batch; i++, next++) {
                size_t slot = (next * 97) % slots;

                local[i] = (uint64_t)(uintptr_t)source + slot * size;
                remote[i] = card->address + slot * size;
                length[i] = size;
            }
            before = clock_s(CLOCK_MONOTONIC);
            CHECK_OK(ekv_submit(engine, &options, local, remote, length, batch, &jobs[j], &error));
            submit += clock_s(CLOCK_MONOTONIC) - before;
        }
        for (int j = 0; j < 4; j++) {
            ekv_result result = pair_finish(engine, jobs[j], 60);

            CHECK_INT(result.status, EKV_OK);
            moved += result.bytes;
            descriptors += batch;
        }
    }
    wall = clock_s(CLOCK_MONOTONIC) - began;
    cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    printf("  %-5s %8llu B  %6.2f GB/s  %8.0f descriptors/s  %5.2f us CPU each, %5.0f ns to "
           "submit\n",
           operation == EKV_WRITE ? "write" : "read", (unsigned long long)size,
           (double)moved / wall / 1e9, (double)descriptors / wall, cpu / (double)descriptors * 1e6,
           submit / (double)descriptors * 1e9);
    free(local);
    free(remote);
    free(length);
}

/* 128k tokens, 80 layers, K and V: planned and queued, then cancelled. */
static void measure_paged(ekv_engine *engine, ekv_peer_id peer, const struct card *card,
                          uint8_t *source, int scattered)
{
    enum { BLOCKS = 8192, ROWS = 160, BLOCK_BYTES = 4096 };
    static uint32_t local[BLOCKS], remote[BLOCKS];
    static ekv_row rows[ROWS];
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options = pair_job(peer, EKV_WRITE, 60);
    ekv_job_id job;
    double began;

    for (uint32_t i = 0; i < BLOCKS; i++) {
        local[i] = scattered ? (i * 4099) % BLOCKS : i;
        remote[i] = scattered ? (i * 2053 + 7) % BLOCKS : i;
    }
    for (int r = 0; r < ROWS; r++)
        rows[r] = (ekv_row){(uint64_t)(uintptr_t)source, card->address, BLOCK_BYTES, BLOCK_BYTES,
                            BLOCK_BYTES};
    began = clock_s(CLOCK_MONOTONIC);
    CHECK_OK(ekv_submit_paged(engine, &options, rows, ROWS, local, remote, BLOCKS, &job, &error));
    printf("  paged 8192 blocks x 160 rows, %s: %.3f ms to submit\n",
           scattered ? "scattered" : "one run", (clock_s(CLOCK_MONOTONIC) - began) * 1e3);
    CHECK_INT(ekv_job_cancel(engine, job), EKV_OK);
    pair_finish(engine, job, 30);
}

int main(int count, char **arguments)
{
    const char *protocol = count > 1 ? arguments[1] : "tcp";
    size_t batch = count > 2 ? strtoul(arguments[2], NULL, 0) : 128;
    uint8_t *source = mmap(NULL, BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    ekv_options options = pair_options(protocol, 0x8888);
    struct card card;
    ekv_engine *engine;
    ekv_peer_id peer;
    int sockets[2];
    pid_t child;

    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    child = fork();
    if (child == 0) {
        close(sockets[0]);
        target_main(sockets[1], protocol);
    }
    close(sockets[1]);
    CHECK(read(sockets[0], &card, sizeof card) == sizeof card);
    engine = pair_open(&options);
    pair_register(engine, source, BYTES);
    peer = pair_connect(engine, &card, 0);
    printf("%s, batch %zu\n", protocol, batch);
    for (uint32_t operation = EKV_WRITE; operation <= EKV_READ; operation++)
        for (uint64_t size = 4096; size <= 1 << 20; size *= 16)
            measure(engine, peer, &card, source, size, operation, batch);
    measure_paged(engine, peer, &card, source, 0);
    measure_paged(engine, peer, &card, source, 1);
    close(sockets[0]);
    ekv_engine_close(engine, 1);
    waitpid(child, NULL, 0);
    return 0;
}
