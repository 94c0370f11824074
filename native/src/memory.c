/* memory.c - see memory.h. */
#include "memory.h"

#include <assert.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"
#include "error.h"
#include "identifier.h"
#include "rail.h"

/* Below this no device limit explains a refusal, so cutting further is pointless. */
#define MEMORY_SMALLEST_CHUNK_BYTES (UINT64_C(1) << 30)

bool memory_open(struct memory *memory, uint32_t capacity, uint32_t rail_count, uint64_t seed)
{
    memset(memory, 0, sizeof *memory);
    memory->regions = calloc(capacity, sizeof *memory->regions);
    if (!memory->regions || pthread_rwlock_init(&memory->lock, NULL) != 0) {
        free(memory->regions);
        memory->regions = NULL;
        return false;
    }
    memory->capacity = capacity;
    memory->rail_count = rail_count;
    /* Keys differ from run to run, so that a peer that still holds the keys of an
     * earlier process at this address is refused. */
    atomic_init(&memory->next_key, (seed << 32) | 1);
    return true;
}

void memory_close(struct memory *memory)
{
    if (!memory->regions)
        return;
    for (uint32_t i = 0; i < memory->used; i++)
        free(memory->regions[i].rails);
    range_table_close(&memory->ranges);
    pthread_rwlock_destroy(&memory->lock);
    free(memory->regions);
    memory->regions = NULL;
}

uint32_t memory_index(const struct memory *memory, const struct region *region)
{
    return (uint32_t)(region - memory->regions);
}

static struct region *memory_free_slot(struct memory *memory)
{
    if (memory->used < memory->capacity)
        return &memory->regions[memory->used++];
    for (uint32_t i = 0; i < memory->capacity; i++)
        if (memory->regions[i].state == REGION_FREE)
            return &memory->regions[i];
    return NULL;
}

struct region *memory_take(struct memory *memory, const ekv_memory *description)
{
    struct region_rail *rails = calloc(memory->rail_count, sizeof *rails);
    struct region *region;

    if (!rails)
        return NULL;
    pthread_rwlock_wrlock(&memory->lock);
    region = memory_free_slot(memory);
    if (region) {
        region->generation = (region->generation + 1) & IDENTIFIER_GENERATION_MASK;
        region->state = REGION_HIDDEN;
        region->kind = description->kind;
        region->device = description->kind == EKV_MEMORY_CUDA ? description->device : -1;
        region->staged = false;
        region->access = description->access;
        region->begin = description->address;
        region->end = description->address + description->length_bytes;
        region->rails = rails;
        region->near_key = 0;
        region->stage_key = 0;
        atomic_store(&region->jobs, 0);
        atomic_store(&region->operations, 0);
        atomic_store(&region->paused, false);
    }
    pthread_rwlock_unlock(&memory->lock);
    if (!region)
        free(rails);
    return region;
}

bool memory_publish(struct memory *memory, struct region *region)
{
    bool done;

    pthread_rwlock_wrlock(&memory->lock);
    done = range_insert(&memory->ranges, region->begin, region->end, memory_index(memory, region));
    if (done)
        region->state = REGION_READY;
    pthread_rwlock_unlock(&memory->lock);
    return done;
}

void memory_retire(struct memory *memory, struct region *region)
{
    if (region->state == REGION_READY) {
        range_remove(&memory->ranges, memory_index(memory, region));
        region->state = REGION_CLOSING;
    }
}

void memory_give(struct memory *memory, struct region *region)
{
    pthread_rwlock_wrlock(&memory->lock);
    assert(region->state != REGION_READY);
    free(region->rails);
    region->rails = NULL;
    region->state = REGION_FREE;
    pthread_rwlock_unlock(&memory->lock);
}

struct region *memory_find(struct memory *memory, uint8_t tag, ekv_region_id id)
{
    struct region *region;

    if (!identifier_is(id, IDENTIFIER_REGION, tag) || identifier_index(id) >= memory->used)
        return NULL;
    region = &memory->regions[identifier_index(id)];
    if (region->generation != identifier_generation(id) || region->state == REGION_FREE ||
        region->state == REGION_HIDDEN)
        return NULL;
    return region;
}

static uint64_t region_access_flags(const struct region *region)
{
    uint64_t flags = FI_READ | FI_WRITE;

    if (region->access & EKV_ACCESS_REMOTE_WRITE)
        flags |= FI_REMOTE_WRITE;
    if (region->access & EKV_ACCESS_REMOTE_READ)
        flags |= FI_REMOTE_READ;
    return flags;
}

static void chunks_close(struct region_chunk *chunks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        fi_close(&chunks[i].mr->fid);
    free(chunks);
}

/* What NICs take into their page tables of GPU memory: whole pages. */
static int chunk_export(struct memory *memory, const struct region *region,
                        struct rail_memory *chunk)
{
    const uint64_t page = BUDGET_DEVICE_PAGE_BYTES;
    uint64_t begin = (uint64_t)(uintptr_t)chunk->address & ~(page - 1);
    uint64_t end = ((uint64_t)(uintptr_t)chunk->address + chunk->length + page - 1) & ~(page - 1);

    if (region->device < 0)
        return -1;
    cuda_order(memory->cuda, region->device, (uint64_t)(uintptr_t)chunk->address);
    chunk->dmabuf_base = begin;
    return cuda_export(memory->cuda, region->device, begin, end - begin);
}

static int chunk_register(struct memory *memory, const struct region *region, struct rail *rail,
                          uint64_t offset, uint64_t bytes, struct region_chunk *chunk)
{
    struct rail_memory range = {.address = (void *)(uintptr_t)(region->begin + offset),
                                .length = bytes,
                                .device = region->device};
    uint64_t key = atomic_fetch_add(&memory->next_key, 1);
    int answer;

    range.dmabuf = chunk_export(memory, region, &range);
    answer = rail_register(rail, &range, region_access_flags(region), key, &chunk->mr);
    if (range.dmabuf >= 0)
        close(range.dmabuf); /* the provider has a reference of its own */
    if (answer != 0)
        return answer;
    chunk->descriptor = fi_mr_desc(chunk->mr);
    chunk->key = fi_mr_key(chunk->mr);
    return 0;
}

/* All chunks of one size; returns libfabric's code. */
static int region_register_chunks(struct region *region, struct rail *rail, struct memory *memory,
                                  uint64_t chunk_bytes, struct region_rail *made)
{
    uint64_t length = region->end - region->begin;
    uint32_t count = (uint32_t)((length + chunk_bytes - 1) / chunk_bytes);
    struct region_chunk *chunks = calloc(count, sizeof *chunks);

    if (!chunks)
        return -FI_ENOMEM;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t offset = (uint64_t)i * chunk_bytes;
        uint64_t bytes = length - offset < chunk_bytes ? length - offset : chunk_bytes;
        int answer = chunk_register(memory, region, rail, offset, bytes, &chunks[i]);

        if (answer != 0) {
            chunks_close(chunks, i);
            return answer;
        }
    }
    *made = (struct region_rail){.chunks = chunks, .count = count, .chunk_bytes = chunk_bytes};
    return 0;
}

static int region_refused(const struct region *region, const struct rail *rail, int answer,
                          ekv_error *error)
{
    char held[192];

    budget_describe(&rail->budget, held, sizeof held);
    return error_set(error, EKV_EREGISTER, -answer, "fi_mr_reg",
                     "%s refused to register %llu bytes at 0x%llx: %s. This engine has already "
                     "registered %s with it%s. %s",
                     rail->nic.name, (unsigned long long)(region->end - region->begin),
                     (unsigned long long)region->begin, rail_strerror(rail, answer), held,
                     rail->budget.bytes ? ", and a device takes only so much in total" : "",
                     region->device >= 0
                         ? "It is GPU memory: check that it comes from cudaMalloc (no expandable "
                           "segments), and that the driver exports dmabuf or nvidia-peermem is "
                           "loaded (efa-kv doctor)"
                         : "Check the memlock limit (ulimit -l) and that the memory is mapped");
}

static int region_over_budget(const struct region *region, const struct rail *rail,
                              uint64_t entries, ekv_error *error)
{
    char held[192];

    budget_describe(&rail->budget, held, sizeof held);
    return error_set(error, EKV_EREGISTER, 0, "ekv_region_add",
                     "%s has no room for %llu bytes (%llu page-table entries) at 0x%llx: this "
                     "engine has already registered %s with it. Register less, or raise "
                     "device_bytes_max or device_entries_max if the device takes more",
                     rail->nic.name, (unsigned long long)(region->end - region->begin),
                     (unsigned long long)entries, (unsigned long long)region->begin, held);
}

int region_register(struct region *region, struct rail *rail, struct memory *memory,
                    uint64_t chunk_limit_bytes, ekv_error *error)
{
    uint64_t length = region->end - region->begin;
    uint64_t chunk_bytes = length;
    uint64_t entries =
        budget_entries(region->begin, length,
                       region->reach.bound ? BUDGET_DEVICE_PAGE_BYTES : BUDGET_HOST_PAGE_BYTES);
    struct region_rail made;
    int answer;

    if (!budget_allows(&rail->budget, length, entries))
        return region_over_budget(region, rail, entries, error);

    if (chunk_limit_bytes && chunk_limit_bytes < chunk_bytes)
        chunk_bytes = chunk_limit_bytes;
    answer = region_register_chunks(region, rail, memory, chunk_bytes, &made);
    /* Devices limit the size of one registration without saying how: halve it. */
    while (answer != 0 && answer != -FI_EAGAIN && chunk_bytes > MEMORY_SMALLEST_CHUNK_BYTES) {
        chunk_bytes = (chunk_bytes / 2 + 4095) & ~UINT64_C(4095);
        answer = region_register_chunks(region, rail, memory, chunk_bytes, &made);
    }
    if (answer != 0)
        return region_refused(region, rail, answer, error);
    made.rail = rail;
    made.bytes = length;
    made.entries = entries;
    budget_take(&rail->budget, length, entries, made.count);
    pthread_rwlock_wrlock(&memory->lock);
    region->rails[rail->index] = made;
    pthread_rwlock_unlock(&memory->lock);
    return EKV_OK;
}

void region_rail_close(struct region_rail *keys)
{
    if (keys->chunks) {
        budget_give(&keys->rail->budget, keys->bytes, keys->entries, keys->count);
        chunks_close(keys->chunks, keys->count);
    }
    *keys = (struct region_rail){0};
}

bool region_enter(struct region *region)
{
    /* Counted before the flag is read; whoever pauses sets the flag before it reads
     * the count, so one of the two sees the other. */
    atomic_fetch_add(&region->operations, 1);
    if (!atomic_load(&region->paused))
        return true;
    atomic_fetch_sub(&region->operations, 1);
    return false;
}

void region_leave(struct region *region)
{
    atomic_fetch_sub(&region->operations, 1);
}

const struct region_chunk *region_chunk_at(const struct region *region, uint32_t rail,
                                           uint64_t address, uint64_t *left)
{
    const struct region_rail *keys = &region->rails[rail];
    uint64_t offset = address - region->begin;
    uint64_t index;
    uint64_t end;

    assert(address >= region->begin && address < region->end);
    if (!keys->chunks)
        return NULL;
    index = offset / keys->chunk_bytes;
    end = region->begin + (index + 1) * keys->chunk_bytes;
    *left = (end < region->end ? end : region->end) - address;
    return &keys->chunks[index];
}
