/* test_tables.c - address ranges, jobs, notices, operation slots, errors, log. */
#include "check.h"
#include "clock.h"
#include "error.h"
#include "inflight.h"
#include "job.h"
#include "log.h"
#include "notice.h"
#include "range.h"

static void test_ranges_random(void)
{
    uint64_t random = check_seed();

    for (int round = 0; round < 300; round++) {
        struct range_table table = {0};
        uint64_t begin[24], end[24];
        int alive[24] = {0};

        for (int step = 0; step < 80; step++) {
            uint32_t slot = (uint32_t)(check_random(&random) % 24);
            uint64_t address = check_random(&random) % 1200;
            uint64_t length = 1 + check_random(&random) % 100, gap = 0, expected = 0;
            const struct range *found;
            uint64_t furthest = 0;
            int covered = 1;

            if (alive[slot]) {
                CHECK(range_remove(&table, slot));
                alive[slot] = 0;
            } else {
                begin[slot] = check_random(&random) % 1000;
                end[slot] = begin[slot] + 1 + check_random(&random) % 200;
                CHECK(range_insert(&table, begin[slot], end[slot], slot));
                alive[slot] = 1;
            }
            for (int i = 0; i < 24; i++)
                if (alive[i] && begin[i] <= address && address < end[i] && end[i] > furthest)
                    furthest = end[i];
            found = range_find(&table, address, length);
            CHECK((found != NULL) == (furthest != 0));
            if (found) /* one that is long enough, or the longest there is */
                CHECK(found->begin <= address &&
                      (found->end >= address + length || found->end == furthest));
            for (expected = address; covered && expected < address + length; expected++) {
                covered = 0;
                for (int i = 0; i < 24; i++)
                    covered |= alive[i] && begin[i] <= expected && expected < end[i];
            }
            CHECK(range_covers(&table, address, length, &gap) == (covered != 0));
            if (!covered)
                CHECK(gap == expected - 1);
        }
        range_table_close(&table);
    }
}

static void test_jobs(void)
{
    struct jobs jobs;
    struct job *job, *other;
    ekv_result result = {.struct_size = sizeof result};
    ekv_job_id id, old;

    CHECK(jobs_open(&jobs, 2));
    job = jobs_take(&jobs, 9);
    other = jobs_take(&jobs, 9);
    CHECK(job && other && !jobs_take(&jobs, 9));
    id = job->id;
    CHECK_INT(jobs_result(&jobs, 9, id, &result), EKV_OK);
    CHECK_INT(result.done, 0);
    CHECK_INT(jobs_result(&jobs, 8, id, &result), EKV_ESTALE); /* another engine's */
    CHECK_INT(jobs_result(&jobs, 9, 0, &result), EKV_ESTALE);
    CHECK_INT(jobs_result(&jobs, 9, ~UINT64_C(0), &result), EKV_ESTALE);
    CHECK_INT(jobs_wait(&jobs, 9, id, clock_after_ns(0.01), false, &result), EKV_EDEADLINE);
    job->flags = EKV_JOB_POLLED;
    job_fail(job, EKV_EDEADLINE, 0, "first");
    job_fail(job, EKV_EPEER, 0, "second");
    CHECK(jobs_publish(&jobs, job, false));
    CHECK_INT(jobs_wait(&jobs, 9, id, clock_after_ns(0), false, &result), EKV_OK);
    CHECK_INT(result.status, EKV_EDEADLINE);
    CHECK(strcmp(result.text, "first") == 0);
    CHECK_INT(result.fenced, 0);
    CHECK_INT(jobs_poll(&jobs, &result, 1), 1);
    CHECK_INT(jobs_poll(&jobs, &result, 1), 0);
    CHECK(jobs_publish(&jobs, job, true));
    CHECK_INT(jobs_poll(&jobs, &result, 1), 1);
    CHECK_INT(result.fenced, 1);
    CHECK_INT(jobs_release(&jobs, 9, id), EKV_OK);
    CHECK_INT(jobs_release(&jobs, 9, id), EKV_ESTALE);
    CHECK(!jobs_take(&jobs, 9)); /* still held by its progress thread */
    old = id;
    job_drop(&jobs, job);
    job = jobs_take(&jobs, 9);
    CHECK(job && job->id != old);
    CHECK_INT(jobs_result(&jobs, 9, old, &result), EKV_ESTALE);
    /* A report of a released job is gone, and the list stays whole. */
    job->flags = other->flags = EKV_JOB_POLLED;
    jobs_publish(&jobs, other, true);
    jobs_publish(&jobs, job, true);
    CHECK_INT(jobs_release(&jobs, 9, other->id), EKV_OK);
    CHECK_INT(jobs_poll(&jobs, &result, 1), 1);
    CHECK(result.job == job->id);
    CHECK(jobs_nothing_to_report(&jobs));
    jobs_close(&jobs);
}

static void test_notices(void)
{
    struct notice_table table;
    struct notice_message message;
    ekv_notice notice = {.struct_size = sizeof notice, .generation = 3}, got[4];

    notice_encode(&message, NOTICE_KIND_JOB, &notice);
    CHECK_INT(notice_decode(&message, sizeof message, &got[0]), NOTICE_KIND_JOB);
    CHECK(got[0].generation == 3);
    CHECK_INT(notice_decode(&message, sizeof message - 1, &got[0]), 0);
    message.magic ^= 1;
    CHECK_INT(notice_decode(&message, sizeof message, &got[0]), 0);
    CHECK(notice_table_open(&table, 3));
    for (uint64_t lap = 0; lap < 3; lap++) {
        for (uint64_t i = 0; i < 3; i++) {
            notice.generation = i;
            CHECK(notice_table_put(&table, &notice));
        }
        CHECK(!notice_table_put(&table, &notice));
        got[0].struct_size = sizeof got[0];
        CHECK_INT(notice_table_take(&table, got, 2), 2);
        CHECK(got[0].generation == 0 && got[1].generation == 1);
        CHECK_INT(notice_table_take(&table, got, 4), 1);
        CHECK(got[0].generation == 2 && notice_table_is_empty(&table));
    }
    notice_table_close(&table);
}

static void test_inflight(void)
{
    struct inflight inflight;
    struct operation *taken[8], *again;
    int unrelated;

    CHECK(inflight_open(&inflight, 8));
    for (int i = 0; i < 8; i++) {
        taken[i] = inflight_take(&inflight, 1);
        CHECK(taken[i]);
        taken[i]->kind = OPERATION_DATA;
    }
    CHECK(!inflight_take(&inflight, 1));
    CHECK(inflight_find(&inflight, taken[3]) == taken[3]);
    CHECK(!inflight_find(&inflight, (char *)taken[3] + 8));
    CHECK(!inflight_find(&inflight, &unrelated));
    CHECK(!inflight_find(&inflight, NULL));
    inflight_give(&inflight, taken[3], 5); /* ended in an error */
    CHECK(!inflight_find(&inflight, taken[3]));
    inflight_give(&inflight, taken[4], 0);
    again = inflight_take(&inflight, 6);
    CHECK(again == taken[4]); /* the resting one is passed over */
    again->kind = OPERATION_DATA;
    CHECK(inflight_take(&inflight, 7) == taken[3]); /* unless there is no other */
    inflight_close(&inflight);
}

/* Callers compiled with an older, shorter struct. */
static void test_struct_sizes(void)
{
    struct {
        uint32_t struct_size;
        int32_t code;
        uint32_t canary;
    } old = {.struct_size = 8, .canary = 0xfeed};
    ekv_options options, given = {.struct_size = 24, .progress_threads = 3, .max_jobs = 99};
    ekv_error error = {.struct_size = sizeof error};

    CHECK_INT(error_set((ekv_error *)(void *)&old, EKV_EBUSY, 0, "here", "text %d", 1), EKV_EBUSY);
    CHECK(old.code == EKV_EBUSY && old.canary == 0xfeed && old.struct_size == 8);
    CHECK_INT(struct_import(&options, sizeof options, &given), EKV_OK);
    CHECK(options.progress_threads == 3 && options.max_jobs == 0);
    given.struct_size = 0;
    CHECK_INT(struct_import(&options, sizeof options, &given), EKV_EINVAL);
    CHECK_INT(struct_import(&options, sizeof options, NULL), EKV_EINVAL);
    CHECK_INT(error_set(NULL, EKV_EPEER, 0, "here", "x"), EKV_EPEER);
    error_set(&error, EKV_EPEER, 7, "here", "%s", "there");
    CHECK(error.provider_code == 7 && strcmp(error.text, "there") == 0);
    CHECK(strcmp(ekv_code_name(EKV_EPEER), "EKV_EPEER") == 0);
    CHECK_INT(ekv_code_class(EKV_EPEER), EKV_CLASS_PEER);
    CHECK(strcmp(ekv_code_name(12345), "EKV_UNKNOWN") == 0);
}

static void test_log_overflows(void)
{
    struct log log;
    ekv_log_record records[4] = {{.struct_size = sizeof records[0]}};

    CHECK(log_open(&log, 3));
    for (int i = 0; i < 5; i++)
        log_write(&log, LOG_INFO, "line %d", i);
    CHECK_INT(log_read(&log, records, 4), 3);
    CHECK(strcmp(records[0].text, "line 2") == 0 && records[0].dropped == 2);
    CHECK(records[1].dropped == 0);
    log_close(&log);
}

int main(void)
{
    RUN(test_ranges_random);
    RUN(test_jobs);
    RUN(test_notices);
    RUN(test_inflight);
    RUN(test_struct_sizes);
    RUN(test_log_overflows);
    return 0;
}
