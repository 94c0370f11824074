/* test_ring.c - the submission ring with one and with several producers. */
#include <pthread.h>
#include <sched.h>

#include "check.h"
#include "ring.h"

#define PRODUCERS 4
#define EACH 50000u

static struct ring ring;

static void test_full_and_empty(void)
{
    uint64_t value;

    CHECK(ring_open(&ring, 5)); /* rounded up to 8 */
    CHECK(ring_is_empty(&ring));
    CHECK(!ring_pop(&ring, &value));
    for (int lap = 0; lap < 5; lap++) {
        for (uint64_t i = 0; i < 8; i++)
            CHECK(ring_push(&ring, i + 100));
        CHECK(!ring_push(&ring, 1));
        CHECK(!ring_is_empty(&ring));
        for (uint64_t i = 0; i < 8; i++) {
            CHECK(ring_pop(&ring, &value));
            CHECK(value == i + 100);
        }
        CHECK(!ring_pop(&ring, &value));
    }
    ring_close(&ring);
}

static void *produce(void *argument)
{
    uint64_t who = (uint64_t)(uintptr_t)argument;

    for (uint64_t i = 0; i < EACH; i++)
        while (!ring_push(&ring, who << 32 | i))
            sched_yield();
    return NULL;
}

static void test_many_producers(void)
{
    pthread_t threads[PRODUCERS];
    uint64_t next[PRODUCERS] = {0}, value;

    CHECK(ring_open(&ring, 64));
    for (uintptr_t i = 0; i < PRODUCERS; i++)
        CHECK(pthread_create(&threads[i], NULL, produce, (void *)i) == 0);
    for (uint64_t taken = 0; taken < (uint64_t)PRODUCERS * EACH;) {
        if (!ring_pop(&ring, &value)) {
            sched_yield();
            continue;
        }
        /* Nothing lost, nothing doubled, each producer in order. */
        CHECK((value & 0xffffffff) == next[value >> 32]);
        next[value >> 32]++;
        taken++;
    }
    for (int i = 0; i < PRODUCERS; i++)
        pthread_join(threads[i], NULL);
    CHECK(ring_is_empty(&ring));
    ring_close(&ring);
}

int main(void)
{
    RUN(test_full_and_empty);
    RUN(test_many_producers);
    return 0;
}
