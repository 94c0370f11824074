/* clock.h - monotonic and wall-clock time in nanoseconds.  Stateless. */
#ifndef EKV_CLOCK_H
#define EKV_CLOCK_H

#include <stdint.h>
#include <time.h>

#define NS_PER_SECOND UINT64_C(1000000000)
#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_US UINT64_C(1000)

static inline uint64_t clock_read_ns(clockid_t clock)
{
    struct timespec now;

    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_SECOND + (uint64_t)now.tv_nsec;
}

static inline uint64_t clock_now_ns(void)
{
    return clock_read_ns(CLOCK_MONOTONIC);
}

/* A moment seconds from now; negative, NaN and absurdly long waits are clamped. */
static inline uint64_t clock_after_ns(double seconds)
{
    const double longest_s = 1e9;

    if (!(seconds > 0))
        seconds = 0;
    if (seconds > longest_s)
        seconds = longest_s;
    return clock_now_ns() + (uint64_t)(seconds * 1e9);
}

static inline struct timespec clock_timespec(uint64_t moment_ns)
{
    struct timespec at;

    at.tv_sec = (time_t)(moment_ns / NS_PER_SECOND);
    at.tv_nsec = (long)(moment_ns % NS_PER_SECOND);
    return at;
}

#endif
