/* check.h - the whole test framework: a failed check names its place and ends the
 * program. */
#ifndef EKV_TEST_CHECK_H
#define EKV_TEST_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: failed: %s\n", __FILE__, __LINE__, __func__, #condition);  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_INT(got, wanted)                                                                     \
    do {                                                                                           \
        long long got_ = (long long)(got);                                                         \
        long long wanted_ = (long long)(wanted);                                                   \
        if (got_ != wanted_) {                                                                     \
            fprintf(stderr, "%s:%d: %s: %s is %lld, not %lld\n", __FILE__, __LINE__, __func__,     \
                    #got, got_, wanted_);                                                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Success of a call that fills an ekv_error. */
#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        int code_ = (call);                                                                        \
        if (code_ < 0) {                                                                           \
            fprintf(stderr, "%s:%d: %s: %s gave %s: %s: %s\n", __FILE__, __LINE__, __func__,       \
                    #call, ekv_code_name(code_), error.where, error.text);                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* CHECK_ONLY=name runs the tests whose names contain it. */
#define RUN(test)                                                                                  \
    do {                                                                                           \
        if (getenv("CHECK_ONLY") && !strstr(#test, getenv("CHECK_ONLY")))                          \
            break;                                                                                 \
        printf("%s\n", #test);                                                                     \
        fflush(stdout);                                                                            \
        test();                                                                                    \
    } while (0)

/* A generator that is the same everywhere; the seed is printed so that a failure can
 * be repeated with CHECK_SEED. */
static inline uint64_t check_random(uint64_t *state)
{
    uint64_t x = *state;

    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *state = x;
    return x * UINT64_C(0x2545f4914f6cdd1d);
}

static inline uint64_t check_seed(void)
{
    const char *given = getenv("CHECK_SEED");
    uint64_t seed =
        given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL) << 20 ^ (uint64_t)getpid();

    if (seed == 0)
        seed = 1;
    printf("CHECK_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

#endif
