/* outage.c - a rail goes out and comes back: what is told of it; see engine.h.
 *
 * When, is decided in health.c.  All in the rail's progress thread; other threads see the
 * flag EKV_NIC_DOWN, the counter, the trace and the log. */
#include "clock.h"
#include "engine.h"

/* Failed probes before the rail gets a new endpoint. */
#define OUTAGE_PROBES 2u

static void rail_trace(struct ekv_engine *engine, const struct rail *rail, uint32_t event)
{
    ekv_trace_record record = {.event = event, .rail = rail->index};

    trace_write(&engine->trace, &record);
}

static void rail_goes_out(struct ekv_engine *engine, struct rail *rail, const char *reason)
{
    atomic_fetch_or(&rail->flags, EKV_NIC_DOWN);
    counter_add(&rail->counters.failures, 1);
    rail_trace(engine, rail, EKV_TRACE_RAIL_DOWN);
    log_write(&engine->log, LOG_WARNING, "rail %u (%s) is out, because %s", rail->index,
              rail->nic.name, reason);
}

void rail_note_failure(struct ekv_engine *engine, struct rail *rail, bool probe, const char *reason,
                       uint64_t now_ns)
{
    if (health_fail(&rail->health, probe, now_ns))
        rail_goes_out(engine, rail, reason);
    /* A queue pair in its error state never recovers by itself. */
    else if (probe && rail->health.failures > OUTAGE_PROBES && rail_can_reopen(rail))
        mender_ask(engine, rail, "it is out and does not come back by itself");
}

void rail_note_silence(struct ekv_engine *engine, struct rail *rail, const char *reason,
                       uint64_t now_ns)
{
    if (health_silent(&rail->health, now_ns))
        rail_goes_out(engine, rail, reason);
}

void rail_note_success(struct ekv_engine *engine, struct rail *rail, bool probe, uint64_t now_ns)
{
    uint64_t out_ns = rail->health.out_ns;

    if (!health_succeed(&rail->health, probe))
        return;
    atomic_fetch_and(&rail->flags, ~EKV_NIC_DOWN);
    rail_trace(engine, rail, EKV_TRACE_RAIL_UP);
    log_write(&engine->log, LOG_INFO, "rail %u (%s) is back after %.1f s", rail->index,
              rail->nic.name, (double)(now_ns - out_ns) / (double)NS_PER_SECOND);
}
