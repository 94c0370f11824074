/* control.c - exported calls about regions, and the commands they run in the progress
 * threads. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "engine.h"
#include "error.h"
#include "identifier.h"
#include "parallel.h"
#include "place.h"

/* Below this, starting threads takes longer than registering. */
#define CONTROL_PARALLEL_BYTES (UINT64_C(64) << 20)

static void control_nap(void)
{
    const struct timespec nap = {.tv_nsec = (long)(100 * NS_PER_US)};

    nanosleep(&nap, NULL);
}

/* Runs a command in every group, at the same time where there are several. */
static int control_call_all(struct ekv_engine *engine, const struct command *pattern,
                            ekv_error *error)
{
    struct command commands[GROUPS_MAX];
    int code = EKV_OK;

    for (uint32_t i = 0; i < engine->group_count; i++) {
        commands[i] = *pattern;
        group_send(&engine->groups[i], &commands[i]);
    }
    for (uint32_t i = 0; i < engine->group_count; i++) {
        int answer = group_await(&engine->groups[i], &commands[i]);

        if (answer < 0 && code == EKV_OK) {
            code = answer;
            if (error)
                struct_export(error, &commands[i].error, sizeof commands[i].error);
        }
    }
    return code;
}

/* The rails of a group on which a region is registered, and what each answered. */
struct registration {
    struct ekv_engine *engine;
    struct region *region;
    uint32_t rails[RAILS_MAX];
    uint32_t count;
    bool rotate; /* the old keys go once the new ones are there */
    int codes[RAILS_MAX];
    ekv_error errors[RAILS_MAX];
};

static void register_on(void *context, uint32_t i)
{
    struct registration *all = context;
    struct rail *rail = &all->engine->rails[all->rails[i]];
    struct region_rail old = all->region->rails[rail->index];

    if (!rail->endpoint)
        all->codes[i] =
            error_set(&all->errors[i], EKV_ECLOSED, 0, "fi_mr_reg", "the engine is closing");
    else
        all->codes[i] = region_register(all->region, rail, &all->engine->memory,
                                        all->engine->region_chunk_bytes, &all->errors[i]);
    if (all->codes[i] == EKV_OK && all->rotate)
        region_rail_close(&old);
}

/* A device pins and maps a large region for seconds, each by itself: so all do it at
 * the same time, in threads of their own while this one waits. */
static void group_register(struct group *group, struct command *command, bool rotate)
{
    struct region *region = command->region;
    struct registration *all = calloc(1, sizeof *all);

    if (!all) {
        command->code = error_set(&command->error, EKV_ENOMEM, 0, "fi_mr_reg", "out of memory");
        return;
    }
    all->engine = group->engine;
    all->region = region;
    all->rotate = rotate;
    for (uint32_t r = group->rail_first; r < group->rail_first + group->rail_count; r++)
        if (region->reach.rails >> r & 1) {
            all->errors[all->count].struct_size = sizeof all->errors[0];
            all->rails[all->count++] = r;
        }
    if (region->end - region->begin >= CONTROL_PARALLEL_BYTES)
        parallel_each(all->count, register_on, all);
    else
        for (uint32_t i = 0; i < all->count; i++)
            register_on(all, i);
    command->code = EKV_OK;
    for (uint32_t i = 0; i < all->count && command->code == EKV_OK; i++) {
        command->code = all->codes[i];
        command->error = all->errors[i];
    }
    free(all);
}

static void command_register(struct group *group, struct command *command)
{
    group_register(group, command, false);
}

static void command_deregister(struct group *group, struct command *command)
{
    command->code = EKV_OK;
    for (uint32_t i = 0; i < group->rail_count; i++)
        region_rail_close(&command->region->rails[group->rail_first + i]);
}

/* New keys first, so that a refusal leaves the old ones as they were. */
static void command_rotate(struct group *group, struct command *command)
{
    group_register(group, command, true);
}

/* Whose GPU memory it is, by the driver; fills in its device and place. */
static int memory_check_device(struct ekv_engine *engine, ekv_memory *memory, ekv_error *error)
{
    const struct rail *rail = &engine->rails[0];
    char pci[sizeof memory->place] = "";
    int device = cuda_device_of(&engine->cuda, memory->address, memory->length_bytes);
    int code;

    if (!cuda_is_there(&engine->cuda))
        return error_set(error, EKV_EREGISTER, 0, "ekv_region_add",
                         "found GPU memory and no CUDA driver. Expected libcuda.so.1, or the "
                         "path of one (cuda_library)");
    if (device < 0 || (memory->device >= 0 && memory->device != device))
        return error_set(error, EKV_EREGISTER, 0, "ekv_region_add",
                         "%llu bytes at 0x%llx are not memory of GPU %d, says its driver (%d). "
                         "Register one allocation at a time",
                         (unsigned long long)memory->length_bytes,
                         (unsigned long long)memory->address, memory->device, device);
    if (!(rail->nic.flags & EKV_NIC_DEVICE_MEMORY) && !rail->stage)
        return error_set(error, EKV_EREGISTER, 0, "ekv_region_add",
                         "provider %s offers no access to GPU memory (FI_HMEM). Install an EFA "
                         "software that has it, 1.18 or later with its own libfabric",
                         rail->nic.provider);
    memory->device = device;
    code = cuda_use(&engine->cuda, device, pci, sizeof pci, error);
    if (code == EKV_OK && !memory->place[0])
        memcpy(memory->place, pci, sizeof memory->place);
    return code;
}

static int memory_check(struct ekv_engine *engine, ekv_memory *memory, ekv_error *error)
{
    uint64_t end;

    /* Taken for host memory it would crash whoever copies it. */
    if (memory->kind == EKV_MEMORY_HOST &&
        cuda_device_of(&engine->cuda, memory->address, memory->length_bytes) >= 0) {
        memory->kind = EKV_MEMORY_CUDA;
        memory->device = -1;
    }
    if (memory->kind > EKV_MEMORY_CUDA)
        return error_set(error, EKV_EINVAL, 0, "ekv_region_add", "memory kind %u is unknown",
                         memory->kind);
    if (memory->length_bytes == 0 || memory->address == 0 ||
        __builtin_add_overflow(memory->address, memory->length_bytes, &end))
        return error_set(
            error, EKV_EINVAL, 0, "ekv_region_add", "%llu bytes at 0x%llx is not a range of memory",
            (unsigned long long)memory->length_bytes, (unsigned long long)memory->address);
    return memory->kind == EKV_MEMORY_CUDA ? memory_check_device(engine, memory, error) : EKV_OK;
}

/* Which rails serve a region: of GPU memory by the GPU's place on the PCI bus, of host
 * memory by its NUMA node. */
static void region_place(const struct ekv_engine *engine, const ekv_memory *memory,
                         struct region *region)
{
    bool is_device = memory->kind == EKV_MEMORY_CUDA || memory->place[0];
    struct place places[TOPOLOGY_RAILS_MAX];
    struct place place = {.numa_node = -1};

    if (memory->place[0])
        place_of_pci(engine->sysfs_root, memory->place, &place);
    else if (!is_device)
        place.numa_node = place_node_of_memory(region->begin, region->end - region->begin);
    for (uint32_t i = 0; i < engine->rail_count; i++)
        places[i] = engine->rails[i].place;
    topology_plan(places, engine->rail_count, &place, is_device, engine->register_everywhere,
                  &region->reach);
    region->staged = memory->kind == EKV_MEMORY_CUDA && engine->rails[0].stage;
    if (region->staged) {
        region->reach.rails = 0;
        region->reach.count = 0;
    }
}

static int region_add(struct ekv_engine *engine, const ekv_memory *memory, ekv_region_id *id,
                      ekv_error *error)
{
    struct command command = {.run = command_register};
    struct region *region = memory_take(&engine->memory, memory);
    int code;

    if (!region)
        return error_set(error, EKV_EBUSY, 0, "ekv_region_add",
                         "all %u regions are in use (max_regions), or out of memory",
                         engine->memory.capacity);
    command.region = region;
    region_place(engine, memory, region);
    code = control_call_all(engine, &command, error);
    if (code == EKV_OK && !region->reach.bound)
        region_place(engine, memory, region); /* now its pages are there */
    *id = identifier_make(IDENTIFIER_REGION, engine->tag, region->generation,
                          memory_index(&engine->memory, region));
    if (code == EKV_OK)
        region->near_key = gate_admit(&engine->gate, memory_index(&engine->memory, region), memory);
    if (code == EKV_OK && engine->rails[0].stage)
        region->stage_key = stage_key_draw(memory_index(&engine->memory, region));
    if (code == EKV_OK && !memory_publish(&engine->memory, region))
        code = error_set(error, EKV_ENOMEM, 0, "ekv_region_add", "out of memory");
    if (code != EKV_OK) {
        gate_shut(&engine->gate, region->near_key, true, 0);
        command.run = command_deregister;
        control_call_all(engine, &command, NULL);
        memory_give(&engine->memory, region);
        *id = 0;
    }
    return code;
}

int ekv_region_add(struct ekv_engine *engine, const ekv_memory *given, ekv_region_id *region,
                   ekv_error *error)
{
    ekv_memory memory;
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    if (!region || struct_import(&memory, sizeof memory, given) != EKV_OK)
        code = error_set(error, EKV_EINVAL, 0, "ekv_region_add", "an argument is missing");
    memory.place[sizeof memory.place - 1] = '\0';
    if (code == EKV_OK)
        code = memory_check(engine, &memory, error);
    if (code == EKV_OK)
        code = region_add(engine, &memory, region, error);
    engine_leave(engine);
    return code;
}

/* With the memory lock held for reading. */
static size_t region_export_keys(const struct ekv_engine *engine, const struct region *region,
                                 ekv_region_key *keys, size_t capacity)
{
    size_t stride = capacity ? struct_stride(keys) : 0;
    size_t found = 0;

    /* The nearest first: peers pair their own nearest with them. */
    for (uint32_t seat = 0; seat < engine->rail_count; seat++) {
        uint32_t rail = reach_rail_at(&region->reach, engine->rail_count, seat);
        const struct region_rail *side = &region->rails[rail];

        for (uint32_t i = 0; i < side->count; i++, found++) {
            uint64_t offset = (uint64_t)i * side->chunk_bytes;
            uint64_t length = region->end - region->begin - offset;
            ekv_region_key key = {.rail = rail, .key = side->chunks[i].key};
            void *to = (char *)keys + found * stride;

            if (found >= capacity)
                continue;
            key.offset_bytes = offset;
            key.length_bytes = length < side->chunk_bytes ? length : side->chunk_bytes;
            key.base = engine->rails[rail].nic.flags & EKV_NIC_VIRTUAL_ADDRESS
                           ? region->begin + offset
                           : 0;
            memcpy(to, &(uint32_t){(uint32_t)stride}, sizeof(uint32_t));
            struct_export(to, &key, sizeof key);
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        ekv_region_key key = {.rail = i ? EKV_KEY_STAGED : EKV_KEY_NEAR,
                              .key = i ? region->stage_key : region->near_key,
                              .length_bytes = region->end - region->begin};
        void *to = (char *)keys + found * stride;

        if (key.key == 0 || found++ >= capacity)
            continue;
        memcpy(to, &(uint32_t){(uint32_t)stride}, sizeof(uint32_t));
        struct_export(to, &key, sizeof key);
    }
    return found;
}

int ekv_region_keys(struct ekv_engine *engine, ekv_region_id id, ekv_region_key *keys,
                    size_t capacity, size_t *count)
{
    struct region *region;
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    if (!count || (capacity && !keys)) {
        engine_leave(engine);
        return EKV_EINVAL;
    }
    pthread_rwlock_rdlock(&engine->memory.lock);
    region = memory_find(&engine->memory, engine->tag, id);
    if (region)
        *count = region_export_keys(engine, region, keys, capacity);
    else
        code = EKV_ESTALE;
    pthread_rwlock_unlock(&engine->memory.lock);
    engine_leave(engine);
    return code;
}

static int region_stale(ekv_region_id id, const char *where, ekv_error *error)
{
    return error_set(error, EKV_ESTALE, 0, where, "region 0x%llx is not (or no longer) registered",
                     (unsigned long long)id);
}

/* Takes the region away from everybody else once nothing uses it. */
static int region_claim(struct ekv_engine *engine, ekv_region_id id, uint64_t until_ns,
                        struct region **claimed)
{
    for (;;) {
        struct region *region;
        int code = EKV_EBUSY;

        pthread_rwlock_wrlock(&engine->memory.lock);
        region = memory_find(&engine->memory, engine->tag, id);
        if (!region) {
            code = EKV_ESTALE;
        } else if (atomic_load(&region->jobs) == 0 && atomic_load(&region->operations) == 0 &&
                   !atomic_load(&region->paused)) {
            region->state = REGION_HIDDEN;
            *claimed = region;
            code = EKV_OK;
        }
        pthread_rwlock_unlock(&engine->memory.lock);
        if (code != EKV_EBUSY || clock_now_ns() >= until_ns || atomic_load(&engine->closing))
            return code;
        control_nap();
    }
}

static void region_unclaim(struct ekv_engine *engine, struct region *region)
{
    pthread_rwlock_wrlock(&engine->memory.lock);
    region->state = REGION_CLOSING;
    pthread_rwlock_unlock(&engine->memory.lock);
}

static int region_remove(struct ekv_engine *engine, ekv_region_id id, double timeout_s,
                         ekv_error *error)
{
    struct command command = {.run = command_deregister};
    uint64_t until_ns = clock_after_ns(timeout_s);
    struct region *region;
    int code;

    pthread_rwlock_wrlock(&engine->memory.lock);
    region = memory_find(&engine->memory, engine->tag, id);
    if (region)
        memory_retire(&engine->memory, region);
    pthread_rwlock_unlock(&engine->memory.lock);
    code = region ? region_claim(engine, id, until_ns, &region) : EKV_ESTALE;
    if (code == EKV_ESTALE)
        return region_stale(id, "ekv_region_remove", error);
    if (code != EKV_OK)
        return error_set(error, code, 0, "ekv_region_remove",
                         "jobs are still using region 0x%llx; it takes no new ones, call again",
                         (unsigned long long)id);
    if (!gate_shut(&engine->gate, region->near_key, true, until_ns)) {
        region_unclaim(engine, region);
        return error_set(error, EKV_EBUSY, 0, "ekv_region_remove",
                         "a process of this host may still be copying in region 0x%llx; it "
                         "takes no new copies, call again",
                         (unsigned long long)id);
    }
    command.region = region;
    control_call_all(engine, &command, NULL);
    memory_give(&engine->memory, region);
    return EKV_OK;
}

int ekv_region_remove(struct ekv_engine *engine, ekv_region_id region, double timeout_s,
                      ekv_error *error)
{
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    code = region_remove(engine, region, timeout_s, error);
    engine_leave(engine);
    return code;
}

static void control_wake_all(struct ekv_engine *engine)
{
    for (uint32_t i = 0; i < engine->group_count; i++)
        group_wake(&engine->groups[i]);
}

/* After gate_shut, and while nothing is copied by our own threads. */
static void region_rekey(struct ekv_engine *engine, struct region *region, bool fresh)
{
    pthread_rwlock_wrlock(&engine->memory.lock);
    if (fresh && region->stage_key != 0)
        region->stage_key = stage_key_draw(memory_index(&engine->memory, region));
    if (fresh)
        region->near_key = gate_renew(&engine->gate, region->near_key);
    else
        gate_reopen(&engine->gate, region->near_key);
    pthread_rwlock_unlock(&engine->memory.lock);
}

static int region_rotate(struct ekv_engine *engine, ekv_region_id id, double timeout_s,
                         ekv_error *error)
{
    struct command command = {.run = command_rotate};
    uint64_t until_ns = clock_after_ns(timeout_s);
    struct region *region;
    bool was_paused = false;
    bool quiet;
    int code = EKV_OK;

    pthread_rwlock_rdlock(&engine->memory.lock);
    region = memory_find(&engine->memory, engine->tag, id);
    if (region && region->state == REGION_READY)
        was_paused = atomic_exchange(&region->paused, true);
    else
        region = NULL;
    pthread_rwlock_unlock(&engine->memory.lock);
    if (!region)
        return region_stale(id, "ekv_region_rotate", error);
    if (was_paused)
        return error_set(error, EKV_EBUSY, 0, "ekv_region_rotate",
                         "the region's keys are already being replaced");
    /* Seen once is enough: what is counted afterwards finds the pause and goes. */
    while (!(quiet = atomic_load(&region->operations) == 0) && clock_now_ns() < until_ns &&
           !atomic_load(&engine->closing))
        control_nap();
    if (!quiet) {
        code = error_set(error, EKV_EBUSY, 0, "ekv_region_rotate",
                         "operations of this engine are still in flight on region 0x%llx",
                         (unsigned long long)id);
    } else if (!gate_shut(&engine->gate, region->near_key, false, until_ns)) {
        gate_reopen(&engine->gate, region->near_key);
        code = error_set(error, EKV_EBUSY, 0, "ekv_region_rotate",
                         "a process of this host may still be copying in region 0x%llx",
                         (unsigned long long)id);
    } else {
        command.region = region;
        code = control_call_all(engine, &command, error);
        region_rekey(engine, region, code == EKV_OK);
    }
    atomic_store(&region->paused, false);
    control_wake_all(engine);
    return code;
}

int ekv_region_rotate(struct ekv_engine *engine, ekv_region_id region, double timeout_s,
                      ekv_error *error)
{
    int code = engine_enter(engine, error);

    if (code != EKV_OK)
        return code;
    code = region_rotate(engine, region, timeout_s, error);
    engine_leave(engine);
    return code;
}
