/* health.c - see health.h. */
#include "health.h"

#include "clock.h"

#define HEALTH_REST_FIRST_NS (250 * NS_PER_MS)
#define HEALTH_REST_SILENT_NS (8 * NS_PER_SECOND)
#define HEALTH_REST_LONGEST_NS (64 * NS_PER_SECOND)

static bool health_rest(struct health *health, uint64_t rest_ns, uint64_t now_ns)
{
    bool goes = !health->out;

    if (goes) {
        health->out = true;
        health->out_ns = now_ns;
        health->failures = 0;
    }
    for (uint32_t i = 0; i < health->failures && rest_ns < HEALTH_REST_LONGEST_NS; i++)
        rest_ns *= 2;
    if (rest_ns > HEALTH_REST_LONGEST_NS)
        rest_ns = HEALTH_REST_LONGEST_NS;
    health->failures++;
    health->retry_ns = now_ns + rest_ns;
    return goes;
}

bool health_fail(struct health *health, bool probe, uint64_t now_ns)
{
    if (health->out && !probe)
        return false;
    return health_rest(health, HEALTH_REST_FIRST_NS, now_ns);
}

bool health_silent(struct health *health, uint64_t now_ns)
{
    return health_rest(health, HEALTH_REST_SILENT_NS, now_ns);
}

bool health_succeed(struct health *health, bool probe)
{
    if (!health->out || !probe)
        return false;
    *health = (struct health){0};
    return true;
}

bool health_allows(const struct health *health, uint32_t in_flight, uint64_t now_ns)
{
    return !health->out || (in_flight == 0 && now_ns >= health->retry_ns);
}
