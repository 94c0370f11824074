/* test_near_fence.c - memory that was taken back is not written by a neighbour that was
 * stopped in the middle of a copy, whatever becomes of it. */
#define _GNU_SOURCE
#include "near_pair.h"

#define JOBS 4

static _Atomic int copies_left;

/* One copy of a round takes its time, with the lock held, while another thread is in the
 * middle of its own. */
static void linger_once(void)
{
    if (atomic_fetch_sub(&copies_left, 1) == 0)
        usleep(50000);
}

/* From the moment the owner's call returns not one byte comes in, of several jobs that
 * several threads copy. */
static void keys_change_under_load(uint32_t threads)
{
    ekv_error error = {.struct_size = sizeof error};
    struct target target;
    ekv_engine *engine;
    ekv_peer_id peer;
    int refused = 0;

    target_start(&target);
    near_process_before_copy = linger_once; /* before there are threads */
    engine = source_open_with(threads);
    peer = connect_near(engine, &target.card);
    for (int round = 0; round < 10; round++) {
        ekv_job_id jobs[JOBS];
        struct card fresh;
        char answer;

        atomic_store(&copies_left, 10 + round);
        for (int i = 0; i < JOBS; i++)
            CHECK_INT(submit(engine, peer, target.card.address, 4096, EKV_WRITE, &jobs[i]), EKV_OK);
        CHECK(write(target.socket, "r", 1) == 1);
        CHECK(recv(target.socket, &fresh, sizeof fresh, MSG_WAITALL) == sizeof fresh);
        memset(target.view, 0xee, BYTES);
        CHECK(read(target.socket, &answer, 1) == 1);
        for (int i = 0; i < JOBS; i++) {
            int status = pair_finish(engine, jobs[i], 60).status;

            CHECK(status == EKV_OK || status == EKV_EACCESS);
            refused += status == EKV_EACCESS;
        }
        check_filled(target.view, 0xee);
        CHECK_OK(ekv_peer_region_add(engine, peer, fresh.region, fresh.address, fresh.length,
                                     fresh.keys, fresh.key_count, &error));
        CHECK_INT(move(engine, peer, target.card.address, 65536, EKV_WRITE).status, EKV_OK);
        CHECK(memcmp(source, target.view, BYTES) == 0);
    }
    printf("  %u threads, %d of %d jobs came too late\n", threads, refused, 10 * JOBS);
    CHECK(counters_of(engine).near_refused_permission == 0);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    near_process_before_copy = NULL;
    target_end(&target);
}

static void test_keys_change_under_load(void)
{
    keys_change_under_load(1);
}

/* Each thread has a lock of its own: one must not release the other's. */
static void test_keys_change_beside_two_threads(void)
{
    keys_change_under_load(2);
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
    near_begin();
    RUN(test_keys_change_under_load);
    RUN(test_keys_change_beside_two_threads);
    RUN(test_stopped_writer);
    RUN(test_stopped_writer_and_removal);
    RUN(test_killed_writer);
    RUN(test_close_beside_a_stopped_writer);
    return 0;
}
