/* duo.h - two engines of one process, connected, with memory to move between them. */
#ifndef EKV_TEST_DUO_H
#define EKV_TEST_DUO_H

#include <sys/mman.h>

#include "pair.h"

#ifndef BYTES
#define BYTES (8u << 20)
#endif

static const char *protocol;
static uint8_t *source, *target;

struct duo {
    ekv_engine *left, *right;
    struct card card; /* of the right one */
    ekv_region_id left_region, right_region;
    ekv_peer_id peer;
};

/* EFA's lighter fabric serves only peers that it knows itself. */
static inline void introduce(struct duo *duo, uint64_t left_incarnation)
{
    struct card left;

    pair_card(duo->left, left_incarnation, duo->left_region, source, BYTES, &left);
    pair_connect(duo->right, &left, 0);
}

static inline void duo_memory(void)
{
    source = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    target = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(source != MAP_FAILED && target != MAP_FAILED);
}

static inline void fill(void)
{
    for (size_t i = 0; i < BYTES; i++) {
        source[i] = (uint8_t)(i * 13 + (i >> 11));
        target[i] = 0;
    }
}

static inline void duo_open_with(struct duo *duo, ekv_options left, ekv_options right,
                                 uint32_t same_process)
{
    fill();
    duo->left = pair_open(&left);
    duo->right = pair_open(&right);
    duo->left_region = pair_register(duo->left, source, BYTES);
    duo->right_region = pair_register(duo->right, target, BYTES);
    pair_card(duo->right, right.incarnation, duo->right_region, target, BYTES, &duo->card);
    introduce(duo, left.incarnation);
    duo->peer = pair_connect(duo->left, &duo->card, same_process);
}

static inline void duo_open(struct duo *duo)
{
    duo_open_with(duo, pair_options(protocol, 0xaaaa), pair_options(protocol, 0xbbbb), 0);
}

static inline void duo_close(struct duo *duo)
{
    CHECK_INT(ekv_engine_close(duo->left, 1), 0);
    CHECK_INT(ekv_engine_close(duo->right, 1), 0);
}

static inline int submit_at(struct duo *duo, uint64_t local_offset, uint64_t remote_offset,
                            uint64_t length, double deadline_s, ekv_job_id *job, ekv_error *error)
{
    ekv_job_options options = pair_job(duo->peer, EKV_WRITE, deadline_s);
    uint64_t local = (uint64_t)(uintptr_t)source + local_offset;
    uint64_t remote = (uint64_t)(uintptr_t)target + remote_offset;

    return ekv_submit(duo->left, &options, &local, &remote, &length, 1, job, error);
}

#endif
