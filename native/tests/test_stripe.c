/* test_stripe.c - the pure parts: plans against a slow oracle, rail choice, cutting,
 * credit limits. */
#include "check.h"
#include "plan.h"
#include "stripe.h"

/* The oracle: which remote byte each local byte goes to, one entry per byte. */
struct oracle {
    uint64_t *local;
    uint64_t *remote;
    size_t count;
};

static void oracle_put(struct oracle *oracle, uint64_t local, uint64_t remote, uint64_t length)
{
    oracle->local = realloc(oracle->local, (oracle->count + length) * sizeof(uint64_t));
    oracle->remote = realloc(oracle->remote, (oracle->count + length) * sizeof(uint64_t));
    for (uint64_t i = 0; i < length; i++) {
        oracle->local[oracle->count] = local + i;
        oracle->remote[oracle->count++] = remote + i;
    }
}

static void oracle_free(struct oracle *oracle)
{
    free(oracle->local);
    free(oracle->remote);
    memset(oracle, 0, sizeof *oracle);
}

/* Walks the plan, consuming random parts, and compares byte by byte. */
static void plan_compare(struct plan *plan, const struct oracle *oracle, uint64_t stripe,
                         uint64_t *random, size_t *pieces)
{
    struct piece piece;
    size_t at = 0;

    *pieces = 0;
    while (plan_peek(plan, &piece)) {
        uint64_t take = piece.length;

        CHECK(piece.length > 0 && piece.length <= stripe);
        if (random && check_random(random) % 4 == 0)
            take = 1 + check_random(random) % piece.length;
        CHECK(at + take <= oracle->count);
        for (uint64_t i = 0; i < take; i++) {
            CHECK(oracle->local[at + i] == piece.local + i);
            CHECK(oracle->remote[at + i] == piece.remote + i);
        }
        at += take;
        plan_consume(plan, take);
        (*pieces)++;
    }
    CHECK(at == oracle->count);
    CHECK(plan->total_bytes == oracle->count);
}

static void test_list_random(void)
{
    uint64_t random = check_seed();

    for (int round = 0; round < 400; round++) {
        struct oracle oracle = {0};
        struct plan plan;
        uint64_t local[40], remote[40], lengths[40];
        uint64_t stripe = 1 + check_random(&random) % 64;
        size_t count = check_random(&random) % 40, pieces;

        for (size_t i = 0; i < count; i++) {
            lengths[i] = check_random(&random) % 90;
            local[i] = i && check_random(&random) % 2 ? local[i - 1] + lengths[i - 1]
                                                      : 1 + check_random(&random) % 100000;
            remote[i] = i && check_random(&random) % 2 ? remote[i - 1] + lengths[i - 1]
                                                       : 1 + check_random(&random) % 100000;
            oracle_put(&oracle, local[i], remote[i], lengths[i]);
        }
        CHECK(plan_open_list(&plan, local, remote, lengths, count, stripe) == 0);
        plan_compare(&plan, &oracle, stripe, &random, &pieces);
        plan_close(&plan);
        oracle_free(&oracle);
    }
}

static void random_blocks(uint64_t *random, uint32_t *local, uint32_t *remote, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        int follow = i > 0 && check_random(random) % 3 != 0;

        local[i] = follow ? local[i - 1] + 1 : (uint32_t)(check_random(random) % 200);
        remote[i] = follow && check_random(random) % 4 ? remote[i - 1] + 1
                                                       : (uint32_t)(check_random(random) % 200);
    }
}

static void test_paged_random(void)
{
    uint64_t random = check_seed();

    for (int round = 0; round < 400; round++) {
        struct oracle oracle = {0};
        struct plan plan;
        ekv_row rows[5];
        uint32_t local[30], remote[30];
        uint64_t stripe = 1 + check_random(&random) % 64;
        size_t row_count = check_random(&random) % 6, block_count = check_random(&random) % 31;
        size_t pieces;

        random_blocks(&random, local, remote, block_count);
        for (size_t r = 0; r < row_count; r++) {
            uint64_t length = check_random(&random) % 12;

            rows[r] = (ekv_row){.local_address = 1 + check_random(&random) % 100000,
                                .remote_address = 1 + check_random(&random) % 100000,
                                .local_stride_bytes = length + check_random(&random) % 2 * 5,
                                .remote_stride_bytes = length + check_random(&random) % 2 * 3,
                                .length_bytes = length};
            for (size_t b = 0; b < block_count; b++)
                oracle_put(&oracle, rows[r].local_address + local[b] * rows[r].local_stride_bytes,
                           rows[r].remote_address + remote[b] * rows[r].remote_stride_bytes,
                           length);
        }
        CHECK(plan_open_paged(&plan, rows, row_count, local, remote, block_count, stripe) == 0);
        plan_compare(&plan, &oracle, stripe, &random, &pieces);
        plan_close(&plan);
        oracle_free(&oracle);
    }
}

static void test_runs_are_merged(void)
{
    uint32_t local[8] = {4, 5, 6, 7, 20, 21, 22, 23};
    uint32_t remote[8] = {9, 10, 11, 12, 40, 41, 42, 43};
    ekv_row rows[3] = {
        {1000, 5000, 16, 16, 16}, {9000, 7000, 16, 16, 16}, {0x9000, 0x8000, 32, 16, 16}};
    struct plan plan;
    struct piece piece;
    size_t pieces = 0;

    CHECK(plan_open_paged(&plan, rows, 3, local, remote, 8, 1 << 20) == 0);
    CHECK_INT(plan.run_count, 2);
    while (plan_peek(&plan, &piece)) {
        plan_consume(&plan, piece.length);
        pieces++;
    }
    CHECK_INT(pieces, 2 + 2 + 8); /* two runs for each dense row, every block of the other */
    plan_close(&plan);
}

static void test_overflow_is_refused(void)
{
    uint64_t address = UINT64_MAX - 10, length = 11, fine = 4096;
    uint32_t block = UINT32_MAX;
    ekv_row row = {4096, 4096, UINT64_MAX / 2, 16, 16};
    struct plan plan;

    CHECK_INT(plan_open_list(&plan, &address, &fine, &length, 1, 4096), EKV_EINVAL);
    CHECK_INT(plan_open_list(&plan, &fine, &address, &length, 1, 4096), EKV_EINVAL);
    length = 10;
    CHECK_INT(plan_open_list(&plan, &fine, &address, &length, 1, 4096), EKV_OK);
    plan_close(&plan);
    CHECK_INT(plan_open_paged(&plan, &row, 1, &block, &block, 1, 4096), EKV_EINVAL);
}

static int count_span(void *context, uint64_t local, uint64_t remote, uint64_t length)
{
    (void)local;
    (void)remote;
    *(uint64_t *)context += length;
    return 0;
}

static void test_each_does_not_move_the_cursor(void)
{
    uint64_t local[2] = {100, 300}, remote[2] = {500, 900}, lengths[2] = {50, 60}, total = 0;
    struct plan plan;
    struct piece piece;

    CHECK(plan_open_list(&plan, local, remote, lengths, 2, 16) == 0);
    CHECK(plan_each(&plan, count_span, &total) == 0);
    CHECK_INT(total, 110);
    CHECK(plan_peek(&plan, &piece));
    CHECK(piece.local == 100 && piece.length == 16);
    plan_close(&plan);
}

static void test_choice(void)
{
    struct stripe_rail rails[4] = {{.outstanding_bytes = 500, .usable = 1},
                                   {.outstanding_bytes = 100, .carried_bytes = 9, .usable = 1},
                                   {.outstanding_bytes = 100, .carried_bytes = 8, .usable = 1},
                                   {.usable = 0}};

    CHECK_INT(stripe_choose(rails, 4), 2);
    rails[2].usable = 0;
    CHECK_INT(stripe_choose(rails, 4), 1);
    rails[1].usable = 0;
    CHECK_INT(stripe_choose(rails, 4), 0);
    rails[0].usable = 0;
    CHECK_INT(stripe_choose(rails, 4), -1);
}

static void nearness_fill(struct stripe_rail rails[4])
{
    for (uint32_t i = 0; i < 4; i++)
        rails[i] = (struct stripe_rail){.reachable = 1, .usable = 1, .rank = i / 2};
}

/* Far rails stand in for near ones that are out, not for busy ones, where memory is bound
 * to its own; elsewhere they help once the near ones have that much more to do. */
static void test_nearness(void)
{
    struct stripe_rail rails[4];

    nearness_fill(rails);
    rails[0].outstanding_bytes = rails[1].outstanding_bytes = 1 << 30;
    stripe_prefer(rails, 4, true, 1000);
    CHECK_INT(stripe_choose(rails, 4), 0);
    rails[0].usable = rails[1].usable = 0; /* full */
    CHECK_INT(stripe_choose(rails, 4), -1);

    nearness_fill(rails);
    rails[0].reachable = rails[0].usable = 0;
    rails[1].reachable = rails[1].usable = 0;
    stripe_prefer(rails, 4, true, 1000);
    CHECK_INT(stripe_choose(rails, 4), 2);

    nearness_fill(rails);
    rails[0].outstanding_bytes = rails[1].outstanding_bytes = 999;
    stripe_prefer(rails, 4, false, 1000);
    CHECK_INT(stripe_choose(rails, 4), 0);
    nearness_fill(rails);
    rails[0].outstanding_bytes = rails[1].outstanding_bytes = 1001;
    stripe_prefer(rails, 4, false, 1000);
    CHECK_INT(stripe_choose(rails, 4), 2);
}

static void test_even(void)
{
    struct stripe_rail one = {.outstanding_bytes = 110, .carried_bytes = 500};
    struct stripe_rail best = {.outstanding_bytes = 100, .carried_bytes = 490};

    CHECK(stripe_even(&one, &best, 10));
    CHECK(!stripe_even(&one, &best, 9));
    CHECK(stripe_even(&best, &one, 0));
}

/* 640 equal stripes that settle some time later: the busiest rail carries at most 5 %
 * more than the mean, however many rails there are. */
static void test_balance(void)
{
    for (size_t count = 1; count <= 16; count *= 2) {
        struct stripe_rail rails[16] = {0};
        int history[640];
        uint64_t most = 0, sum = 0;

        for (size_t i = 0; i < count; i++)
            rails[i].usable = 1;
        for (size_t i = 0; i < 640; i++) {
            int chosen = stripe_choose(rails, count);

            rails[chosen].carried_bytes += 1000;
            rails[chosen].outstanding_bytes += 1000;
            history[i] = chosen;
            if (i >= count / 2)
                rails[history[i - count / 2]].outstanding_bytes -= 1000;
        }
        for (size_t i = 0; i < count; i++) {
            sum += rails[i].carried_bytes;
            most = rails[i].carried_bytes > most ? rails[i].carried_bytes : most;
        }
        CHECK(most * count * 100 <= sum * 105);
    }
}

static void test_cut_and_limits(void)
{
    CHECK_INT(stripe_cut(100, 200, 300), 100);
    CHECK_INT(stripe_cut(100, 20, 300), 20);
    CHECK_INT(stripe_cut(100, 200, 3), 3);
    CHECK_INT(stripe_aligned_nic(5, 4), 1);
    CHECK_INT(stripe_peer_limit(8, 3, 3, 1), 8);
    /* However many silent peers there are, the next one gets something. */
    for (uint32_t depth = 1; depth <= 512; depth *= 2) {
        uint32_t in_flight = 0, own = 0;

        for (int peer = 0; peer < 3; peer++) {
            for (own = 0; in_flight < depth && own < stripe_peer_limit(depth, in_flight, own, 4);
                 own++)
                in_flight++;
            if (depth >= 32)
                CHECK(own > 0);
        }
        CHECK(in_flight <= depth);
        if (depth >= 32)
            CHECK(in_flight < depth);
    }
}

int main(void)
{
    RUN(test_list_random);
    RUN(test_paged_random);
    RUN(test_runs_are_merged);
    RUN(test_overflow_is_refused);
    RUN(test_each_does_not_move_the_cursor);
    RUN(test_choice);
    RUN(test_nearness);
    RUN(test_even);
    RUN(test_balance);
    RUN(test_cut_and_limits);
    return 0;
}
