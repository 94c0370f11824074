/* pair.h - opening engines and introducing them to each other, for tests. */
#ifndef EKV_TEST_PAIR_H
#define EKV_TEST_PAIR_H

#include "check.h"
#include "efa_kv.h"

#define SIDE_KEYS_MAX 128u
#define SIDE_NICS_MAX 64u

/* What one engine tells another about itself. */
struct card {
    uint64_t incarnation;
    ekv_nic nics[SIDE_NICS_MAX];
    size_t nic_count;
    uint64_t region;
    uint64_t address;
    uint64_t length;
    ekv_remote_key keys[SIDE_KEYS_MAX];
    size_t key_count;
    ekv_gate gate; /* its gate is -1 where near is off */
};

static inline ekv_options pair_options(const char *protocol, uint64_t incarnation)
{
    ekv_options options = {.struct_size = sizeof options,
                           .protocol = protocol,
                           .incarnation = incarnation,
                           .max_jobs = 256};

    return options;
}

static inline ekv_engine *pair_open(const ekv_options *options)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_engine *engine = NULL;

    CHECK_OK(ekv_engine_open(options, &engine, &error));
    return engine;
}

static inline ekv_region_id pair_register(ekv_engine *engine, void *memory, size_t length)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_memory description = {.struct_size = sizeof description,
                              .address = (uint64_t)(uintptr_t)memory,
                              .length_bytes = length,
                              .device = -1,
                              .access = EKV_ACCESS_REMOTE_WRITE | EKV_ACCESS_REMOTE_READ};
    ekv_region_id region;

    CHECK_OK(ekv_region_add(engine, &description, &region, &error));
    return region;
}

static inline void pair_card(ekv_engine *engine, uint64_t incarnation, ekv_region_id region,
                             const void *memory, size_t length, struct card *card)
{
    ekv_region_key keys[SIDE_KEYS_MAX];

    memset(card, 0, sizeof *card);
    memset(keys, 0, sizeof keys);
    keys[0].struct_size = sizeof keys[0];
    card->nics[0].struct_size = sizeof card->nics[0];
    card->incarnation = incarnation;
    CHECK_INT(ekv_engine_rails(engine, card->nics, SIDE_NICS_MAX, &card->nic_count), EKV_OK);
    CHECK_INT(ekv_region_keys(engine, region, keys, SIDE_KEYS_MAX, &card->key_count), EKV_OK);
    card->gate.struct_size = sizeof card->gate;
    ekv_engine_gate(engine, &card->gate);
    CHECK(card->nic_count <= SIDE_NICS_MAX && card->key_count <= SIDE_KEYS_MAX);
    card->region = region;
    card->address = (uint64_t)(uintptr_t)memory;
    card->length = length;
    for (size_t i = 0; i < card->key_count; i++)
        card->keys[i] = (ekv_remote_key){.struct_size = sizeof card->keys[i],
                                         .nic = keys[i].rail,
                                         .key = keys[i].key,
                                         .base = keys[i].base,
                                         .offset_bytes = keys[i].offset_bytes,
                                         .length_bytes = keys[i].length_bytes};
}

static inline ekv_peer_id pair_connect(ekv_engine *engine, const struct card *card,
                                       uint32_t same_process)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_peer_options options = {.struct_size = sizeof options,
                                .same_process = same_process,
                                .incarnation = card->incarnation};
    ekv_peer_id peer;

    CHECK_OK(ekv_peer_add(engine, &options, card->nics, card->nic_count, &peer, &error));
    CHECK_OK(ekv_peer_region_add(engine, peer, card->region, card->address, card->length,
                                 card->keys, card->key_count, &error));
    return peer;
}

static inline ekv_job_options pair_job(ekv_peer_id peer, uint32_t operation, double deadline_s)
{
    ekv_job_options options = {.struct_size = sizeof options,
                               .operation = operation,
                               .peer = peer,
                               .deadline_s = deadline_s};

    options.notice.struct_size = sizeof options.notice;
    return options;
}

/* Waits until the job is fenced and releases it. */
static inline ekv_result pair_finish(ekv_engine *engine, ekv_job_id job, double timeout_s)
{
    ekv_result result = {.struct_size = sizeof result};

    CHECK_INT(ekv_job_wait(engine, job, timeout_s, 1, &result), EKV_OK);
    CHECK_INT(ekv_job_release(engine, job), EKV_OK);
    return result;
}

static inline void pair_print_log(ekv_engine *engine)
{
    ekv_log_record record = {.struct_size = sizeof record};

    while (ekv_log_read(engine, &record, 1) == 1)
        printf("  log %u: %s\n", record.level, record.text);
}

#endif
