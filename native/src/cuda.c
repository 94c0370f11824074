/* cuda.c - see cuda.h.
 *
 * Names, numbers and versions of functions are those of NVIDIA's documentation of the
 * driver's interface (CUDA Driver API, cuda.h of 12.x). */
#include "cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

#define CUDA_LIBRARY "libcuda.so.1"

#define CUDA_SUCCESS 0
#define CUDA_MEMORY_DEVICE 2u      /* CU_MEMORYTYPE_DEVICE */
#define CUDA_POINTER_MEMORY_TYPE 2 /* CU_POINTER_ATTRIBUTE_... */
#define CUDA_POINTER_SYNC_MEMOPS 6
#define CUDA_POINTER_DEVICE_ORDINAL 9
#define CUDA_DEVICE_DMA_BUF_SUPPORTED 124 /* CU_DEVICE_ATTRIBUTE_... */
#define CUDA_HANDLE_DMA_BUF_FD 1          /* CU_MEM_RANGE_HANDLE_TYPE_... */
#define CUDA_STREAM_NON_BLOCKING 1u
#define CUDA_HOST_REGISTER_PORTABLE 1u

struct cuda_driver {
    int (*init)(unsigned int flags);
    int (*device_get)(int *device, int ordinal);
    int (*device_pci)(char *text, int bytes, int device);
    int (*device_attribute)(int *value, int attribute, int device);
    int (*context_retain)(void **context, int device);
    int (*context_release)(int device);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*stream_create)(void **stream, unsigned int flags);
    int (*stream_synchronize)(void *stream);
    int (*stream_destroy)(void *stream);
    int (*copy)(uint64_t to, uint64_t from, size_t length, void *stream);
    int (*pointer_attribute)(void *value, int attribute, uint64_t address);
    int (*error_string)(int code, const char **text);
    /* Not every driver has these. */
    int (*pointer_set)(const void *value, int attribute, uint64_t address);
    int (*export_range)(void *handle, uint64_t address, size_t length, int type, uint64_t flags);
    int (*host_register)(void *memory, size_t length, unsigned int flags);
    int (*host_unregister)(void *memory);
};

struct cuda_symbol {
    const char *name;
    size_t offset;
    bool optional;
};

static const struct cuda_symbol symbols[] = {
    {"cuInit", offsetof(struct cuda_driver, init), false},
    {"cuDeviceGet", offsetof(struct cuda_driver, device_get), false},
    {"cuDeviceGetPCIBusId", offsetof(struct cuda_driver, device_pci), false},
    {"cuDeviceGetAttribute", offsetof(struct cuda_driver, device_attribute), false},
    {"cuDevicePrimaryCtxRetain", offsetof(struct cuda_driver, context_retain), false},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(struct cuda_driver, context_release), false},
    {"cuCtxPushCurrent_v2", offsetof(struct cuda_driver, context_push), false},
    {"cuCtxPopCurrent_v2", offsetof(struct cuda_driver, context_pop), false},
    {"cuStreamCreate", offsetof(struct cuda_driver, stream_create), false},
    {"cuStreamSynchronize", offsetof(struct cuda_driver, stream_synchronize), false},
    {"cuStreamDestroy_v2", offsetof(struct cuda_driver, stream_destroy), false},
    {"cuMemcpyAsync", offsetof(struct cuda_driver, copy), false},
    {"cuPointerGetAttribute", offsetof(struct cuda_driver, pointer_attribute), false},
    {"cuGetErrorString", offsetof(struct cuda_driver, error_string), false},
    {"cuPointerSetAttribute", offsetof(struct cuda_driver, pointer_set), true},
    {"cuMemGetHandleForAddressRange", offsetof(struct cuda_driver, export_range), true},
    {"cuMemHostRegister_v2", offsetof(struct cuda_driver, host_register), true},
    {"cuMemHostUnregister", offsetof(struct cuda_driver, host_unregister), true},
};

bool cuda_open(struct cuda *cuda, const char *path, char *why, size_t why_bytes)
{
    const char *name = path && path[0] ? path : CUDA_LIBRARY;

    memset(cuda, 0, sizeof *cuda);
    cuda->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!cuda->library) {
        const char *text = dlerror();

        snprintf(why, why_bytes, "%s", text ? text : name);
        return false;
    }
    cuda->driver = calloc(1, sizeof *cuda->driver);
    for (size_t i = 0; cuda->driver && i < sizeof symbols / sizeof symbols[0]; i++) {
        void *found = dlsym(cuda->library, symbols[i].name);

        memcpy((char *)cuda->driver + symbols[i].offset, &found, sizeof found);
        if (found || symbols[i].optional)
            continue;
        snprintf(why, why_bytes, "%s has no function %s", name, symbols[i].name);
        free(cuda->driver);
        dlclose(cuda->library);
        memset(cuda, 0, sizeof *cuda);
        return false;
    }
    if (!cuda->driver || pthread_mutex_init(&cuda->lock, NULL) != 0) {
        snprintf(why, why_bytes, "out of memory");
        free(cuda->driver);
        dlclose(cuda->library);
        memset(cuda, 0, sizeof *cuda);
        return false;
    }
    for (int i = 0; i < CUDA_DEVICES_MAX; i++)
        pthread_mutex_init(&cuda->devices[i].lock, NULL);
    return true;
}

/* The library stays mapped: the server uses it too, and the driver has threads in it. */
void cuda_close(struct cuda *cuda)
{
    if (!cuda->library)
        return;
    for (int i = 0; i < CUDA_DEVICES_MAX; i++) {
        struct cuda_device *device = &cuda->devices[i];
        void *popped;

        if (device->context) {
            if (cuda->driver->context_push(device->context) == CUDA_SUCCESS) {
                cuda->driver->stream_destroy(device->stream);
                cuda->driver->context_pop(&popped);
            }
            cuda->driver->context_release(device->handle);
        }
        pthread_mutex_destroy(&device->lock);
    }
    pthread_mutex_destroy(&cuda->lock);
    free(cuda->driver);
    memset(cuda, 0, sizeof *cuda);
}

bool cuda_is_there(const struct cuda *cuda)
{
    return cuda->library != NULL;
}

const char *cuda_error(const struct cuda *cuda, int code)
{
    const char *text = NULL;

    if (!cuda->library)
        return "there is no CUDA driver";
    return cuda->driver->error_string(code, &text) == CUDA_SUCCESS && text ? text : "unknown error";
}

/* With the lock held.  Only when device memory is met, since it takes a while. */
static int cuda_start(struct cuda *cuda)
{
    int code = CUDA_SUCCESS;

    if (!cuda->ready)
        code = cuda->driver->init(0);
    cuda->ready = code == CUDA_SUCCESS;
    return code;
}

static int cuda_device_at(const struct cuda *cuda, uint64_t address)
{
    unsigned int type = 0;
    int ordinal = -1;

    if (cuda->driver->pointer_attribute(&type, CUDA_POINTER_MEMORY_TYPE, address) != CUDA_SUCCESS ||
        type != CUDA_MEMORY_DEVICE)
        return -1;
    if (cuda->driver->pointer_attribute(&ordinal, CUDA_POINTER_DEVICE_ORDINAL, address) !=
        CUDA_SUCCESS)
        return -1;
    return ordinal;
}

int cuda_device_of(struct cuda *cuda, uint64_t address, uint64_t length)
{
    int code;
    int device;

    if (!cuda->library || length == 0)
        return -1;
    pthread_mutex_lock(&cuda->lock);
    code = cuda_start(cuda);
    pthread_mutex_unlock(&cuda->lock);
    if (code != CUDA_SUCCESS)
        return -1;
    device = cuda_device_at(cuda, address);
    return device == cuda_device_at(cuda, address + length - 1) ? device : -1;
}

/* With the lock held. */
static int cuda_begin(struct cuda *cuda, int ordinal)
{
    const struct cuda_driver *driver = cuda->driver;
    struct cuda_device *device = &cuda->devices[ordinal];
    void *context = NULL;
    void *popped;
    int exports = 0;
    int code = cuda_start(cuda);

    if (code != CUDA_SUCCESS || device->context)
        return code;
    code = driver->device_get(&device->handle, ordinal);
    if (code == CUDA_SUCCESS)
        code = driver->context_retain(&context, device->handle);
    if (code != CUDA_SUCCESS)
        return code;
    code = driver->context_push(context);
    if (code == CUDA_SUCCESS) {
        /* It waits for nobody: the server's streams go on meanwhile. */
        code = driver->stream_create(&device->stream, CUDA_STREAM_NON_BLOCKING);
        driver->context_pop(&popped);
    }
    if (code != CUDA_SUCCESS) {
        driver->context_release(device->handle);
        return code;
    }
    if (driver->export_range && driver->device_attribute(&exports, CUDA_DEVICE_DMA_BUF_SUPPORTED,
                                                         device->handle) == CUDA_SUCCESS)
        device->exports = exports != 0;
    device->context = context;
    return CUDA_SUCCESS;
}

int cuda_use(struct cuda *cuda, int device, char *pci, size_t pci_bytes, ekv_error *error)
{
    int code;

    if (!cuda->library || device < 0 || device >= CUDA_DEVICES_MAX)
        return error_set(error, EKV_EREGISTER, 0, "cuda",
                         "found memory of GPU %d, and %s. Expected a device from 0 to %d and "
                         "NVIDIA's driver (" CUDA_LIBRARY ")",
                         device, cuda->library ? "its driver" : "no driver for it",
                         CUDA_DEVICES_MAX - 1);
    pthread_mutex_lock(&cuda->lock);
    code = cuda_begin(cuda, device);
    pthread_mutex_unlock(&cuda->lock);
    if (code == CUDA_SUCCESS && pci)
        code = cuda->driver->device_pci(pci, (int)pci_bytes, cuda->devices[device].handle);
    if (code != CUDA_SUCCESS)
        return error_set(error, EKV_EREGISTER, code, "cuda", "GPU %d cannot be used: %s", device,
                         cuda_error(cuda, code));
    return EKV_OK;
}

void cuda_order(struct cuda *cuda, int device, uint64_t address)
{
    const struct cuda_driver *driver = cuda->driver;
    unsigned int yes = 1;
    void *popped;

    if (!driver->pointer_set || driver->context_push(cuda->devices[device].context) != CUDA_SUCCESS)
        return;
    driver->pointer_set(&yes, CUDA_POINTER_SYNC_MEMOPS, address);
    driver->context_pop(&popped);
}

int cuda_export(struct cuda *cuda, int device, uint64_t address, uint64_t length)
{
    const struct cuda_driver *driver = cuda->driver;
    void *popped;
    int fd = -1;

    if (!cuda->devices[device].exports ||
        driver->context_push(cuda->devices[device].context) != CUDA_SUCCESS)
        return -1;
    if (driver->export_range(&fd, address, length, CUDA_HANDLE_DMA_BUF_FD, 0) != CUDA_SUCCESS)
        fd = -1;
    driver->context_pop(&popped);
    return fd;
}

int cuda_copy(struct cuda *cuda, int device, void *to, const void *from, size_t length)
{
    const struct cuda_driver *driver = cuda->driver;
    struct cuda_device *used = &cuda->devices[device];
    void *popped;
    int code;

    pthread_mutex_lock(&used->lock);
    code = driver->context_push(used->context);
    if (code == CUDA_SUCCESS) {
        code =
            driver->copy((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, length, used->stream);
        if (code == CUDA_SUCCESS)
            code = driver->stream_synchronize(used->stream);
        driver->context_pop(&popped);
    }
    pthread_mutex_unlock(&used->lock);
    return code;
}

/* Host memory is pinned for all devices at once, but some context has to be there. */
bool cuda_pin(struct cuda *cuda, void *memory, size_t length)
{
    void *popped;
    bool done = false;

    if (!cuda->library || !cuda->driver->host_register || !cuda->driver->host_unregister)
        return false;
    for (int i = 0; i < CUDA_DEVICES_MAX && !done; i++) {
        if (!cuda->devices[i].context ||
            cuda->driver->context_push(cuda->devices[i].context) != CUDA_SUCCESS)
            continue;
        done = cuda->driver->host_register(memory, length, CUDA_HOST_REGISTER_PORTABLE) ==
               CUDA_SUCCESS;
        cuda->driver->context_pop(&popped);
    }
    return done;
}

void cuda_unpin(struct cuda *cuda, void *memory)
{
    cuda->driver->host_unregister(memory);
}
