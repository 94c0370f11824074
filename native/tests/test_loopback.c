/* test_loopback.c - two engines of one process, every byte over the provider. */
#include "pair.h"

#include <poll.h>
#include <time.h>

#define BYTES (8u << 20)

static uint8_t source[BYTES], target[BYTES];

struct duo {
    ekv_engine *left, *right;
    struct card left_card, right_card;
    ekv_region_id left_region, right_region;
    ekv_peer_id right_peer; /* as seen from left */
};

static void fill(void)
{
    for (size_t i = 0; i < BYTES; i++) {
        source[i] = (uint8_t)(i * 31 + (i >> 12));
        target[i] = 0;
    }
}

static void duo_open(struct duo *duo, const char *protocol, uint32_t max_in_flight,
                     uint64_t chunk_bytes)
{
    ekv_options left = pair_options(protocol, 0x1111), right = pair_options(protocol, 0x2222);

    left.max_in_flight = right.max_in_flight = max_in_flight;
    left.region_chunk_bytes = chunk_bytes;
    right.region_chunk_bytes = chunk_bytes ? chunk_bytes + 4096 : 0;
    duo->left = pair_open(&left);
    duo->right = pair_open(&right);
    duo->left_region = pair_register(duo->left, source, BYTES);
    duo->right_region = pair_register(duo->right, target, BYTES);
    pair_card(duo->left, 0x1111, duo->left_region, source, BYTES, &duo->left_card);
    pair_card(duo->right, 0x2222, duo->right_region, target, BYTES, &duo->right_card);
    duo->right_peer = pair_connect(duo->left, &duo->right_card, 0);
}

static void duo_close(struct duo *duo)
{
    CHECK_INT(ekv_engine_close(duo->left, 1), 0);
    CHECK_INT(ekv_engine_close(duo->right, 1), 0);
}

static void test_write_read(const char *protocol, uint64_t chunk_bytes)
{
    ekv_error error = {.struct_size = sizeof error};
    struct duo duo;
    uint64_t local = (uint64_t)(uintptr_t)source, remote = (uint64_t)(uintptr_t)target;
    uint64_t length = BYTES;
    ekv_job_options options;
    ekv_result result;
    ekv_job_id job;

    fill();
    duo_open(&duo, protocol, 0, chunk_bytes);
    pair_print_log(duo.left);
    CHECK_OK(ekv_peer_warm(duo.left, duo.right_peer, 5, &error));
    options = pair_job(duo.right_peer, EKV_WRITE, 10);
    CHECK_OK(ekv_submit(duo.left, &options, &local, &remote, &length, 1, &job, &error));
    result = pair_finish(duo.left, job, 10);
    CHECK_INT(result.status, EKV_OK);
    CHECK_INT(result.bytes, BYTES);
    CHECK(memcmp(source, target, BYTES) == 0);
    memset(source, 0, BYTES);
    options = pair_job(duo.right_peer, EKV_READ, 10);
    CHECK_OK(ekv_submit(duo.left, &options, &local, &remote, &length, 1, &job, &error));
    result = pair_finish(duo.left, job, 10);
    CHECK_INT(result.status, EKV_OK);
    CHECK(memcmp(source, target, BYTES) == 0);
    duo_close(&duo);
}

static void test_notice(const char *protocol)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_notice got = {.struct_size = sizeof got};
    struct duo duo;
    uint64_t local = (uint64_t)(uintptr_t)source, remote = (uint64_t)(uintptr_t)target;
    uint64_t length = 100000;
    ekv_job_options options;
    ekv_result result = {.struct_size = sizeof result};
    ekv_job_id job;
    struct pollfd fd;

    fill();
    duo_open(&duo, protocol, 0, 0);
    options = pair_job(duo.right_peer, EKV_WRITE, 10);
    options.flags = EKV_JOB_NOTICE | EKV_JOB_POLLED;
    options.user_data = 77;
    options.notice.transfer[0] = 5;
    options.notice.transfer[1] = 6;
    options.notice.generation = 7;
    options.notice.status = 8;
    CHECK_OK(ekv_submit(duo.left, &options, &local, &remote, &length, 1, &job, &error));
    fd = (struct pollfd){.fd = ekv_engine_event_fd(duo.right), .events = POLLIN};
    CHECK_INT(poll(&fd, 1, 5000), 1);
    CHECK_INT(ekv_notices(duo.right, &got, 1), 1);
    CHECK(memcmp(source, target, length) == 0);
    CHECK(got.transfer[0] == 5 && got.transfer[1] == 6 && got.generation == 7);
    CHECK(got.status == 8 && got.bytes == length && got.sender == 0x1111);
    CHECK_INT(poll(&fd, 1, 0), 0);
    fd.fd = ekv_engine_event_fd(duo.left);
    CHECK_INT(poll(&fd, 1, 5000), 1);
    CHECK_INT(ekv_poll(duo.left, &result, 1), 1);
    CHECK_INT(result.user_data, 77);
    CHECK_INT(result.status, EKV_OK);
    CHECK_INT(result.notice_status, EKV_OK);
    CHECK_INT(result.fenced, 1);
    CHECK_INT(poll(&fd, 1, 0), 0);
    CHECK_INT(ekv_job_release(duo.left, job), EKV_OK);
    duo_close(&duo);
}

int main(int count, char **arguments)
{
    const char *protocols[] = {"tcp", "shm"};

    (void)count;
    (void)arguments;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < 2; i++) {
        printf("protocol %s\n", protocols[i]);
        test_write_read(protocols[i], 0);
        puts("  seams");
        test_write_read(protocols[i], 1 << 19);
        puts("  notice");
        test_notice(protocols[i]);
    }
    return 0;
}
