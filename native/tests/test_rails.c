/* test_rails.c - several rails, in one group and in a group each: every byte arrives,
 * the load is even, a peer that lost a NIC is reached over the others.  The rails are
 * the TCP interfaces of this host, so with one interface there is little to see. */
#include "pair.h"

#define BYTES (32u << 20)

static uint8_t source[BYTES], target[BYTES];

static ekv_job_id submit_all(ekv_engine *engine, ekv_peer_id peer, uint32_t operation)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options = pair_job(peer, operation, 20);
    uint64_t local = (uint64_t)(uintptr_t)source, remote = (uint64_t)(uintptr_t)target;
    uint64_t length = BYTES;
    ekv_job_id job;

    options.flags = EKV_JOB_NOTICE;
    CHECK_OK(ekv_submit(engine, &options, &local, &remote, &length, 1, &job, &error));
    return job;
}

static void rails_move(uint32_t threads, int lose_nic)
{
    ekv_options left = pair_options("tcp", 0x1), right = pair_options("tcp", 0x2);
    ekv_rail_counters counters[16] = {{.struct_size = sizeof counters[0]}};
    ekv_engine *sender, *receiver;
    struct card card;
    ekv_region_id region;
    ekv_peer_id peer;
    ekv_result result;
    size_t rails;

    left.devices = right.devices = "*";
    left.progress_threads = right.progress_threads = threads;
    left.stripe_bytes = 65536;
    for (size_t i = 0; i < BYTES; i++) {
        source[i] = (uint8_t)(i * 11 + (i >> 10));
        target[i] = 0;
    }
    sender = pair_open(&left);
    receiver = pair_open(&right);
    pair_register(sender, source, BYTES);
    region = pair_register(receiver, target, BYTES);
    pair_card(receiver, 0x2, region, target, BYTES, &card);
    if (lose_nic && card.nic_count > 1) /* an address where nobody listens */
        memcpy(card.nics[0].address + 2, "\0\1", 2);
    peer = pair_connect(sender, &card, 0);
    for (int round = 0; round < 3; round++) {
        memset(target, 0, BYTES);
        result = pair_finish(sender, submit_all(sender, peer, EKV_WRITE), 30);
        CHECK_INT(result.status, EKV_OK);
        CHECK_INT(result.notice_status, EKV_OK);
        CHECK_INT(result.bytes, BYTES);
        CHECK(memcmp(source, target, BYTES) == 0);
    }
    memset(source, 0, BYTES);
    CHECK_INT(pair_finish(sender, submit_all(sender, peer, EKV_READ), 30).status, EKV_OK);
    CHECK(memcmp(source, target, BYTES) == 0);
    CHECK_INT(ekv_counters(sender, counters, 16, &rails), EKV_OK);
    for (size_t i = 0; i < rails; i++)
        printf("  rail %zu: %llu operations, %llu failed, %llu resent, %llu bytes\n", i,
               (unsigned long long)counters[i].operations_posted,
               (unsigned long long)counters[i].operations_failed,
               (unsigned long long)counters[i].operations_resent,
               (unsigned long long)(counters[i].bytes_written + counters[i].bytes_read));
    CHECK_INT(ekv_engine_close(sender, 1), 0); /* no job is left behind in any group */
    CHECK_INT(ekv_engine_close(receiver, 1), 0);
}

static void test_one_group(void)
{
    rails_move(1, 0);
}

static void test_group_each(void)
{
    rails_move(16, 0);
}

static void test_lost_nic(void)
{
    rails_move(1, 1);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    RUN(test_one_group);
    RUN(test_group_each);
    RUN(test_lost_nic);
    return 0;
}
