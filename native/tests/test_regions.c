/* test_regions.c - what regions and their keys promise: a wrong key is refused, what is in
 * use cannot go away, and new keys shut out what was submitted before. */
#define _GNU_SOURCE
#include "duo.h"

static void test_wrong_key(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_result result = {.struct_size = sizeof result};
    struct duo duo;
    ekv_job_id job;

    duo_open(&duo);
    for (size_t i = 0; i < duo.card.key_count; i++)
        duo.card.keys[i].key ^= 0x55;
    CHECK_OK(ekv_peer_region_add(duo.left, duo.peer, duo.card.region, duo.card.address,
                                 duo.card.length, duo.card.keys, duo.card.key_count, &error));
    CHECK_OK(submit_at(&duo, 0, 0, 100000, 1, &job, &error));
    CHECK_INT(ekv_job_wait(duo.left, job, 5, 0, &result), EKV_OK);
    printf("  wrong key: %s \"%s\"\n", ekv_code_name(result.status), result.text);
    CHECK(result.status != EKV_OK);
    for (size_t i = 0; i < 100000; i++)
        CHECK(target[i] == 0);
    ekv_engine_close(duo.left, 0.2);
    ekv_engine_close(duo.right, 0.2);
}

static void test_region_in_use(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_result result;
    struct duo duo;
    ekv_job_id jobs[40];

    duo_open(&duo);
    for (int i = 0; i < 40; i++)
        CHECK_OK(submit_at(&duo, 0, 0, BYTES, 20, &jobs[i], &error));
    CHECK_INT(ekv_region_remove(duo.left, duo.left_region, 0, &error), EKV_EBUSY);
    CHECK_INT(submit_at(&duo, 0, 0, 1, 1, &jobs[0], &error), EKV_EREGION); /* refused at once */
    CHECK_OK(ekv_region_remove(duo.left, duo.left_region, 20, &error));
    CHECK_INT(ekv_region_remove(duo.left, duo.left_region, 0, &error), EKV_ESTALE);
    for (int i = 1; i < 40; i++) {
        result = pair_finish(duo.left, jobs[i], 0); /* the jobs were waited for */
        CHECK_INT(result.status, EKV_OK);
    }
    duo_close(&duo);
}

static void test_rotate_under_load(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_result result;
    struct duo duo;
    ekv_job_id jobs[40];

    duo_open(&duo);
    for (int i = 0; i < 40; i++)
        CHECK_OK(submit_at(&duo, 0, 0, BYTES, 20, &jobs[i], &error));
    for (int i = 0; i < 5; i++) /* local keys change under running jobs, which go on */
        CHECK_OK(ekv_region_rotate(duo.left, duo.left_region, 5, &error));
    for (int i = 0; i < 40; i++) {
        result = pair_finish(duo.left, jobs[i], 20);
        CHECK_INT(result.status, EKV_OK);
        CHECK_INT(result.bytes, BYTES);
    }
    CHECK(memcmp(source, target, BYTES) == 0);
    duo_close(&duo);
}

/* A peer that changes its keys must not be written to by what was submitted before,
 * neither with the old keys nor with the new ones. */
static void test_new_keys_are_not_for_old_jobs(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_result result;
    struct duo duo;
    ekv_job_id jobs[40], after;

    duo_open(&duo);
    for (int i = 0; i < 40; i++)
        CHECK_OK(submit_at(&duo, 0, 0, BYTES, 20, &jobs[i], &error));
    CHECK_OK(ekv_peer_region_add(duo.left, duo.peer, duo.card.region, duo.card.address,
                                 duo.card.length, duo.card.keys, duo.card.key_count, &error));
    CHECK_OK(submit_at(&duo, 0, 0, BYTES, 20, &after, &error));
    for (int i = 0; i < 40; i++) {
        result = pair_finish(duo.left, jobs[i], 20);
        CHECK(result.status == EKV_EACCESS || (result.status == EKV_OK && result.bytes == BYTES));
        CHECK_INT(result.fenced, 1);
    }
    CHECK_INT(result.status, EKV_EACCESS); /* the last one had not begun */
    result = pair_finish(duo.left, after, 20);
    CHECK_INT(result.status, EKV_OK);
    CHECK(memcmp(source, target, BYTES) == 0);
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
        RUN(test_wrong_key);
        RUN(test_region_in_use);
        RUN(test_rotate_under_load);
        RUN(test_new_keys_are_not_for_old_jobs);
    }
    return 0;
}
