/* gpu.h - memory of the fake GPUs (fake_cuda.c), for tests. */
#ifndef EKV_TEST_GPU_H
#define EKV_TEST_GPU_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "pair.h"

/* Of the library that the core is told to load: the same copy, since it is the same file. */
static struct {
    int (*init)(unsigned int);
    int (*push)(void *);
    int (*pop)(void **);
    int (*allocate)(uint64_t *, size_t);
    int (*release)(uint64_t);
    int (*copy)(uint64_t, uint64_t, size_t, void *);
    uint64_t (*copies)(void);
    void (*fail)(int);
} gpu;

static inline void *gpu_symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);

    CHECK(found != NULL);
    return found;
}

static inline void gpu_open(void)
{
    void *library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    const struct {
        const char *name;
        void *place;
    } wanted[] = {{"cuInit", &gpu.init},
                  {"cuCtxPushCurrent_v2", &gpu.push},
                  {"cuCtxPopCurrent_v2", &gpu.pop},
                  {"cuMemAlloc_v2", &gpu.allocate},
                  {"cuMemFree_v2", &gpu.release},
                  {"cuMemcpyAsync", &gpu.copy},
                  {"fake_cuda_copies", &gpu.copies},
                  {"fake_cuda_fail", &gpu.fail}};

    CHECK(library != NULL);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        void *found = gpu_symbol(library, wanted[i].name);

        memcpy(wanted[i].place, &found, sizeof found);
    }
    CHECK_INT(gpu.init(0), 0);
}

static inline uint64_t gpu_allocate(int device, size_t length)
{
    uint64_t address = 0;
    void *popped;

    CHECK_INT(gpu.push((void *)(uintptr_t)(device + 1)), 0);
    CHECK_INT(gpu.allocate(&address, length), 0);
    CHECK_INT(gpu.pop(&popped), 0);
    return address;
}

/* Between device and host memory, either way. */
static inline void gpu_copy(uint64_t to, uint64_t from, size_t length)
{
    void *popped;

    CHECK_INT(gpu.push((void *)1), 0);
    CHECK_INT(gpu.copy(to, from, length, (void *)1), 0);
    CHECK_INT(gpu.pop(&popped), 0);
}

static inline ekv_memory gpu_memory(uint64_t address, size_t length, int device)
{
    return (ekv_memory){.struct_size = sizeof(ekv_memory),
                        .kind = EKV_MEMORY_CUDA,
                        .address = address,
                        .length_bytes = length,
                        .device = device,
                        .access = EKV_ACCESS_REMOTE_WRITE | EKV_ACCESS_REMOTE_READ};
}

static inline ekv_region_id gpu_register(ekv_engine *engine, uint64_t address, size_t length,
                                         int device)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_memory memory = gpu_memory(address, length, device);
    ekv_region_id region;

    CHECK_OK(ekv_region_add(engine, &memory, &region, &error));
    return region;
}

#endif
