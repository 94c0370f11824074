/* near_pair.h - two processes of one host that may copy between each other's memory, for
 * tests. */
#ifndef EKV_TEST_NEAR_PAIR_H
#define EKV_TEST_NEAR_PAIR_H

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "near_process.h"
#include "pair.h"

#define BYTES (8u << 20)
#define SOURCE_INCARNATION 0x5252
#define TARGET_INCARNATION 0x7272
#define NOBODY 65534

static uint8_t *source; /* private to each process */

struct target {
    pid_t process;
    int socket;
    struct card card;
    uint8_t *view; /* the target's memory, shared with us for checking */
};

static inline ekv_options near_options(uint64_t incarnation, uint32_t near)
{
    ekv_options options = pair_options("tcp", incarnation);

    options.near = near;
    return options;
}

static inline ekv_rail_counters counters_of(ekv_engine *engine)
{
    ekv_rail_counters counters = {.struct_size = sizeof counters};
    size_t count;

    CHECK_INT(ekv_counters(engine, &counters, 1, &count), EKV_OK);
    return counters;
}

static inline ekv_peer_options neighbour_options(const struct card *card)
{
    return (ekv_peer_options){.struct_size = sizeof(ekv_peer_options),
                              .incarnation = card->incarnation,
                              .same_host = 1,
                              .gate = card->gate.gate,
                              .process = card->gate.process,
                              .start_ticks = card->gate.start_ticks};
}

static inline ekv_peer_id connect_with(ekv_engine *engine, const struct card *card,
                                       const ekv_peer_options *options)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_peer_id peer;

    CHECK_OK(ekv_peer_add(engine, options, card->nics, card->nic_count, &peer, &error));
    CHECK_OK(ekv_peer_region_add(engine, peer, card->region, card->address, card->length,
                                 card->keys, card->key_count, &error));
    return peer;
}

static inline ekv_peer_id connect_near(ekv_engine *engine, const struct card *card)
{
    ekv_peer_options options = neighbour_options(card);

    return connect_with(engine, card, &options);
}

static inline void fill(void)
{
    for (size_t i = 0; i < BYTES; i++)
        source[i] = (uint8_t)(i * 7 + (i >> 13) + 1);
}

/* With as many progress threads as asked for and this host's interfaces allow. */
static inline ekv_engine *source_open_with(uint32_t threads)
{
    ekv_options options = near_options(SOURCE_INCARNATION, EKV_NEAR_ALLOWED);
    ekv_engine *engine;

    options.devices = threads > 1 ? "*" : NULL;
    options.progress_threads = threads;
    engine = pair_open(&options);
    fill();
    pair_register(engine, source, BYTES);
    return engine;
}

static inline ekv_engine *source_open(void)
{
    return source_open_with(1);
}

static inline int submit(ekv_engine *engine, ekv_peer_id peer, uint64_t address,
                         uint64_t piece_bytes, uint32_t operation, ekv_job_id *job)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options = pair_job(peer, operation, 30);
    size_t count = BYTES / piece_bytes;
    uint64_t *local = malloc(count * 8), *remote = malloc(count * 8), *length = malloc(count * 8);
    int code;

    CHECK(local && remote && length);
    options.flags = operation == EKV_WRITE ? EKV_JOB_NOTICE : 0;
    options.notice.generation = 99;
    for (size_t i = 0; i < count; i++) {
        size_t at = (i * 97) % count; /* scattered, so that nothing merges */

        local[i] = (uint64_t)(uintptr_t)source + at * piece_bytes;
        remote[i] = address + at * piece_bytes;
        length[i] = piece_bytes;
    }
    code = ekv_submit(engine, &options, local, remote, length, count, job, &error);
    free(local);
    free(remote);
    free(length);
    return code;
}

static inline ekv_result move(ekv_engine *engine, ekv_peer_id peer, uint64_t address,
                              uint64_t piece_bytes, uint32_t operation)
{
    ekv_job_id job;

    CHECK_INT(submit(engine, peer, address, piece_bytes, operation, &job), EKV_OK);
    return pair_finish(engine, job, 60);
}

static inline void check_filled(const uint8_t *memory, uint8_t byte)
{
    CHECK(memory[0] == byte);
    CHECK(memcmp(memory, memory + 1, BYTES - 1) == 0);
}

/* ---- a target in a child: it obeys orders of one letter ------------------- */

static inline void target_main(int socket, uint8_t *memory, uint32_t access)
{
    ekv_options options = near_options(TARGET_INCARNATION, EKV_NEAR_CONSENT);
    ekv_memory description = {.struct_size = sizeof description,
                              .address = (uint64_t)(uintptr_t)memory,
                              .length_bytes = BYTES,
                              .device = -1,
                              .access = access};
    ekv_error error = {.struct_size = sizeof error};
    ekv_notice notice = {.struct_size = sizeof notice};
    ekv_engine *engine;
    ekv_region_id region;
    struct card card;
    char order;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    engine = pair_open(&options);
    CHECK_OK(ekv_region_add(engine, &description, &region, &error));
    pair_card(engine, TARGET_INCARNATION, region, memory, BYTES, &card);
    CHECK(write(socket, &card, sizeof card) == sizeof card);
    while (read(socket, &order, 1) == 1) {
        switch (order) {
        case 'n': /* a notice that was sent may still be on its way */
            while (ekv_notices(engine, &notice, 1) == 0)
                usleep(1000);
            CHECK_INT(notice.generation, 99);
            break;
        case 'r':
            CHECK_OK(ekv_region_rotate(engine, region, 20, &error));
            pair_card(engine, TARGET_INCARNATION, region, memory, BYTES, &card);
            CHECK(write(socket, &card, sizeof card) == sizeof card);
            break;
        case 'g':
            CHECK_OK(ekv_region_remove(engine, region, 20, &error));
            break;
        case 'c':
            CHECK_INT(ekv_engine_close(engine, 5), 0);
            break;
        case 'd':
            CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
            break;
        case 'x':
            execl("/bin/sleep", "sleep", "60", (char *)NULL);
            CHECK(!"exec");
            break;
        default:
            CHECK(!"an order");
        }
        CHECK(write(socket, &order, 1) == 1);
    }
    _exit(0);
}

static inline void target_start_with(struct target *target, uint32_t access)
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
        target_main(sockets[1], target->view, access);
    }
    close(sockets[1]);
    target->socket = sockets[0];
    CHECK(read(target->socket, &target->card, sizeof target->card) == sizeof target->card);
    CHECK(target->card.gate.gate >= 0);
}

static inline void target_start(struct target *target)
{
    target_start_with(target, EKV_ACCESS_REMOTE_WRITE | EKV_ACCESS_REMOTE_READ);
}

static inline void order(const struct target *target, char letter)
{
    char answer;

    CHECK(write(target->socket, &letter, 1) == 1);
    if (letter == 'x')
        CHECK(read(target->socket, &answer, 1) == 0); /* closed by the exec */
    else
        CHECK(read(target->socket, &answer, 1) == 1 && answer == letter);
}

static inline void target_end(struct target *target)
{
    close(target->socket);
    kill(target->process, SIGKILL);
    CHECK(waitpid(target->process, NULL, 0) == target->process || errno == ECHILD);
    munmap(target->view, BYTES);
}

/* The kernel forbids the superuser nothing; what a change of user takes from a process is
 * given back. */
static inline void near_begin(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    if (getuid() == 0) {
        CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
        CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);
    }
    source = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(source != MAP_FAILED);
}

#endif
