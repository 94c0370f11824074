/* Removing a region while a visitor of another process stands at the worst possible point: its keys
 * are checked and its segments are filled in, but it has not moved a byte yet. */
#include "harness.h"
#include "region_table.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

enum { SEGMENT_BYTES = 4096 };

static bool segments_are_empty(const struct shared_visit *visit)
{
    for (int i = 0; i < VISIT_SEGMENTS; i++)
        if (((const volatile struct iovec *)visit->remote)[i].iov_len != 0)
            return false;
    return true;
}

/* A visitor that says over the socket that it has come to that point, and is then at the mercy of
 * its owner. Once it goes on it tells whether it would still have moved anything. */
static void visitor(int socket, pid_t self)
{
    struct process_identity owner_identity = {(uint32_t)getppid(), 0};
    (void)self;
    owner_identity.start_time = receive_word(socket);
    uint32_t key = (uint32_t)receive_word(socket);
    struct remote_process *owner = registry_attach(owner_identity);
    CHECK(owner);
    struct shared_visit *visit = visit_claim(owner->shared);
    CHECK(visit);
    visit_begin(visit);
    for (int i = 0; i < VISIT_SEGMENTS; i++)
        visit->remote[i].iov_len = SEGMENT_BYTES;
    CHECK(region_allows(owner->shared, key, 1, 65536, SEGMENT_BYTES, FI_REMOTE_WRITE));
    send_word(socket, 0);
    receive_word(socket);
    send_word(socket, segments_are_empty(visit));
    CHECK(!region_allows(owner->shared, key, 1, 65536, SEGMENT_BYTES, FI_REMOTE_WRITE));
    visit_end(visit);
    visit_release(visit);
    registry_release(owner);
}

static uint32_t meet_visitor(int socket)
{
    CHECK(registry_self());
    uint32_t key = region_add(1, 65536, SEGMENT_BYTES, FI_REMOTE_WRITE);
    CHECK(key);
    send_word(socket, registry_self_identity().start_time);
    send_word(socket, key);
    receive_word(socket);
    return key;
}

static void stop_visitor(int socket, pid_t target)
{
    uint32_t key = meet_visitor(socket);
    CHECK_EQUAL(kill(target, SIGSTOP), 0);
    double start = now_s();
    region_remove(key);
    CHECK(now_s() - start < PAIR_TIMEOUT_S);
    CHECK_EQUAL(kill(target, SIGCONT), 0);
    send_word(socket, 0);
    CHECK_EQUAL(receive_word(socket), 1);
}

static void stopped_inside_a_visit(void)
{
    run_pair(stop_visitor, visitor);
}

static void kill_visitor(int socket, pid_t target)
{
    uint32_t key = meet_visitor(socket);
    CHECK_EQUAL(kill(target, SIGKILL), 0);
    expect_target_killed();
    double start = now_s();
    region_remove(key);
    CHECK(now_s() - start < PAIR_TIMEOUT_S);
    /* Its place can be had again, and is no longer inside a visit. */
    struct shared_visit *first = visit_claim(registry_self()),
                        *second = visit_claim(registry_self());
    CHECK(first && second && first != second);
    CHECK(!(first->sequence & 1) && !(second->sequence & 1));
}

static void killed_inside_a_visit(void)
{
    run_pair(kill_visitor, visitor);
}

static void *remove_region(void *key)
{
    region_remove((uint32_t)(uintptr_t)key);
    return NULL;
}

static void outwait_visitor(int socket, pid_t target)
{
    uint32_t key = meet_visitor(socket);
    pthread_t remover;
    struct timespec deadline;
    (void)target;
    CHECK_EQUAL(pthread_create(&remover, NULL, remove_region, (void *)(uintptr_t)key), 0);
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_nsec += 50000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    CHECK(pthread_timedjoin_np(remover, NULL, &deadline) !=
          0); /* it waits for a visitor that runs */
    send_word(socket, 0);
    CHECK_EQUAL(receive_word(socket), 0);
    CHECK_EQUAL(pthread_join(remover, NULL), 0);
}

static void running_inside_a_visit(void)
{
    run_pair(outwait_visitor, visitor);
}

static int compare_keys(const void *a, const void *b)
{
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

enum { KEYS = 200000 };

static void keys_are_not_reused(void)
{
    static uint32_t keys[KEYS];
    CHECK(registry_self());
    for (int i = 0; i < KEYS; i++) {
        keys[i] = region_add(1, 65536, SEGMENT_BYTES, FI_REMOTE_WRITE);
        CHECK(keys[i] != 0);
        if (i >= 100)
            region_remove(keys[i - 100]);
    }
    qsort(keys, KEYS, sizeof keys[0], compare_keys);
    for (int i = 1; i < KEYS; i++)
        CHECK(keys[i] != keys[i - 1]);
    /* The table is full at some point, and says so. */
    int more = 0;
    while (region_add(1, 65536, SEGMENT_BYTES, FI_REMOTE_WRITE))
        more++;
    CHECK_EQUAL(more, REGION_CAPACITY - 100);
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {
        {"stopped_inside_a_visit", stopped_inside_a_visit},
        {"killed_inside_a_visit", killed_inside_a_visit},
        {"running_inside_a_visit", running_inside_a_visit},
        {"keys_are_not_reused", keys_are_not_reused},
    };
    return run_case(cases, sizeof cases / sizeof cases[0], count, arguments);
}
