/* near.c - the short way between two engines of one process: memory copies and direct
 * notices.
 *
 * Engines are found by incarnation in a list of those that are open; a forked child
 * inherits its parent's list, whose engines have no threads there.  The target's
 * region table is read-locked for the length of one copy, so that a region being
 * removed is either refused or waited for, never written after it went away. */
#include <assert.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

static pthread_rwlock_t registry_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct ekv_engine *registry_first; /* empty when no engine is open */

void registry_add(struct ekv_engine *engine)
{
    pthread_rwlock_wrlock(&registry_lock);
    engine->registry_next = registry_first;
    registry_first = engine;
    pthread_rwlock_unlock(&registry_lock);
}

void registry_remove(struct ekv_engine *engine)
{
    pthread_rwlock_wrlock(&registry_lock);
    for (struct ekv_engine **at = &registry_first; *at; at = &(*at)->registry_next)
        if (*at == engine) {
            *at = engine->registry_next;
            break;
        }
    pthread_rwlock_unlock(&registry_lock);
}

static void command_nothing(struct group *group, struct command *command)
{
    (void)group;
    command->code = EKV_OK;
}

void registry_flush(void)
{
    pthread_rwlock_rdlock(&registry_lock);
    for (struct ekv_engine *other = registry_first; other; other = other->registry_next)
        for (uint32_t i = 0; i < other->group_count && other->process == getpid(); i++)
            for (int round = 0; round < 2; round++) {
                /* The second runs a round later, so a whole one has passed. */
                struct command command = {.run = command_nothing};

                group_call(&other->groups[i], &command);
            }
    pthread_rwlock_unlock(&registry_lock);
}

/* With the registry read-locked. */
static struct ekv_engine *registry_find(uint64_t incarnation)
{
    struct ekv_engine *engine = registry_first;

    while (engine && (engine->incarnation != incarnation || engine->process != getpid()))
        engine = engine->registry_next;
    return engine;
}

/* With the target's region table read-locked. device: of GPU memory among it, else as it
 * was. */
static int near_allowed(const struct memory *memory, const struct piece *piece, uint32_t access,
                        int *device)
{
    uint64_t address = piece->remote;
    uint64_t left = piece->length;

    while (left > 0) {
        const struct range *range = range_find(&memory->ranges, address, left);
        uint64_t held;

        if (!range)
            return EKV_EREMOTEREGION;
        if (!(memory->regions[range->slot].access & access))
            return EKV_EACCESS;
        if (memory->regions[range->slot].kind == EKV_MEMORY_CUDA)
            *device = memory->regions[range->slot].device;
        held = range->end - address;
        if (held > left)
            held = left;
        address += held;
        left -= held;
    }
    return EKV_OK;
}

/* The GPU of a job's own memory at an address, or -1; the job keeps its regions alive. */
static int near_device(const struct ekv_engine *engine, const struct job *job, uint64_t address)
{
    for (uint32_t i = 0; i < job->region_count; i++) {
        const struct region *region = &engine->memory.regions[job->regions[i]];

        if (region->kind == EKV_MEMORY_CUDA && address >= region->begin && address < region->end)
            return region->device;
    }
    return -1;
}

/* The two may overlap when an engine writes to itself; the driver's copies may not. */
static int near_move(struct cuda *cuda, int device, void *to, const void *from, size_t length)
{
    if (device < 0) {
        memmove(to, from, length);
        return EKV_OK;
    }
    return cuda_copy(cuda, device, to, from, length) == 0 ? EKV_OK : EKV_EPROVIDER;
}

int near_copy(struct ekv_engine *engine, const struct job *job, const struct piece *piece)
{
    void *local = (void *)(uintptr_t)piece->local;
    void *remote = (void *)(uintptr_t)piece->remote;
    int own = near_device(engine, job, piece->local);
    int device = own;
    struct ekv_engine *target;
    int code = EKV_EPEER;

    pthread_rwlock_rdlock(&registry_lock);
    target = registry_find(job->peer->incarnation);
    if (target) {
        pthread_rwlock_rdlock(&target->memory.lock);
        code = near_allowed(&target->memory, piece,
                            job->operation == EKV_WRITE ? EKV_ACCESS_REMOTE_WRITE
                                                        : EKV_ACCESS_REMOTE_READ,
                            &device);
        /* Whoever registered the device has brought it into use. */
        if (own >= 0)
            device = own;
        if (code == EKV_OK && job->operation == EKV_WRITE)
            code = near_move(own >= 0 ? &engine->cuda : &target->cuda, device, remote, local,
                             piece->length);
        else if (code == EKV_OK)
            code = near_move(own >= 0 ? &engine->cuda : &target->cuda, device, local, remote,
                             piece->length);
        pthread_rwlock_unlock(&target->memory.lock);
    }
    pthread_rwlock_unlock(&registry_lock);
    return code;
}

int near_notify(const struct job *job, const ekv_notice *notice)
{
    struct ekv_engine *target;
    int code = EKV_EPEER;

    pthread_rwlock_rdlock(&registry_lock);
    target = registry_find(job->peer->incarnation);
    if (target)
        code = notice_table_put(&target->notices, notice) ? EKV_OK : EKV_EBUSY;
    if (code == EKV_OK)
        engine_signal(target);
    pthread_rwlock_unlock(&registry_lock);
    return code;
}
