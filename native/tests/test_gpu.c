/* GPU memory over providers that do not reach it: staged in messages; and within a process.
 *
 * Either side's memory is on the host or on a fake GPU, whose memory no processor can touch:
 * whatever takes it for host memory crashes. */
#include <string.h>
#include <unistd.h>

#include "gpu.h"

#define BYTES ((3u << 20) + 77u)
#define PIECES 500u
#define LEFT 0xaaaa
#define RIGHT 0xbbbb

static const char *protocol;

/* One side: its memory, and the same bytes where the test can see them. */
struct side {
    ekv_engine *engine;
    uint64_t incarnation;
    int device; /* -1: the memory is the host's */
    uint64_t address;
    uint8_t *seen;
    ekv_region_id region;
    struct card card;
};

struct both {
    struct side left, right;
    ekv_peer_id peer; /* the right side, seen from the left */
    ekv_peer_id back; /* and the other way round */
};

static ekv_options options_of(uint64_t incarnation)
{
    ekv_options options = pair_options(protocol, incarnation);

    options.cuda_path = FAKE_CUDA;
    return options;
}

static void side_write(const struct side *side)
{
    if (side->device >= 0)
        gpu_copy(side->address, (uint64_t)(uintptr_t)side->seen, BYTES);
}

static void side_look(const struct side *side)
{
    if (side->device >= 0)
        gpu_copy((uint64_t)(uintptr_t)side->seen, side->address, BYTES);
}

static void side_open(struct side *side, const ekv_options *options, int device)
{
    side->incarnation = options->incarnation;
    side->device = device;
    side->engine = pair_open(options);
    side->seen = malloc(BYTES);
    CHECK(side->seen != NULL);
    for (size_t i = 0; i < BYTES; i++)
        side->seen[i] = (uint8_t)(i * 13 + (i >> 11) + side->incarnation);
    if (device < 0) {
        side->address = (uint64_t)(uintptr_t)side->seen;
        side->region = pair_register(side->engine, side->seen, BYTES);
    } else {
        side->address = gpu_allocate(device, BYTES);
        side_write(side);
        side->region = gpu_register(side->engine, side->address, BYTES, device);
    }
    pair_card(side->engine, side->incarnation, side->region, (void *)(uintptr_t)side->address,
              BYTES, &side->card);
}

static void both_open(struct both *both, int left, int right, bool near)
{
    ekv_options options = options_of(LEFT);

    options.near = near ? EKV_NEAR_ALLOWED : EKV_NEAR_NEVER;
    side_open(&both->left, &options, left);
    options.incarnation = RIGHT;
    side_open(&both->right, &options, right);
    both->back = pair_connect(both->right.engine, &both->left.card, near);
    both->peer = pair_connect(both->left.engine, &both->right.card, near);
}

static void side_close(struct side *side)
{
    pair_print_log(side->engine);
    CHECK_INT(ekv_engine_close(side->engine, 1), 0);
    if (side->device >= 0)
        CHECK_INT(gpu.release(side->address), 0);
    free(side->seen);
}

static void both_close(struct both *both)
{
    side_close(&both->left);
    side_close(&both->right);
}

static ekv_result move(struct both *both, uint32_t operation, const uint64_t *local,
                       const uint64_t *remote, const uint64_t *lengths, size_t count,
                       double deadline_s)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options = pair_job(both->peer, operation, deadline_s);
    ekv_job_id job;

    CHECK_OK(ekv_submit(both->left.engine, &options, local, remote, lengths, count, &job, &error));
    return pair_finish(both->left.engine, job, deadline_s + 20);
}

static ekv_result move_all(struct both *both, uint32_t operation, double deadline_s)
{
    uint64_t length = BYTES;

    return move(both, operation, &both->left.address, &both->right.address, &length, 1, deadline_s);
}

static uint64_t staged_bytes(ekv_engine *engine)
{
    ekv_rail_counters counters[SIDE_NICS_MAX];
    size_t count;

    counters[0].struct_size = sizeof counters[0];
    CHECK_INT(ekv_counters(engine, counters, SIDE_NICS_MAX, &count), EKV_OK);
    return counters[0].bytes_staged;
}

/* Everything, in both directions, between every two kinds of memory. */
static void test_every_kind(void)
{
    static const int kinds[][2] = {{-1, 0}, {0, -1}, {0, 1}, {0, 0}};

    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        for (uint32_t operation = EKV_WRITE; operation <= EKV_READ; operation++) {
            struct both both;
            ekv_result result;

            both_open(&both, kinds[i][0], kinds[i][1], false);
            CHECK(memcmp(both.left.seen, both.right.seen, BYTES) != 0);
            result = move_all(&both, operation, 20);
            CHECK_INT(result.status, EKV_OK);
            CHECK_INT(result.bytes, BYTES);
            side_look(operation == EKV_WRITE ? &both.right : &both.left);
            CHECK(memcmp(both.left.seen, both.right.seen, BYTES) == 0);
            CHECK_INT(both.left.seen[0], (uint8_t)(operation == EKV_WRITE ? LEFT : RIGHT));
            CHECK_INT(staged_bytes(both.left.engine), BYTES);
            both_close(&both);
        }
}

/* Pieces of odd sizes at odd places, and nothing between them is touched. */
static void test_scattered(void)
{
    uint64_t local[PIECES], remote[PIECES], lengths[PIECES];
    struct both both;
    uint8_t *wanted = malloc(BYTES);

    CHECK(wanted != NULL);
    both_open(&both, 0, 1, false);
    memcpy(wanted, both.right.seen, BYTES);
    for (size_t i = 0; i < PIECES; i++) {
        uint64_t from = (PIECES - 1 - i) * 6151;
        uint64_t to = i * 6151 + 5;

        lengths[i] = 1 + i * 11;
        local[i] = both.left.address + from;
        remote[i] = both.right.address + to;
        memcpy(wanted + to, both.left.seen + from, lengths[i]);
    }
    CHECK_INT(move(&both, EKV_WRITE, local, remote, lengths, PIECES, 20).status, EKV_OK);
    side_look(&both.right);
    CHECK(memcmp(wanted, both.right.seen, BYTES) == 0);
    free(wanted);
    both_close(&both);
}

/* Who has had the keys of before gets nothing in. */
static void test_changed_keys(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct both both;
    ekv_result result;
    uint8_t before;

    both_open(&both, -1, 0, false);
    before = both.right.seen[0];
    CHECK_OK(ekv_region_rotate(both.right.engine, both.right.region, 1, &error));
    result = move_all(&both, EKV_WRITE, 10);
    CHECK_INT(result.status, EKV_EACCESS);
    CHECK(strstr(result.text, "keys have changed"));
    CHECK_INT(result.stray, 0);
    side_look(&both.right);
    CHECK_INT(both.right.seen[0], before);
    CHECK_INT(move_all(&both, EKV_READ, 10).status, EKV_EACCESS);
    /* With the new keys it goes on. */
    pair_card(both.right.engine, RIGHT, both.right.region, (void *)(uintptr_t)both.right.address,
              BYTES, &both.right.card);
    CHECK_OK(ekv_peer_region_add(both.left.engine, both.peer, both.right.card.region,
                                 both.right.card.address, BYTES, both.right.card.keys,
                                 both.right.card.key_count, &error));
    CHECK_INT(move_all(&both, EKV_WRITE, 10).status, EKV_OK);
    CHECK_OK(ekv_region_remove(both.right.engine, both.right.region, 1, &error));
    CHECK_INT(move_all(&both, EKV_WRITE, 10).status, EKV_EACCESS);
    both_close(&both);
}

/* A peer that asks for more than it was given: beyond a region's end, or to write where it may
 * only read.  It is the owner who refuses. */
static void test_peers_that_ask_for_more(void)
{
    ekv_error error = {.struct_size = sizeof error};
    uint64_t length = 64, end, other;
    ekv_region_id region;
    ekv_memory memory;
    struct both both;
    struct card card;

    both_open(&both, -1, 0, false);
    end = both.right.address + BYTES - 10; /* the device's memory itself goes on behind it */
    CHECK_OK(ekv_peer_region_add(both.left.engine, both.peer, both.right.card.region,
                                 both.right.card.address, BYTES + 4096, both.right.card.keys,
                                 both.right.card.key_count, &error));
    for (uint32_t operation = EKV_WRITE; operation <= EKV_READ; operation++)
        CHECK_INT(move(&both, operation, &both.left.address, &end, &length, 1, 10).status,
                  EKV_EACCESS);
    length = 10;
    CHECK_INT(move(&both, EKV_WRITE, &both.left.address, &end, &length, 1, 10).status, EKV_OK);

    other = gpu_allocate(0, BYTES);
    memory = gpu_memory(other, BYTES, 0);
    memory.access = EKV_ACCESS_REMOTE_READ;
    CHECK_OK(ekv_region_add(both.right.engine, &memory, &region, &error));
    pair_card(both.right.engine, RIGHT, region, (void *)(uintptr_t)other, BYTES, &card);
    CHECK_OK(ekv_peer_region_add(both.left.engine, both.peer, card.region, card.address, BYTES,
                                 card.keys, card.key_count, &error));
    CHECK_INT(move(&both, EKV_WRITE, &both.left.address, &other, &length, 1, 10).status,
              EKV_EACCESS);
    CHECK_INT(move(&both, EKV_READ, &both.left.address, &other, &length, 1, 10).status, EKV_OK);
    both_close(&both);
    CHECK_INT(gpu.release(other), 0);
}

static void test_copies_that_fail(void)
{
    struct both both;
    ekv_result result;

    both_open(&both, -1, 0, false);
    gpu.fail(1);
    result = move_all(&both, EKV_WRITE, 10);
    CHECK_INT(result.status, EKV_EPROVIDER);
    CHECK_INT(result.fenced, 1);
    CHECK_INT(move_all(&both, EKV_WRITE, 10).status, EKV_OK);
    memset(both.left.seen, 0, BYTES);
    gpu.fail(1); /* to read again harms nobody */
    CHECK_INT(move_all(&both, EKV_READ, 10).status, EKV_OK);
    side_look(&both.right);
    CHECK(memcmp(both.left.seen, both.right.seen, BYTES) == 0);
    both_close(&both);
}

/* A target that does not answer: the job ends, its memory here is free, and it says that
 * bytes may still land there. */
static void test_no_answer(void)
{
    struct both both;
    ekv_result result;

    both_open(&both, 0, 1, false);
    CHECK_INT(ekv_peer_remove(both.right.engine, both.back), EKV_OK);
    result = move_all(&both, EKV_WRITE, 0.5);
    CHECK_INT(result.status, EKV_EDEADLINE);
    CHECK_INT(result.fenced, 1);
    CHECK_INT(result.stray, 1);
    result = move_all(&both, EKV_READ, 0.5);
    CHECK_INT(result.status, EKV_EDEADLINE);
    CHECK_INT(result.stray, 0);
    both_close(&both);
}

#define PART (BYTES / 3)

/* Moves the first part of `from` to another part of `to`, asked for by either side. */
static ekv_job_id begin(ekv_engine *engine, ekv_peer_id peer, uint32_t operation,
                        const struct side *from, const struct side *to, uint64_t part)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options = pair_job(peer, operation, 60);
    uint64_t source = from->address, target = to->address + part * PART, length = PART;
    uint64_t local = operation == EKV_WRITE ? source : target;
    uint64_t remote = operation == EKV_WRITE ? target : source;
    ekv_job_id job;

    CHECK_OK(ekv_submit(engine, &options, &local, &remote, &length, 1, &job, &error));
    return job;
}

/* Each asks for more than the other has receives, at the same time. */
static void test_both_ways(void)
{
    ekv_job_id left[8], right[8];
    struct both both;

    both_open(&both, 0, 1, false);
    for (uint32_t i = 0; i < 8; i += 2) {
        struct side *l = &both.left, *r = &both.right;

        left[i] = begin(l->engine, both.peer, EKV_WRITE, l, r, 1);
        right[i] = begin(r->engine, both.back, EKV_WRITE, r, l, 1);
        left[i + 1] = begin(l->engine, both.peer, EKV_READ, r, l, 2);
        right[i + 1] = begin(r->engine, both.back, EKV_READ, l, r, 2);
    }
    for (uint32_t i = 0; i < 8; i++) {
        CHECK_INT(pair_finish(both.left.engine, left[i], 80).status, EKV_OK);
        CHECK_INT(pair_finish(both.right.engine, right[i], 80).status, EKV_OK);
    }
    side_look(&both.left);
    side_look(&both.right);
    for (uint32_t part = 1; part < 3; part++) {
        CHECK(memcmp(both.left.seen, both.right.seen + part * PART, PART) == 0);
        CHECK(memcmp(both.right.seen, both.left.seen + part * PART, PART) == 0);
    }
    both_close(&both);
}

static void test_same_process(void)
{
    static const int kinds[][2] = {{-1, 0}, {0, -1}, {0, 1}};

    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        for (uint32_t operation = EKV_WRITE; operation <= EKV_READ; operation++) {
            struct both both;

            both_open(&both, kinds[i][0], kinds[i][1], true);
            CHECK_INT(move_all(&both, operation, 10).status, EKV_OK);
            side_look(operation == EKV_WRITE ? &both.right : &both.left);
            CHECK(memcmp(both.left.seen, both.right.seen, BYTES) == 0);
            CHECK_INT(staged_bytes(both.left.engine), 0);
            both_close(&both);
        }
}

/* One side has no driver: said at once, on the side that asks. */
static void test_without_a_driver(void)
{
    ekv_options options = pair_options(protocol, LEFT);
    ekv_error error = {.struct_size = sizeof error};
    ekv_memory memory;
    ekv_region_id region;
    struct both both;
    ekv_result result;

    options.cuda_path = "/nowhere/libcuda.so";
    CHECK_INT(ekv_engine_open(&options, &both.left.engine, &error), EKV_EINVAL);
    CHECK(strstr(error.text, "cuda_path"));
    options.cuda_path = NULL;
    side_open(&both.left, &options, -1);
    options = options_of(RIGHT);
    side_open(&both.right, &options, 0);
    pair_connect(both.right.engine, &both.left.card, 0);
    both.peer = pair_connect(both.left.engine, &both.right.card, 0);
    memory = gpu_memory(both.right.address, BYTES, 0);
    CHECK_INT(ekv_region_add(both.left.engine, &memory, &region, &error), EKV_EREGISTER);
    result = move_all(&both, EKV_WRITE, 10);
    CHECK_INT(result.status, EKV_ENOTSUP);
    CHECK(strstr(result.text, "no CUDA driver"));
    both_close(&both);
}

static void test_whose_memory_it_is(void)
{
    ekv_options options = options_of(LEFT);
    ekv_error error = {.struct_size = sizeof error};
    ekv_engine *engine = pair_open(&options);
    uint64_t address = gpu_allocate(1, BYTES);
    ekv_memory memory = gpu_memory(address, BYTES, 0);
    ekv_region_id region;
    uint8_t host[64];

    CHECK_INT(ekv_region_add(engine, &memory, &region, &error), EKV_EREGISTER);
    CHECK(strstr(error.text, "not memory of GPU 0"));
    memory.device = -1; /* the driver is asked */
    CHECK_OK(ekv_region_add(engine, &memory, &region, &error));
    memory = gpu_memory((uint64_t)(uintptr_t)host, sizeof host, -1);
    CHECK_INT(ekv_region_add(engine, &memory, &region, &error), EKV_EREGISTER);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
    CHECK_INT(gpu.release(address), 0);
}

int main(int count, char **arguments)
{
    const char *protocols[] = {"tcp", "shm"};

    setvbuf(stdout, NULL, _IOLBF, 0);
    gpu_open();
    for (int i = 0; i < (count > 1 ? 1 : 2); i++) {
        protocol = count > 1 ? arguments[1] : protocols[i];
        printf("protocol %s\n", protocol);
        RUN(test_every_kind);
        RUN(test_scattered);
        RUN(test_changed_keys);
        RUN(test_peers_that_ask_for_more);
        RUN(test_copies_that_fail);
        RUN(test_no_answer);
        RUN(test_both_ways);
        RUN(test_same_process);
        RUN(test_without_a_driver);
        RUN(test_whose_memory_it_is);
    }
    return 0;
}
