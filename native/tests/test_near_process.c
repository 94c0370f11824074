/* test_near_process.c - the short way between two processes: bytes, refusals, peers that
 * die or turn into another program, and above all that memory which was taken back is
 * not written by a neighbour that was stopped in the middle of a copy. */
#define _GNU_SOURCE
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

static ekv_options near_options(uint64_t incarnation, uint32_t near)
{
    ekv_options options = pair_options("tcp", incarnation);

    options.near = near;
    return options;
}

static ekv_rail_counters counters_of(ekv_engine *engine)
{
    ekv_rail_counters counters = {.struct_size = sizeof counters};
    size_t count;

    CHECK_INT(ekv_counters(engine, &counters, 1, &count), EKV_OK);
    return counters;
}

static ekv_peer_options neighbour_options(const struct card *card)
{
    return (ekv_peer_options){.struct_size = sizeof(ekv_peer_options),
                              .incarnation = card->incarnation,
                              .same_host = 1,
                              .gate = card->gate.gate,
                              .process = card->gate.process,
                              .start_ticks = card->gate.start_ticks};
}

static ekv_peer_id connect_with(ekv_engine *engine, const struct card *card,
                                const ekv_peer_options *options)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_peer_id peer;

    CHECK_OK(ekv_peer_add(engine, options, card->nics, card->nic_count, &peer, &error));
    CHECK_OK(ekv_peer_region_add(engine, peer, card->region, card->address, card->length,
                                 card->keys, card->key_count, &error));
    return peer;
}

static ekv_peer_id connect_near(ekv_engine *engine, const struct card *card)
{
    ekv_peer_options options = neighbour_options(card);

    return connect_with(engine, card, &options);
}

static void fill(void)
{
    for (size_t i = 0; i < BYTES; i++)
        source[i] = (uint8_t)(i * 7 + (i >> 13) + 1);
}

static ekv_engine *source_open(void)
{
    ekv_options options = near_options(SOURCE_INCARNATION, EKV_NEAR_ALLOWED);
    ekv_engine *engine = pair_open(&options);

    fill();
    pair_register(engine, source, BYTES);
    return engine;
}

static int submit(ekv_engine *engine, ekv_peer_id peer, uint64_t address, uint64_t piece_bytes,
                  uint32_t operation, ekv_job_id *job)
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

static ekv_result move(ekv_engine *engine, ekv_peer_id peer, uint64_t address, uint64_t piece_bytes,
                       uint32_t operation)
{
    ekv_job_id job;

    CHECK_INT(submit(engine, peer, address, piece_bytes, operation, &job), EKV_OK);
    return pair_finish(engine, job, 60);
}

static void check_filled(const uint8_t *memory, uint8_t byte)
{
    for (size_t i = 0; i < BYTES; i++)
        CHECK(memory[i] == byte);
}

/* ---- a target in a child: it obeys orders of one letter ------------------- */

static void target_main(int socket, uint8_t *memory, uint32_t access)
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

static void target_start_with(struct target *target, uint32_t access)
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

static void target_start(struct target *target)
{
    target_start_with(target, EKV_ACCESS_REMOTE_WRITE | EKV_ACCESS_REMOTE_READ);
}

static void order(const struct target *target, char letter)
{
    char answer;

    CHECK(write(target->socket, &letter, 1) == 1);
    if (letter == 'x')
        CHECK(read(target->socket, &answer, 1) == 0); /* closed by the exec */
    else
        CHECK(read(target->socket, &answer, 1) == 1 && answer == letter);
}

static void target_end(struct target *target)
{
    close(target->socket);
    kill(target->process, SIGKILL);
    CHECK(waitpid(target->process, NULL, 0) == target->process || errno == ECHILD);
    munmap(target->view, BYTES);
}

static void test_every_byte(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;
    ekv_result result;
    uint64_t moved = 0;

    target_start(&target);
    engine = source_open();
    peer = connect_near(engine, &target.card);
    for (uint64_t size = 512; size <= BYTES; size *= 8) {
        memset(target.view, 0, BYTES);
        fill();
        result = move(engine, peer, target.card.address, size, EKV_WRITE);
        CHECK_INT(result.status, EKV_OK);
        CHECK_INT(result.bytes, BYTES);
        CHECK_INT(result.notice_status, EKV_OK);
        CHECK_INT(result.fenced, 1);
        CHECK(memcmp(source, target.view, BYTES) == 0); /* landed means landed */
        order(&target, 'n');
        memset(source, 0, BYTES);
        result = move(engine, peer, target.card.address, size, EKV_READ);
        CHECK_INT(result.status, EKV_OK);
        CHECK(memcmp(source, target.view, BYTES) == 0);
        moved += 2 * (uint64_t)BYTES;
    }
    CHECK_INT(counters_of(engine).bytes_near, moved);
    CHECK_INT(counters_of(engine).bytes_written + counters_of(engine).bytes_read, 0);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    target_end(&target);
}

/* Two progress threads on one region must not release each other's lock. */
static void test_keys_change_under_load(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;
    int refused = 0;

    target_start(&target);
    engine = source_open();
    peer = connect_near(engine, &target.card);
    for (int round = 0; round < 20; round++) {
        struct card fresh;
        ekv_result result;
        ekv_job_id job;
        char answer;

        CHECK_INT(submit(engine, peer, target.card.address, 4096, EKV_WRITE, &job), EKV_OK);
        CHECK(write(target.socket, "r", 1) == 1);
        CHECK(recv(target.socket, &fresh, sizeof fresh, MSG_WAITALL) == sizeof fresh);
        CHECK(read(target.socket, &answer, 1) == 1);
        /* From the owner's word on its memory is its own. */
        memset(target.view, 0xee, BYTES);
        result = pair_finish(engine, job, 60);
        CHECK(result.status == EKV_OK || result.status == EKV_EACCESS);
        refused += result.status == EKV_EACCESS;
        check_filled(target.view, 0xee);
        CHECK_OK(ekv_peer_region_add(engine, peer, fresh.region, fresh.address, fresh.length,
                                     fresh.keys, fresh.key_count, &error));
        CHECK_INT(move(engine, peer, target.card.address, 65536, EKV_WRITE).status, EKV_OK);
        CHECK(memcmp(source, target.view, BYTES) == 0);
    }
    printf("  %d of 20 jobs came too late\n", refused);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    target_end(&target);
}

/* What the kernel forbids takes the provider, and is counted. */
static void test_forbidden(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;

    target_start(&target);
    order(&target, 'd');
    engine = source_open();
    peer = connect_near(engine, &target.card);
    CHECK_INT(counters_of(engine).near_refused_permission, 1);
    CHECK_INT(move(engine, peer, target.card.address, 65536, EKV_WRITE).status, EKV_OK);
    CHECK(memcmp(source, target.view, BYTES) == 0);
    CHECK_INT(counters_of(engine).bytes_near, 0);
    CHECK_INT(counters_of(engine).bytes_written, BYTES);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    target_end(&target);
}

static void forbid_once(void);
static const struct target *forbidding;

static void forbid_once(void)
{
    near_process_before_copy = NULL;
    order(forbidding, 'd');
}

/* The same in the middle of a job: it goes on from where it was, nothing is missing. */
static void test_forbidden_midway(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;

    target_start(&target);
    engine = source_open();
    peer = connect_near(engine, &target.card);
    CHECK_INT(move(engine, peer, target.card.address, 65536, EKV_WRITE).status, EKV_OK);
    CHECK_INT(counters_of(engine).bytes_near, BYTES);
    memset(target.view, 0, BYTES);
    forbidding = &target;
    near_process_before_copy = forbid_once;
    CHECK_INT(move(engine, peer, target.card.address, 4096, EKV_WRITE).status, EKV_OK);
    CHECK(memcmp(source, target.view, BYTES) == 0);
    CHECK_INT(counters_of(engine).near_refused_permission, 1);
    CHECK_INT(counters_of(engine).bytes_near + counters_of(engine).bytes_written, 2 * BYTES);
    CHECK(counters_of(engine).bytes_written > 0);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    target_end(&target);
}

/* Another process behind the number, another container, no gate: all take the provider. */
static void test_identity(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_options wrong[5];

    target_start(&target);
    engine = source_open();
    for (int i = 0; i < 5; i++)
        wrong[i] = neighbour_options(&target.card);
    wrong[0].start_ticks++;
    wrong[1].gate = 0;
    wrong[2].incarnation++;
    wrong[3].process = 0;
    wrong[4].gate = -1;
    for (int i = 0; i < 5; i++) {
        ekv_peer_id peer = connect_with(engine, &target.card, &wrong[i]);

        memset(target.view, 0, BYTES);
        CHECK_INT(move(engine, peer, target.card.address, 1 << 20, EKV_WRITE).status, EKV_OK);
        CHECK(memcmp(source, target.view, BYTES) == 0);
    }
    CHECK_INT(counters_of(engine).near_refused_identity, 3);
    CHECK_INT(counters_of(engine).near_refused_namespace, 1);
    CHECK_INT(counters_of(engine).near_refused_system, 1);
    CHECK_INT(counters_of(engine).bytes_near, 0);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    target_end(&target);
}

/* The owner's own bounds and access count, whatever its peers believe. */
static void test_bounds(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;
    uint64_t length = 4096;
    uint64_t beyond;
    uint64_t from = (uint64_t)(uintptr_t)source;
    ekv_job_options options;
    ekv_job_id job;
    ekv_result result;

    target_start_with(&target, EKV_ACCESS_REMOTE_WRITE);
    engine = source_open();
    target.card.length += 4096; /* a lie */
    peer = connect_near(engine, &target.card);
    beyond = target.card.address + BYTES;
    options = pair_job(peer, EKV_WRITE, 30);
    CHECK_OK(ekv_submit(engine, &options, &from, &beyond, &length, 1, &job, &error));
    result = pair_finish(engine, job, 60);
    CHECK_INT(result.status, EKV_EREMOTEREGION);
    CHECK_INT(move(engine, peer, target.card.address, 65536, EKV_READ).status, EKV_EACCESS);
    CHECK_INT(move(engine, peer, target.card.address, 65536, EKV_WRITE).status, EKV_OK);
    CHECK_INT(counters_of(engine).bytes_near, BYTES);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    target_end(&target);
}

static void test_region_removed(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;

    target_start(&target);
    engine = source_open();
    peer = connect_near(engine, &target.card);
    order(&target, 'g');
    CHECK_INT(move(engine, peer, target.card.address, 4096, EKV_WRITE).status, EKV_EREMOTEREGION);
    check_filled(target.view, 0);
    order(&target, 'c');
    CHECK_INT(move(engine, peer, target.card.address, 4096, EKV_WRITE).status, EKV_EPEER);
    check_filled(target.view, 0);
    ekv_engine_close(engine, 1);
    target_end(&target);
}

static void test_killed_target(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;

    target_start(&target);
    engine = source_open();
    peer = connect_near(engine, &target.card);
    kill(target.process, SIGKILL);
    CHECK(waitpid(target.process, NULL, 0) == target.process);
    CHECK_INT(move(engine, peer, target.card.address, 4096, EKV_WRITE).status, EKV_EPEER);
    CHECK_INT(counters_of(engine).bytes_near, 0);
    ekv_engine_close(engine, 1);
    target_end(&target);
}

/* The same process id, the same start time, another program. */
static void test_exec_in_target(void)
{
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;
    ekv_result result;

    target_start(&target);
    engine = source_open();
    peer = connect_near(engine, &target.card);
    order(&target, 'x');
    result = move(engine, peer, target.card.address, 4096, EKV_WRITE);
    CHECK_INT(result.status, EKV_EPEER);
    CHECK_INT(result.bytes, 0);
    ekv_engine_close(engine, 1);
    target_end(&target);
}

/* ---- a writer in a child, stopped with the lock held ---------------------- */

struct writer {
    pid_t process;
    int socket;
    uint8_t *memory; /* of this process, the target */
    ekv_engine *engine;
    ekv_region_id region;
};

static void stop_once(void)
{
    static bool stopped;

    if (!stopped) {
        stopped = true;
        raise(SIGSTOP);
    } else {
        usleep(20000); /* time for the owner to come in between */
    }
}

static void writer_main(int socket, const struct card *card)
{
    ekv_engine *engine = source_open();
    ekv_peer_id peer = connect_near(engine, card);
    ekv_result result;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    near_process_before_copy = stop_once;
    result = move(engine, peer, card->address, 4096, EKV_WRITE);
    CHECK(write(socket, &result, sizeof result) == sizeof result);
    _exit(0);
}

/* Ends with the writer stopped between its look at the key and its first copy. */
static void writer_start(struct writer *writer)
{
    ekv_options options = near_options(TARGET_INCARNATION, EKV_NEAR_CONSENT);
    struct card card;
    int sockets[2];
    int go[2];
    int status;

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    CHECK(pipe(go) == 0);
    writer->memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(writer->memory != MAP_FAILED);
    fflush(stdout);
    writer->process = fork(); /* before there are threads */
    CHECK(writer->process >= 0);
    if (writer->process == 0) {
        CHECK(read(go[0], &card, sizeof card) == sizeof card);
        writer_main(sockets[1], &card);
    }
    close(sockets[1]);
    writer->socket = sockets[0];
    writer->engine = pair_open(&options);
    writer->region = pair_register(writer->engine, writer->memory, BYTES);
    pair_card(writer->engine, TARGET_INCARNATION, writer->region, writer->memory, BYTES, &card);
    CHECK(write(go[1], &card, sizeof card) == sizeof card);
    close(go[0]);
    close(go[1]);
    CHECK(waitpid(writer->process, &status, WUNTRACED) == writer->process);
    CHECK(WIFSTOPPED(status));
}

static void writer_end(struct writer *writer)
{
    close(writer->socket);
    kill(writer->process, SIGKILL);
    CHECK(waitpid(writer->process, NULL, 0) == writer->process || errno == ECHILD);
    munmap(writer->memory, BYTES);
}

static ekv_result writer_go_on(const struct writer *writer)
{
    ekv_result result;

    kill(writer->process, SIGCONT);
    CHECK(recv(writer->socket, &result, sizeof result, MSG_WAITALL) == sizeof result);
    return result;
}

/* While it is stopped the memory cannot be had back; afterwards it can, and what the
 * writer has left to do is refused. */
static void test_stopped_writer(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct writer writer;
    ekv_result result;

    writer_start(&writer);
    CHECK_INT(ekv_region_rotate(writer.engine, writer.region, 0.3, &error), EKV_EBUSY);
    printf("  %s\n", error.text);
    check_filled(writer.memory, 0);
    kill(writer.process, SIGCONT);
    CHECK_OK(ekv_region_rotate(writer.engine, writer.region, 20, &error));
    memset(writer.memory, 0xee, BYTES); /* it is ours again */
    result = writer_go_on(&writer);
    CHECK_INT(result.status, EKV_EACCESS);
    CHECK(result.bytes > 0 && result.bytes < BYTES);
    check_filled(writer.memory, 0xee);
    CHECK_INT(ekv_engine_close(writer.engine, 5), 0);
    writer_end(&writer);
}

static void test_stopped_writer_and_removal(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct writer writer;

    writer_start(&writer);
    CHECK_INT(ekv_region_remove(writer.engine, writer.region, 0.3, &error), EKV_EBUSY);
    kill(writer.process, SIGCONT);
    CHECK_OK(ekv_region_remove(writer.engine, writer.region, 20, &error));
    memset(writer.memory, 0xee, BYTES);
    CHECK_INT(writer_go_on(&writer).status, EKV_EREMOTEREGION);
    check_filled(writer.memory, 0xee);
    CHECK_INT(ekv_engine_close(writer.engine, 5), 0);
    writer_end(&writer);
}

/* The kernel releases what a dead writer held. */
static void test_killed_writer(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct writer writer;

    writer_start(&writer);
    CHECK_INT(ekv_region_rotate(writer.engine, writer.region, 0.1, &error), EKV_EBUSY);
    kill(writer.process, SIGKILL);
    CHECK_OK(ekv_region_rotate(writer.engine, writer.region, 20, &error));
    check_filled(writer.memory, 0);
    CHECK_INT(ekv_engine_close(writer.engine, 5), 0);
    writer_end(&writer);
}

/* A close does not wait for ever; it says so, and the page that every copy begins with
 * is gone, so that the late copy fails. */
static void test_close_beside_a_stopped_writer(void)
{
    struct writer writer;

    writer_start(&writer);
    CHECK_INT(ekv_engine_close(writer.engine, 0.3), 1);
    CHECK_INT(writer_go_on(&writer).status, EKV_EPEER);
    check_filled(writer.memory, 0);
    writer_end(&writer);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    /* The kernel forbids the superuser nothing; what a change of user takes from a
     * process is given back. */
    if (getuid() == 0) {
        CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
        CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);
    }
    source = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(source != MAP_FAILED);
    RUN(test_every_byte);
    RUN(test_keys_change_under_load);
    RUN(test_forbidden);
    RUN(test_forbidden_midway);
    RUN(test_identity);
    RUN(test_bounds);
    RUN(test_region_removed);
    RUN(test_killed_target);
    RUN(test_exec_in_target);
    RUN(test_stopped_writer);
    RUN(test_stopped_writer_and_removal);
    RUN(test_killed_writer);
    RUN(test_close_beside_a_stopped_writer);
    return 0;
}
