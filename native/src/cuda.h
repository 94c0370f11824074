/* cuda.h - what the core needs of NVIDIA's driver: whose memory an address is, copies, and
 * handles for NICs.
 *
 * The driver is loaded at run time and never linked: without it there is no GPU memory, and
 * nothing else is missing.  Contexts are the devices' primary ones, which the server uses
 * too.  Safe from any thread: what changes is behind `lock`, a device's stream behind the
 * device's own. */
#ifndef EKV_CUDA_H
#define EKV_CUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "efa_kv.h"

#define CUDA_DEVICES_MAX 64

struct cuda_device {
    pthread_mutex_t lock; /* of the stream: one copy at a time */
    int handle;
    void *context; /* NULL: not used yet */
    void *stream;
    bool exports; /* it gives out dmabuf descriptors */
};

struct cuda_driver; /* its functions, see cuda.c */

struct cuda {
    void *library; /* NULL: there is no driver */
    struct cuda_driver *driver;
    pthread_mutex_t lock; /* of ready and of devices coming into use */
    bool ready;
    struct cuda_device devices[CUDA_DEVICES_MAX];
};

/* Loads the driver; path NULL: libcuda.so.1.  False: there is none, and *why says so. */
bool cuda_open(struct cuda *cuda, const char *path, char *why, size_t why_bytes);
void cuda_close(struct cuda *cuda);
bool cuda_is_there(const struct cuda *cuda);

/* The device that holds all of a range, or -1: host memory, unknown, or several. */
int cuda_device_of(struct cuda *cuda, uint64_t address, uint64_t length);

/* Brings a device into use and gives its PCI address, 0000:53:00.0. */
int cuda_use(struct cuda *cuda, int device, char *pci, size_t pci_bytes, ekv_error *error);

/* Has copies by the driver finish before they are said to be, which what a NIC reads
 * relies on.  A hint: older drivers know it not. */
void cuda_order(struct cuda *cuda, int device, uint64_t address);

/* A dmabuf descriptor of page-aligned device memory, or -1.  The caller closes it. */
int cuda_export(struct cuda *cuda, int device, uint64_t address, uint64_t length);

/* Copies, with device memory on either side or on both, and waits for it; `device` has been
 * brought into use.  It waits for the copy alone, not for what the server computes.
 * Returns 0 or the driver's error. [blocks] */
int cuda_copy(struct cuda *cuda, int device, void *to, const void *from, size_t length);
const char *cuda_error(const struct cuda *cuda, int code);

/* Makes host memory fast to copy to and from; false: it stays as it was. */
bool cuda_pin(struct cuda *cuda, void *memory, size_t length);
void cuda_unpin(struct cuda *cuda, void *memory);

#endif
