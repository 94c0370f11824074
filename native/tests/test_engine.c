/* test_engine.c - what an engine promises to its callers: bounds, refusals, deadlines,
 * cancelling, many descriptors through a short queue, fork, opening and closing again and again.
 * All bytes cross the provider unless said. */
#define _GNU_SOURCE
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "duo.h"

/* Every rail's counters added up. */
static ekv_rail_counters counters_sum(ekv_engine *engine)
{
    ekv_rail_counters rails[64] = {{.struct_size = sizeof rails[0]}}, sum = {0};
    size_t count;

    CHECK_INT(ekv_counters(engine, rails, 64, &count), EKV_OK);
    for (size_t i = 0; i < count; i++) {
        sum.operations_posted += rails[i].operations_posted;
        sum.notices_received += rails[i].notices_received;
        sum.notices_dropped += rails[i].notices_dropped;
        sum.bytes_near += rails[i].bytes_near;
    }
    return sum;
}

static void test_short_queue(void)
{
    enum { COUNT = 10000 };
    static uint64_t local[COUNT], remote[COUNT], length[COUNT];
    ekv_options left = pair_options(protocol, 0xaaaa), right = pair_options(protocol, 0xbbbb);
    ekv_error error = {.struct_size = sizeof error};
    ekv_rail_counters counters[64] = {{.struct_size = sizeof counters[0]}};
    uint64_t random = check_seed(), at = 0, total = 0, written = 0;
    ekv_job_options options;
    ekv_result result;
    struct duo duo;
    ekv_job_id job;
    size_t rails;

    left.max_in_flight = 8;
    duo_open_with(&duo, left, right, 0);
    for (size_t i = 0; i < COUNT; i++) {
        length[i] = check_random(&random) % 1600;
        local[i] = (uint64_t)(uintptr_t)source + at;
        remote[i] = (uint64_t)(uintptr_t)target + at;
        at += length[i] + check_random(&random) % 2;
        total += length[i];
        CHECK(at + 1600 < 2 * BYTES);
        if (at + 1700 > BYTES)
            at = 0;
    }
    options = pair_job(duo.peer, EKV_WRITE, 60);
    CHECK_OK(ekv_submit(duo.left, &options, local, remote, length, COUNT, &job, &error));
    result = pair_finish(duo.left, job, 60);
    CHECK_INT(result.status, EKV_OK);
    CHECK_INT(result.bytes, total);
    for (size_t i = 0; i < COUNT; i++)
        CHECK(memcmp((void *)(uintptr_t)local[i], (void *)(uintptr_t)remote[i], length[i]) == 0);
    CHECK_INT(ekv_counters(duo.left, counters, 64, &rails), EKV_OK);
    for (size_t i = 0; i < rails; i++) {
        CHECK(counters[i].in_flight_peak > 0 && counters[i].in_flight_peak <= 8);
        CHECK_INT(counters[i].operations_posted, counters[i].operations_settled);
        CHECK_INT(counters[i].stray_completions, 0);
        written += counters[i].bytes_written;
    }
    CHECK_INT(written, total);
    duo_close(&duo);
}

static void test_paged(void)
{
    enum { BLOCKS = 128, ROWS = 8, BLOCK_BYTES = 4096 };
    ekv_error error = {.struct_size = sizeof error};
    uint32_t local[BLOCKS], remote[BLOCKS];
    uint64_t random = check_seed();
    ekv_row rows[ROWS];
    ekv_job_options options;
    ekv_result result;
    struct duo duo;
    ekv_job_id job;

    duo_open(&duo);
    for (uint32_t i = 0; i < BLOCKS; i++)
        local[i] = remote[i] = i;
    for (uint32_t i = BLOCKS - 1; i > 0; i--) { /* every block once, in some order */
        uint32_t other = (uint32_t)(check_random(&random) % (i + 1)), kept = remote[i];

        remote[i] = remote[other];
        remote[other] = kept;
    }
    for (size_t r = 0; r < ROWS; r++)
        rows[r] = (ekv_row){.local_address = (uint64_t)(uintptr_t)source + r * BLOCKS * BLOCK_BYTES,
                            .remote_address =
                                (uint64_t)(uintptr_t)target + (r * 3 % ROWS) * BLOCKS * BLOCK_BYTES,
                            .local_stride_bytes = BLOCK_BYTES,
                            .remote_stride_bytes = BLOCK_BYTES,
                            .length_bytes = r % 2 ? BLOCK_BYTES : BLOCK_BYTES - 96};
    options = pair_job(duo.peer, EKV_WRITE, 20);
    CHECK_OK(ekv_submit_paged(duo.left, &options, rows, ROWS, local, remote, BLOCKS, &job, &error));
    result = pair_finish(duo.left, job, 20);
    CHECK_INT(result.status, EKV_OK);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t b = 0; b < BLOCKS; b++)
            CHECK(memcmp((void *)(uintptr_t)(rows[r].local_address + local[b] * BLOCK_BYTES),
                         (void *)(uintptr_t)(rows[r].remote_address + remote[b] * BLOCK_BYTES),
                         rows[r].length_bytes) == 0);
    /* Now one run, so one piece for each dense row. */
    for (uint32_t i = 0; i < BLOCKS; i++)
        local[i] = remote[i] = i;
    CHECK_OK(ekv_submit_paged(duo.left, &options, rows, ROWS, local, remote, BLOCKS, &job, &error));
    result = pair_finish(duo.left, job, 20);
    CHECK_INT(result.status, EKV_OK);
    CHECK_INT(result.descriptors, ROWS / 2 + ROWS / 2 * BLOCKS);
    duo_close(&duo);
}

static void test_refusals(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_memory memory = {.struct_size = sizeof memory,
                         .kind = EKV_MEMORY_CUDA,
                         .address = 4096,
                         .length_bytes = 4096};
    ekv_result result = {.struct_size = sizeof result};
    ekv_region_id region;
    struct duo duo;
    ekv_job_id job;

    duo_open(&duo);
    CHECK_INT(submit_at(&duo, BYTES - 10, 0, 11, 1, &job, &error), EKV_EREGION);
    CHECK(strstr(error.text, "nearest region"));
    CHECK_INT(submit_at(&duo, 0, BYTES, 1, 1, &job, &error), EKV_EREMOTEREGION);
    CHECK_INT(submit_at(&duo, 0, 0, 1, 0, &job, &error), EKV_EINVAL);
    CHECK_INT(submit_at(&duo, 0, 0, 1, 1.0 / 0.0, &job, &error), EKV_EINVAL);
    duo.peer++;
    CHECK_INT(submit_at(&duo, 0, 0, 1, 1, &job, &error), EKV_ESTALE);
    duo.peer--;
    CHECK_INT(ekv_region_add(duo.left, &memory, &region, &error), EKV_EREGISTER);
    CHECK_INT(ekv_job_result(duo.left, 12345, &result), EKV_ESTALE);
    CHECK_INT(ekv_job_result(duo.left, duo.peer, &result), EKV_ESTALE);
    CHECK_INT(ekv_job_cancel(duo.left, 0), EKV_ESTALE);
    CHECK_INT(ekv_region_remove(duo.left, duo.right_region ^ 1, 0, &error), EKV_ESTALE);
    CHECK_INT(ekv_peer_region_remove(duo.left, duo.peer, 999, &error), EKV_ESTALE);
    CHECK_INT(ekv_peer_region_remove(duo.left, duo.peer, duo.card.region, &error), EKV_OK);
    CHECK_INT(submit_at(&duo, 0, 0, 1, 1, &job, &error), EKV_EREMOTEREGION);
    CHECK_INT(ekv_peer_remove(duo.left, duo.peer), EKV_OK);
    CHECK_INT(ekv_peer_remove(duo.left, duo.peer), EKV_ESTALE);
    CHECK_INT(submit_at(&duo, 0, 0, 1, 1, &job, &error), EKV_ESTALE);
    duo_close(&duo);
    CHECK_INT(ekv_engine_close(NULL, 1), EKV_EINVAL);
}

/* A peer on a provider that no rail has, and one that nobody listens for. */
static void test_foreign_peer(void)
{
    ekv_peer_options options = {.struct_size = sizeof options, .incarnation = 9};
    ekv_error error = {.struct_size = sizeof error};
    struct card card;
    struct duo duo;
    ekv_peer_id peer;

    duo_open(&duo);
    card = duo.card;
    strcpy(card.nics[0].provider, "carrier-pigeon");
    CHECK_INT(ekv_peer_add(duo.left, &options, card.nics, 1, &peer, &error), EKV_EPEER);
    CHECK(strstr(error.text, "carrier-pigeon"));
    CHECK_INT(ekv_peer_add(duo.left, &options, card.nics, 0, &peer, &error), EKV_EPEER);
    duo_close(&duo);
}

static void test_cancel_and_deadline(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_result result = {.struct_size = sizeof result};
    struct duo duo;
    ekv_job_id jobs[60], late;

    duo_open(&duo);
    for (int i = 0; i < 60; i++)
        CHECK_OK(submit_at(&duo, 0, 0, BYTES, 30, &jobs[i], &error));
    CHECK_OK(submit_at(&duo, 0, 0, BYTES, 1e-6, &late, &error));
    for (int i = 0; i < 60; i++)
        CHECK_INT(ekv_job_cancel(duo.left, jobs[i]), EKV_OK);
    for (int i = 0; i < 60; i++) {
        result = pair_finish(duo.left, jobs[i], 10);
        CHECK(result.status == EKV_ECANCELED || (result.status == EKV_OK && result.bytes == BYTES));
        CHECK_INT(result.fenced, 1);
    }
    CHECK_INT(result.status, EKV_ECANCELED);
    /* A microsecond is rarely enough; what counts is that it ends, and how it is judged. */
    result = pair_finish(duo.left, late, 10);
    CHECK(result.status == EKV_EDEADLINE || (result.status == EKV_OK && result.bytes == BYTES));
    CHECK_INT(result.fenced, 1);
    /* Nothing of a fenced job moves any more. */
    memset(target, 0, BYTES);
    usleep(20000);
    for (size_t i = 0; i < BYTES; i++)
        CHECK(target[i] == 0);
    /* A job may be forgotten while it runs. */
    CHECK_OK(submit_at(&duo, 0, 0, BYTES, 30, &late, &error));
    CHECK_INT(ekv_job_release(duo.left, late), EKV_OK);
    CHECK_INT(ekv_job_result(duo.left, late, &result), EKV_ESTALE);
    CHECK_OK(submit_at(&duo, 0, 0, BYTES, 30, &jobs[0], &error));
    CHECK_INT(ekv_peer_remove(duo.left, duo.peer), EKV_OK);
    result = pair_finish(duo.left, jobs[0], 10);
    CHECK(result.status == EKV_EPEER || result.status == EKV_OK);
    duo_close(&duo);
}

static void test_full_tables(void)
{
    ekv_options left = pair_options(protocol, 0xaaaa), right = pair_options(protocol, 0xbbbb);
    ekv_error error = {.struct_size = sizeof error};
    ekv_rail_counters counters;
    ekv_notice notices[8] = {{.struct_size = sizeof notices[0]}};
    ekv_job_options options;
    ekv_result result;
    ekv_job_id jobs[8], more;
    struct duo duo;

    left.max_jobs = 8;
    right.max_notices = 4;
    duo_open_with(&duo, left, right, 0);
    options = pair_job(duo.peer, EKV_WRITE, 5);
    options.flags = EKV_JOB_NOTICE;
    for (int i = 0; i < 8; i++)
        CHECK_OK(ekv_submit(duo.left, &options, NULL, NULL, NULL, 0, &jobs[i], &error));
    CHECK_INT(ekv_submit(duo.left, &options, NULL, NULL, NULL, 0, &more, &error), EKV_EBUSY);
    for (int i = 0; i < 8; i++) {
        result = pair_finish(duo.left, jobs[i], 5); /* a bare notice */
        CHECK_INT(result.status, EKV_OK);
        CHECK_INT(result.notice_status, EKV_OK);
    }
    for (int i = 0; i < 500; i++) {
        counters = counters_sum(duo.right);
        if (counters.notices_received == 8)
            break;
        usleep(2000);
    }
    CHECK_INT(counters.notices_received, 8);
    CHECK_INT(counters.notices_dropped, 4);
    CHECK_INT(ekv_notices(duo.right, notices, 8), 4);
    CHECK_INT(ekv_notices(duo.right, notices, 8), 0);
    duo_close(&duo);
}

/* The short way within the process, and the checks it keeps. */
static void test_near(void)
{
    ekv_options left = pair_options(protocol, 0xaaaa), right = pair_options(protocol, 0xbbbb);
    ekv_error error = {.struct_size = sizeof error};
    ekv_rail_counters counters;
    ekv_notice notice = {.struct_size = sizeof notice};
    ekv_job_options options;
    ekv_result result;
    uint64_t local = (uint64_t)(uintptr_t)source, remote = (uint64_t)(uintptr_t)target;
    uint64_t length = BYTES;
    struct duo duo;
    ekv_job_id job;

    left.near = right.near = 1;
    duo_open_with(&duo, left, right, 1);
    options = pair_job(duo.peer, EKV_WRITE, 5);
    options.flags = EKV_JOB_NOTICE;
    CHECK_OK(ekv_submit(duo.left, &options, &local, &remote, &length, 1, &job, &error));
    result = pair_finish(duo.left, job, 5);
    CHECK_INT(result.status, EKV_OK);
    CHECK(memcmp(source, target, BYTES) == 0);
    CHECK_INT(ekv_notices(duo.right, &notice, 1), 1);
    CHECK_INT(notice.bytes, BYTES);
    counters = counters_sum(duo.left);
    CHECK_INT(counters.operations_posted, 0);
    CHECK_INT(counters.bytes_near, BYTES);
    /* Unregistered over there: refused, though we have not been told. */
    CHECK_OK(ekv_region_remove(duo.right, duo.right_region, 1, &error));
    CHECK_OK(ekv_submit(duo.left, &options, &local, &remote, &length, 1, &job, &error));
    CHECK_INT(pair_finish(duo.left, job, 5).status, EKV_EREMOTEREGION);
    CHECK_INT(ekv_engine_close(duo.right, 1), 0);
    CHECK_OK(ekv_submit(duo.left, &options, &local, &remote, &length, 1, &job, &error));
    CHECK_INT(pair_finish(duo.left, job, 5).status, EKV_EPEER);
    CHECK_INT(ekv_engine_close(duo.left, 1), 0);
}

static void test_self(void)
{
    ekv_options options = pair_options(protocol, 0xcccc);
    ekv_error error = {.struct_size = sizeof error};
    ekv_engine *engine = pair_open(&options);
    uint64_t local = (uint64_t)(uintptr_t)source, remote = local + BYTES / 2;
    uint64_t length = BYTES / 2;
    ekv_job_options job_options;
    ekv_notice notice = {.struct_size = sizeof notice};
    struct card card;
    ekv_job_id job;

    fill();
    pair_card(engine, 0xcccc, pair_register(engine, source, BYTES), source, BYTES, &card);
    job_options = pair_job(pair_connect(engine, &card, 0), EKV_WRITE, 10);
    job_options.flags = EKV_JOB_NOTICE;
    CHECK_OK(ekv_submit(engine, &job_options, &local, &remote, &length, 1, &job, &error));
    CHECK_INT(pair_finish(engine, job, 10).status, EKV_OK);
    CHECK(memcmp(source, source + BYTES / 2, BYTES / 2) == 0);
    for (int i = 0; i < 1000 && ekv_notices(engine, &notice, 1) == 0; i++)
        usleep(1000);
    CHECK_INT(notice.sender, 0xcccc);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
}

static void test_fork(void)
{
    ekv_options options = pair_options(protocol, 0xdddd);
    ekv_engine *engine = pair_open(&options);
    int status;
    pid_t child = fork();

    if (child == 0) {
        ekv_error error = {.struct_size = sizeof error};
        ekv_notice notice = {.struct_size = sizeof notice};
        ekv_region_id region;
        ekv_memory memory = {.struct_size = sizeof memory};

        _exit(ekv_notices(engine, &notice, 1) == EKV_EFORK &&
                      ekv_region_add(engine, &memory, &region, &error) == EKV_EFORK &&
                      ekv_engine_close(engine, 0) == EKV_EFORK
                  ? 0
                  : 1);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_INT(status, 0);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
}

static size_t entries_in(const char *path)
{
    DIR *directory = opendir(path);
    size_t count = 0;

    CHECK(directory);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

static void open_close(int finish)
{
    ekv_error error = {.struct_size = sizeof error};
    struct duo duo;
    ekv_job_id job;

    duo_open(&duo);
    CHECK_OK(submit_at(&duo, 0, 0, 100000, 5, &job, &error));
    if (finish)
        CHECK_INT(pair_finish(duo.left, job, 5).status, EKV_OK);
    CHECK(ekv_engine_close(duo.left, 1) >= 0);
    CHECK(ekv_engine_close(duo.right, 1) >= 0);
}

static void test_open_close_again(void)
{
    size_t files = 0, threads = 0;

    for (int i = 0; i < 50; i++) {
        open_close(1);
        if (i == 5) { /* libfabric keeps a few for itself */
            files = entries_in("/proc/self/fd");
            threads = entries_in("/proc/self/task");
        }
    }
    CHECK(entries_in("/proc/self/fd") <= files);
    CHECK(entries_in("/proc/self/task") <= threads + 2); /* a joined thread lingers there */
    /* Over shm libfabric 1.17 crashes when an endpoint of the same process goes away in
     * the middle of first contact. */
    if (strcmp(protocol, "shm") == 0)
        return;
    /* Now in the middle of things; libfabric 1.17 forgets a socket now and then when a
     * connection is closed while it is being made. */
    for (int i = 0; i < 20; i++)
        open_close(0);
    CHECK(entries_in("/proc/self/fd") <= files + 10);
    CHECK(entries_in("/proc/self/task") <= threads + 2);
}

static void *wait_long(void *argument)
{
    struct duo *duo = argument;
    ekv_result result = {.struct_size = sizeof result};
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_id job;

    if (submit_at(duo, 0, 0, BYTES, 60, &job, &error) < 0)
        return NULL;
    while (ekv_job_wait(duo->left, job, 60, 1, &result) == EKV_OK && result.status == EKV_OK)
        if (ekv_job_release(duo->left, job) < 0 ||
            submit_at(duo, 0, 0, BYTES, 60, &job, &error) < 0)
            break;
    return NULL;
}

static void test_close_under_load(void)
{
    pthread_t threads[4];
    struct duo duo;

    duo_open(&duo);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, wait_long, &duo) == 0);
    usleep(100000);
    /* The callers are inside; none may hang, none may touch freed memory. */
    CHECK(ekv_engine_close(duo.left, 1) >= 0);
    duo.left = NULL; /* later calls of the threads are refused for this reason alone */
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK_INT(ekv_engine_close(duo.right, 1), 0);
}

static double cpu_s(void)
{
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

static void test_idle(void)
{
    struct duo duo;
    double before;

    duo_open(&duo);
    usleep(300000);
    before = cpu_s();
    usleep(2000000);
    printf("  two idle engines: %.2f %% of a core\n", (cpu_s() - before) / 2 * 100);
    CHECK(cpu_s() - before < 0.3); /* generous: the machine is shared */
    duo_close(&duo);
}

int main(int count, char **arguments)
{
    const char *protocols[] = {"tcp", "shm"};

    setvbuf(stdout, NULL, _IOLBF, 0);
    duo_memory();
    for (int i = 0; i < (count > 1 ? 1 : 2); i++) {
        protocol = count > 1 ? arguments[1] : protocols[i];
        printf("protocol %s\n", protocol);
        RUN(test_short_queue);
        RUN(test_paged);
        RUN(test_refusals);
        RUN(test_foreign_peer);
        RUN(test_cancel_and_deadline);
        RUN(test_full_tables);
        RUN(test_near);
        RUN(test_self);
        RUN(test_fork);
        RUN(test_open_close_again);
        RUN(test_close_under_load);
        RUN(test_idle);
    }
    return 0;
}
