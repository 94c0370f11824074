#include "region_table.h"

#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

enum { WAIT_US = 20, TURNS_BEFORE_LOOKING = 10 };

static pthread_mutex_t table_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t keys_tried; /* by this process; keys wrap after 2^32 and are refused from then on */
static uint32_t first_key;

uint32_t region_add(uint32_t domain, uint64_t address, uint64_t length, uint64_t access)
{
    struct shared_process *owner = registry_self();
    uint32_t key = 0;
    if (!owner)
        return 0;
    pthread_mutex_lock(&table_mutex);
    /* A random start, so that a key sent to the wrong peer does not happen to be valid there. */
    if (keys_tried == 0 && getrandom(&first_key, sizeof first_key, 0) != sizeof first_key)
        first_key = registry_self_identity().pid * 2654435761u;
    for (int tries = 0; tries < REGION_CAPACITY && keys_tried < UINT32_MAX; tries++) {
        uint32_t candidate = first_key + (uint32_t)keys_tried++;
        struct shared_region *region = &owner->regions[candidate % REGION_CAPACITY];
        if (candidate == 0 || atomic_load(&region->key) != 0)
            continue;
        atomic_store_explicit(&region->domain, domain, memory_order_relaxed);
        atomic_store_explicit(&region->address, address, memory_order_relaxed);
        atomic_store_explicit(&region->length, length, memory_order_relaxed);
        atomic_store_explicit(&region->access, access, memory_order_relaxed);
        atomic_store(&region->key, candidate);
        key = candidate;
        break;
    }
    pthread_mutex_unlock(&table_mutex);
    return key;
}

bool region_allows(const struct shared_process *owner, uint32_t key, uint32_t domain,
                   uint64_t address, uint64_t length, uint64_t access)
{
    const struct shared_region *region = &owner->regions[key % REGION_CAPACITY];
    if (key == 0 || atomic_load(&region->key) != key)
        return false;
    uint64_t start = atomic_load_explicit(&region->address, memory_order_relaxed);
    uint64_t size = atomic_load_explicit(&region->length, memory_order_relaxed);
    uint64_t granted = atomic_load_explicit(&region->access, memory_order_relaxed);
    uint32_t of_domain = atomic_load_explicit(&region->domain, memory_order_relaxed);
    /* Keys are never reused, so the same key again means that the fields belonged to it. */
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&region->key, memory_order_relaxed) != key)
        return false;
    return of_domain == domain && (granted & access) == access && address >= start &&
           address - start <= size && length <= size - (address - start);
}

static bool try_claim(struct shared_visit *visit, struct process_identity identity)
{
    uint32_t holder = atomic_load(&visit->pid);
    if (holder != 0) {
        struct process_identity other = {holder, atomic_load(&visit->start_time)};
        /* A start time of 0 belongs to a claim that is just being made. */
        if (other.start_time == 0 || process_is_alive(other))
            return false;
    }
    if (!atomic_compare_exchange_strong(&visit->pid, &holder, identity.pid))
        return false;
    atomic_store(&visit->start_time, identity.start_time);
    if (atomic_load(&visit->sequence) & 1) /* the last holder was killed inside a visit */
        atomic_fetch_add(&visit->sequence, 1);
    return true;
}

struct shared_visit *visit_claim(struct shared_process *owner)
{
    struct process_identity identity = registry_self_identity();
    uint32_t count = atomic_load(&owner->visit_count);
    for (int pass = 0; pass < 2; pass++) {
        /* Places never used come before those whose holder may be dead: looking that up is slow. */
        for (uint32_t i = 0; i < VISIT_CAPACITY; i++) {
            struct shared_visit *visit = &owner->visits[i];
            if (pass == 0 && atomic_load(&visit->pid) != 0)
                continue;
            if (!try_claim(visit, identity))
                continue;
            while (count < i + 1 &&
                   !atomic_compare_exchange_weak(&owner->visit_count, &count, i + 1))
                ;
            return visit;
        }
    }
    return NULL;
}

void visit_release(struct shared_visit *visit)
{
    atomic_store(&visit->start_time, 0);
    atomic_store(&visit->pid, 0);
}

void visit_begin(struct shared_visit *visit)
{
    atomic_store_explicit(&visit->thread, process_thread_self(), memory_order_relaxed);
    atomic_fetch_add(&visit->sequence, 1);
}

void visit_end(struct shared_visit *visit)
{
    atomic_fetch_add(&visit->sequence, 1);
}

/* A stopped visitor is not inside a system call that copies: a stop takes effect on the way out of
 * the kernel. Once its segments are empty, the call it may be about to make moves nothing, and
 * segments filled in later are followed by a look at the keys. */
static bool revoke_stopped(struct shared_visit *visit, uint32_t pid, uint32_t thread)
{
    if (!process_thread_is_stopped(pid, thread))
        return false;
    for (int i = 0; i < VISIT_SEGMENTS; i++)
        ((volatile struct iovec *)visit->remote)[i].iov_len = 0;
    atomic_thread_fence(memory_order_seq_cst);
    return process_thread_is_stopped(pid, thread);
}

static void wait_for_visitor(struct shared_visit *visit)
{
    uint64_t sequence = atomic_load(&visit->sequence);
    uint32_t own_pid = registry_self_identity().pid;
    if (!(sequence & 1))
        return;
    for (int turns = 1; atomic_load(&visit->sequence) == sequence; turns++) {
        /* Sleeping, since a yield on a busy machine can cost a tenth of a second. */
        usleep(WAIT_US);
        if (turns % TURNS_BEFORE_LOOKING != 0)
            continue;
        struct process_identity visitor = {atomic_load(&visit->pid),
                                           atomic_load(&visit->start_time)};
        if (visitor.pid == 0 || (visitor.start_time != 0 && !process_is_alive(visitor)))
            return;
        if (visitor.pid != own_pid &&
            revoke_stopped(visit, visitor.pid, atomic_load(&visit->thread)))
            return;
    }
}

void region_remove(uint32_t key)
{
    struct shared_process *owner = registry_self();
    if (!owner)
        return;
    atomic_store(&owner->regions[key % REGION_CAPACITY].key, 0);
    uint32_t count = atomic_load(&owner->visit_count);
    for (uint32_t i = 0; i < count; i++)
        wait_for_visitor(&owner->visits[i]);
}
