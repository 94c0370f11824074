/* fake_cuda.c - NVIDIA's driver as far as the core calls it, for machines without a GPU.
 *
 * Device memory is a range that the processor cannot touch, with a second mapping behind it
 * that only the copies here know: whoever takes it for host memory crashes, and the kernel
 * refuses it to other processes.  With FAKE_CUDA_PLAIN=1 it can be touched, for simulated
 * NICs, which move bytes by the processor.  Two devices; FAKE_CUDA_DMABUF=1 makes them
 * export descriptors. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DEVICES 2
#define RANGES_MAX 64
#define FAILED 999
#define INVALID 1

struct range {
    uint8_t *begin; /* what the program sees */
    uint8_t *hidden;
    size_t length;
    int device;
    int fd;
};

static struct range ranges[RANGES_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool initialised;
static _Thread_local long current; /* 0: none, else device + 1 */
static _Atomic uint64_t copies;
static _Atomic int failing; /* copies still to fail */

#define SHOWN __attribute__((visibility("default")))

static bool is_set(const char *name)
{
    const char *value = getenv(name);

    return value && value[0] == '1';
}

/* With the lock held. */
static struct range *find(uint64_t address)
{
    for (int i = 0; i < RANGES_MAX; i++)
        if (ranges[i].begin && address >= (uint64_t)(uintptr_t)ranges[i].begin &&
            address < (uint64_t)(uintptr_t)ranges[i].begin + ranges[i].length)
            return &ranges[i];
    return NULL;
}

SHOWN int cuInit(unsigned int flags)
{
    initialised = flags == 0;
    return initialised ? 0 : INVALID;
}

SHOWN int cuDeviceGet(int *device, int ordinal)
{
    if (!initialised || ordinal < 0 || ordinal >= DEVICES)
        return INVALID;
    *device = ordinal;
    return 0;
}

SHOWN int cuDeviceGetCount(int *count)
{
    *count = DEVICES;
    return initialised ? 0 : INVALID;
}

SHOWN int cuDeviceGetPCIBusId(char *text, int bytes, int device)
{
    /* As two GPUs of a p5en, see native/simnic/src/instance.c. */
    snprintf(text, (size_t)bytes, "%s", device ? "0000:8a:00.0" : "0000:57:00.0");
    return 0;
}

SHOWN int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 124 && is_set("FAKE_CUDA_DMABUF");
    return 0;
}

SHOWN int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = (void *)(uintptr_t)(device + 1);
    return 0;
}

SHOWN int cuDevicePrimaryCtxRelease_v2(int device)
{
    return device >= 0 && device < DEVICES ? 0 : INVALID;
}

SHOWN int cuCtxPushCurrent_v2(void *context)
{
    current = current << 8 | (long)(uintptr_t)context;
    return context ? 0 : INVALID;
}

SHOWN int cuCtxPopCurrent_v2(void **context)
{
    *context = (void *)(uintptr_t)(current & 0xff);
    current >>= 8;
    return 0;
}

SHOWN int cuStreamCreate(void **stream, unsigned int flags)
{
    *stream = (void *)(uintptr_t)(0x100 + current);
    return current && flags == 1 ? 0 : INVALID;
}

SHOWN int cuStreamSynchronize(void *stream)
{
    return stream ? 0 : INVALID;
}

SHOWN int cuStreamDestroy_v2(void *stream)
{
    return stream ? 0 : INVALID;
}

SHOWN int cuPointerGetAttribute(void *value, int attribute, uint64_t address)
{
    const struct range *range;
    int code = 0;

    if (!initialised)
        return FAILED;
    pthread_mutex_lock(&lock);
    range = find(address);
    if (!range)
        code = INVALID;
    else if (attribute == 2)
        *(unsigned int *)value = 2;
    else if (attribute == 9)
        *(int *)value = range->device;
    else
        code = INVALID;
    pthread_mutex_unlock(&lock);
    return code;
}

SHOWN int cuPointerSetAttribute(const void *value, int attribute, uint64_t address)
{
    (void)address;
    return value && attribute == 6 ? 0 : INVALID;
}

SHOWN int cuGetErrorString(int code, const char **text)
{
    *text = code == FAILED ? "the copy was made to fail" : "invalid argument";
    return 0;
}

SHOWN int cuMemHostRegister_v2(void *memory, size_t length, unsigned int flags)
{
    return memory && length && flags == 1 && current ? 0 : INVALID;
}

SHOWN int cuMemHostUnregister(void *memory)
{
    return memory ? 0 : INVALID;
}

SHOWN int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t length, int type,
                                        unsigned long long flags)
{
    const struct range *range;
    int code = INVALID;

    pthread_mutex_lock(&lock);
    range = find(address);
    if (range && type == 1 && flags == 0 &&
        address + length <= (uint64_t)(uintptr_t)range->begin + range->length) {
        *(int *)handle = fcntl(range->fd, F_DUPFD_CLOEXEC, 0);
        code = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* Where the bytes of an address really are; host memory is its own place. */
static uint8_t *place_of(uint64_t address, size_t length)
{
    const struct range *range = find(address);
    uint64_t offset;

    if (!range)
        return (uint8_t *)(uintptr_t)address;
    offset = address - (uint64_t)(uintptr_t)range->begin;
    return length <= range->length - offset ? range->hidden + offset : NULL;
}

SHOWN int cuMemcpyAsync(uint64_t to, uint64_t from, size_t length, void *stream)
{
    uint8_t *target;
    uint8_t *source;

    if (!stream || !current)
        return INVALID;
    if (failing > 0 && failing-- > 0)
        return FAILED;
    pthread_mutex_lock(&lock);
    target = place_of(to, length);
    source = place_of(from, length);
    /* Under the lock, because sanitizers do not see the order that a network makes. */
    if (target && source)
        memmove(target, source, length);
    copies += target && source;
    pthread_mutex_unlock(&lock);
    return target && source ? 0 : INVALID;
}

SHOWN int cuMemAlloc_v2(uint64_t *address, size_t length)
{
    size_t bytes = (length + 0x1fffff) & ~(size_t)0x1fffff;
    int code = INVALID;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < RANGES_MAX && code != 0; i++) {
        struct range *range = &ranges[i];
        int protection = is_set("FAKE_CUDA_PLAIN") ? PROT_READ | PROT_WRITE : PROT_NONE;

        if (range->begin)
            continue;
        range->fd = memfd_create("fake-cuda", MFD_CLOEXEC);
        if (range->fd < 0 || ftruncate(range->fd, (off_t)bytes) != 0)
            break;
        range->begin = mmap(NULL, bytes, protection, MAP_SHARED, range->fd, 0);
        range->hidden = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, range->fd, 0);
        range->length = bytes;
        range->device = (int)(current & 0xff) - 1;
        *address = (uint64_t)(uintptr_t)range->begin;
        code = current ? 0 : INVALID;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

SHOWN int cuMemFree_v2(uint64_t address)
{
    struct range *range;

    pthread_mutex_lock(&lock);
    range = find(address);
    if (range) {
        munmap(range->begin, range->length);
        munmap(range->hidden, range->length);
        close(range->fd);
        *range = (struct range){0};
    }
    pthread_mutex_unlock(&lock);
    return range ? 0 : INVALID;
}

/* For tests alone. */
SHOWN uint64_t fake_cuda_copies(void)
{
    return copies;
}

SHOWN void fake_cuda_fail(int count)
{
    failing = count;
}
