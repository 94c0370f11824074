/* health.h - PURE: whether a rail is taken out, and when it is tried again.
 *
 * A rail goes out when its own device reports that it is at fault, or when it has fallen
 * silent.  While it is out one operation at a time probes it, after rests that double;
 * the first probe that succeeds brings it back.  Belongs to the rail's progress thread. */
#ifndef EKV_HEALTH_H
#define EKV_HEALTH_H

#include <stdbool.h>
#include <stdint.h>

struct health {
    bool out;
    uint32_t failures; /* in a row: what took it out, and probes */
    uint64_t out_ns;   /* since when */
    uint64_t retry_ns; /* not probed before */
};

/* The device failed.  probe: by an operation that was begun while the rail was out; what
 * was begun before says nothing new.  True: the rail goes out now. */
bool health_fail(struct health *health, bool probe, uint64_t now_ns);
/* It fell silent, which costs seconds each time it is found out: it rests longer. */
bool health_silent(struct health *health, uint64_t now_ns);
/* An operation succeeded.  True: the rail is back. */
bool health_succeed(struct health *health, bool probe);
/* Whether something may be begun with in_flight operations on their way. */
bool health_allows(const struct health *health, uint32_t in_flight, uint64_t now_ns);

#endif
