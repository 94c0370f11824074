#include "nic.h"

enum { TICKS_PER_NS = 64 };

#define NEVER_NS UINT64_MAX

static void plan_fault(struct shared_nic *nic, enum nic_fault_kind kind, uint64_t from_ns,
                       double recover_after_ms)
{
    uint64_t until = recover_after_ms < 0 ? NEVER_NS : from_ns + (uint64_t)(recover_after_ms * 1e6);
    atomic_store(&nic->fault_kind, kind);
    atomic_store(&nic->fault_until_ns, until);
    atomic_store(&nic->fault_from_ns, from_ns);
}

void nic_open(struct shared_nic *nic, const struct settings *settings, int index)
{
    const struct nic_faults *faults = &settings->faults[index];
    double rate = settings->rate_gbps;
    if (rate == 0 && faults->slow < 1) /* a slow NIC needs a rate to be slower than */
        rate = settings->instance->speed_gbps;
    rate *= faults->slow;
    atomic_store(&nic->ticks_per_kibibyte,
                 rate > 0 ? (uint64_t)(1024 * 8 / rate * TICKS_PER_NS + 0.5) : 0);
    atomic_store(&nic->ticks_per_operation,
                 settings->operation_rate > 0
                     ? (uint64_t)(1e9 / settings->operation_rate * TICKS_PER_NS + 0.5)
                     : 0);
    if (atomic_fetch_add(&nic->open_count, 1) > 0)
        return;
    atomic_store(&nic->fault_from_ns, NEVER_NS);
    uint64_t now = clock_ns();
    if (faults->die_after_ms >= 0)
        plan_fault(nic, NIC_DEAD, now + (uint64_t)(faults->die_after_ms * 1e6),
                   faults->recover_after_ms);
    else if (faults->stall_after_ms >= 0)
        plan_fault(nic, NIC_STALLED, now + (uint64_t)(faults->stall_after_ms * 1e6),
                   faults->recover_after_ms);
    else if (faults->vanish_after_ms >= 0)
        plan_fault(nic, NIC_VANISHED, now + (uint64_t)(faults->vanish_after_ms * 1e6),
                   faults->recover_after_ms);
}

enum nic_fault_kind nic_health(const struct shared_nic *nic)
{
    uint64_t from = atomic_load_explicit(&nic->fault_from_ns, memory_order_acquire);
    /* A NIC that nobody has opened yet has no plan and reads as 0. */
    if (from == NEVER_NS || from == 0)
        return NIC_HEALTHY;
    uint64_t now = clock_ns();
    if (now < from || now >= atomic_load(&nic->fault_until_ns))
        return NIC_HEALTHY;
    return (enum nic_fault_kind)atomic_load(&nic->fault_kind);
}

void nic_count_operation(struct shared_nic *nic, const struct nic_faults *faults, uint64_t *count)
{
    *count = atomic_fetch_add(&nic->operations, 1) + 1;
    if (*count == faults->die_at_op)
        plan_fault(nic, NIC_DEAD, clock_ns(), faults->recover_after_ms);
    if (*count == faults->stall_at_op)
        plan_fault(nic, NIC_STALLED, clock_ns(), faults->recover_after_ms);
    if (*count == faults->vanish_at_op)
        plan_fault(nic, NIC_VANISHED, clock_ns(), faults->recover_after_ms);
}

bool nic_is_paced(const struct shared_nic *initiator, const struct shared_nic *target,
                  double latency_us)
{
    return latency_us > 0 ||
           atomic_load_explicit(&initiator->ticks_per_kibibyte, memory_order_relaxed) ||
           atomic_load_explicit(&initiator->ticks_per_operation, memory_order_relaxed) ||
           (target && atomic_load_explicit(&target->ticks_per_kibibyte, memory_order_relaxed));
}

/* A clock says when the resource is next free, in ticks; booking moves it on. */
static uint64_t book(_Atomic uint64_t *clock, uint64_t now, uint64_t duration)
{
    if (duration == 0)
        return now;
    uint64_t free_at = atomic_load(clock), end;
    do {
        end = (free_at > now ? free_at : now) + duration;
    } while (!atomic_compare_exchange_weak(clock, &free_at, end));
    return end;
}

static uint64_t line_time(const struct shared_nic *nic, uint64_t length)
{
    return length * atomic_load_explicit(&nic->ticks_per_kibibyte, memory_order_relaxed) / 1024;
}

uint64_t nic_book(struct shared_nic *initiator, struct shared_nic *target, bool is_read,
                  uint64_t length, double latency_us, uint64_t now_ns)
{
    uint64_t now = now_ns * TICKS_PER_NS;
    struct shared_nic *sender = is_read ? target : initiator,
                      *receiver = is_read ? initiator : target;
    uint64_t end =
        book(&initiator->operation_free_at, now,
             atomic_load_explicit(&initiator->ticks_per_operation, memory_order_relaxed));
    uint64_t ends[2] = {now, now};
    if (sender)
        ends[0] = book(&sender->send_free_at, now, line_time(sender, length));
    if (receiver)
        ends[1] = book(&receiver->receive_free_at, now, line_time(receiver, length));
    for (int i = 0; i < 2; i++)
        if (ends[i] > end)
            end = ends[i];
    return end / TICKS_PER_NS + (uint64_t)(latency_us * 1000);
}
