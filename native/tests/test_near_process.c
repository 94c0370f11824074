/* test_near_process.c - the short way between two processes: every byte, and what takes
 * the provider or fails: refusals of the kernel, wrong identities, bounds, peers that die
 * or turn into another program. */
#define _GNU_SOURCE
#include "near_pair.h"

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

int main(void)
{
    near_begin();
    RUN(test_every_byte);
    RUN(test_forbidden);
    RUN(test_forbidden_midway);
    RUN(test_identity);
    RUN(test_bounds);
    RUN(test_region_removed);
    RUN(test_killed_target);
    RUN(test_exec_in_target);
    return 0;
}
