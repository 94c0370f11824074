#include "registry.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DIRECTORY "/dev/shm/"
#define PROCESS_PREFIX "efa-kv-sim."
#define HOST_PREFIX "efa-kv-sim-host."

enum { PATH_SIZE = 128, EXIT_CHECK_INTERVAL_NS = 1000000 };

static pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct shared_process *self;
static struct shared_nic *self_nics;
static struct process_identity self_identity;
static struct remote_process *attached;

static void process_path(char path[PATH_SIZE], struct process_identity identity)
{
    snprintf(path, PATH_SIZE, DIRECTORY PROCESS_PREFIX "%u.%llu", identity.pid,
             (unsigned long long)identity.start_time);
}

static void endpoint_path(char path[PATH_SIZE], struct process_identity identity,
                          uint16_t queue_pair)
{
    snprintf(path, PATH_SIZE, DIRECTORY PROCESS_PREFIX "%u.%llu.e%u", identity.pid,
             (unsigned long long)identity.start_time, queue_pair);
}

static void *map_file(int file, size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void *create_file(const char *path, size_t size)
{
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0)
        return NULL;
    void *memory = ftruncate(file, (off_t)size) == 0 ? map_file(file, size) : NULL;
    close(file);
    if (!memory)
        unlink(path);
    return memory;
}

static void *open_file(const char *path, size_t size)
{
    struct stat status;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return NULL;
    void *memory =
        fstat(file, &status) == 0 && (size_t)status.st_size == size ? map_file(file, size) : NULL;
    close(file);
    return memory;
}

/* Every user of a host file holds a shared lock on it for life, so an exclusive lock proves that
 * nobody uses it. */
static void sweep_host_file(const char *path)
{
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    if (flock(file, LOCK_EX | LOCK_NB) == 0)
        unlink(path);
    close(file);
}

static void sweep(void)
{
    DIR *directory = opendir(DIRECTORY);
    if (!directory)
        return;
    for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
        char path[sizeof DIRECTORY + sizeof entry->d_name];
        struct process_identity identity;
        unsigned long long start_time;
        snprintf(path, sizeof path, DIRECTORY "%s", entry->d_name);
        if (strncmp(entry->d_name, HOST_PREFIX, strlen(HOST_PREFIX)) == 0) {
            sweep_host_file(path);
        } else if (sscanf(entry->d_name, PROCESS_PREFIX "%u.%llu", &identity.pid, &start_time) ==
                   2) {
            identity.start_time = start_time;
            if (!process_is_alive(identity))
                unlink(path);
        }
    }
    closedir(directory);
}

/* Opens or creates the file of a named host. With keep_lock the descriptor stays open, and with it
 * the lock, for the life of the process. */
static struct shared_nic *map_host(const char *name, bool keep_lock)
{
    char path[PATH_SIZE];
    const size_t size = sizeof(struct shared_nic) * SIMNIC_MAX_NICS;
    snprintf(path, sizeof path, DIRECTORY HOST_PREFIX "%s", name);
    for (;;) {
        struct stat status;
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0)
            return NULL;
        if (flock(file, LOCK_SH) != 0 || fstat(file, &status) != 0) {
            close(file);
            return NULL;
        }
        if (status.st_nlink == 0) { /* swept between the opening and the lock */
            close(file);
            continue;
        }
        void *memory = ftruncate(file, (off_t)size) == 0 ? map_file(file, size) : NULL;
        if (!keep_lock || !memory)
            close(file);
        return memory;
    }
}

static struct shared_process *create_self(const struct settings *settings)
{
    char path[PATH_SIZE];
    sweep();
    self_identity = process_self();
    process_path(path, self_identity);
    struct shared_process *created = create_file(path, sizeof *created);
    if (!created)
        return NULL;
    created->pid = self_identity.pid;
    created->start_time = self_identity.start_time;
    strcpy(created->host_name, settings->host_name);
    self_nics = *settings->host_name ? map_host(settings->host_name, true) : created->nics;
    if (!self_nics) {
        unlink(path);
        munmap(created, sizeof *created);
        return NULL;
    }
    atomic_thread_fence(memory_order_release);
    created->magic = SHARED_MAGIC;
    return created;
}

struct shared_process *registry_self(void)
{
    const struct settings *settings = settings_get();
    if (!settings)
        return NULL;
    pthread_mutex_lock(&registry_mutex);
    /* A forked child is another process: what it inherited is its parent's. */
    if (!self || self->pid != (uint32_t)getpid()) {
        struct shared_process *created = create_self(settings);
        self = created;
        attached = NULL;
    }
    struct shared_process *result = self;
    pthread_mutex_unlock(&registry_mutex);
    return result;
}

struct process_identity registry_self_identity(void)
{
    return self_identity;
}

struct shared_nic *registry_self_nics(void)
{
    return self_nics;
}

/* Runs when the process exits or libfabric unloads the provider. Endpoints have their own files,
 * removed when they are closed; those left open are removed here by name. */
__attribute__((destructor)) static void remove_own_files(void)
{
    char path[PATH_SIZE];
    if (!self || self->pid != (uint32_t)getpid())
        return;
    process_path(path, self_identity);
    unlink(path);
    DIR *directory = opendir(DIRECTORY);
    if (!directory)
        return;
    const char *prefix = path + strlen(DIRECTORY);
    size_t length = strlen(prefix);
    for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory))
        if (strncmp(entry->d_name, prefix, length) == 0 && entry->d_name[length] == '.')
            unlinkat(dirfd(directory), entry->d_name, 0);
    closedir(directory);
}

static struct remote_process *attach_new(struct process_identity identity)
{
    char path[PATH_SIZE];
    struct remote_process *process = calloc(1, sizeof *process);
    if (!process)
        return NULL;
    process->identity = identity;
    process->is_self =
        identity.pid == self_identity.pid && identity.start_time == self_identity.start_time;
    process->handle = -1;
    if (process->is_self) {
        process->shared = self;
        process->nics = self_nics;
        return process;
    }
    process_path(path, identity);
    process->handle = process_open_handle(identity);
    if (process->handle >= 0)
        process->shared = open_file(path, sizeof *process->shared);
    if (process->shared && process->shared->magic == SHARED_MAGIC)
        process->nics = *process->shared->host_name ? map_host(process->shared->host_name, false)
                                                    : process->shared->nics;
    if (process->nics)
        return process;
    if (process->shared)
        munmap(process->shared, sizeof *process->shared);
    if (process->handle >= 0)
        close(process->handle);
    free(process);
    return NULL;
}

struct remote_process *registry_attach(struct process_identity identity)
{
    struct remote_process *process;
    if (!registry_self())
        return NULL;
    pthread_mutex_lock(&registry_mutex);
    for (process = attached; process; process = process->next)
        if (process->identity.pid == identity.pid &&
            process->identity.start_time == identity.start_time)
            break;
    if (!process) {
        process = attach_new(identity);
        if (process) {
            process->next = attached;
            attached = process;
        }
    }
    if (process)
        process->references++;
    pthread_mutex_unlock(&registry_mutex);
    return process;
}

void registry_release(struct remote_process *process)
{
    pthread_mutex_lock(&registry_mutex);
    if (--process->references > 0) {
        pthread_mutex_unlock(&registry_mutex);
        return;
    }
    for (struct remote_process **link = &attached; *link; link = &(*link)->next)
        if (*link == process) {
            *link = process->next;
            break;
        }
    pthread_mutex_unlock(&registry_mutex);
    if (!process->is_self) {
        if (process->nics != process->shared->nics)
            munmap(process->nics, sizeof(struct shared_nic) * SIMNIC_MAX_NICS);
        munmap(process->shared, sizeof *process->shared);
        close(process->handle);
    }
    free(process);
}

bool registry_has_exited(struct remote_process *process)
{
    if (process->is_self || atomic_load_explicit(&process->has_exited, memory_order_relaxed))
        return !process->is_self;
    uint64_t now = clock_ns();
    if (now - atomic_load_explicit(&process->checked_ns, memory_order_relaxed) <
        EXIT_CHECK_INTERVAL_NS)
        return false;
    atomic_store_explicit(&process->checked_ns, now, memory_order_relaxed);
    if (!process_handle_has_exited(process->handle))
        return false;
    atomic_store_explicit(&process->has_exited, true, memory_order_relaxed);
    return true;
}

struct shared_endpoint *registry_create_endpoint(uint16_t queue_pair)
{
    char path[PATH_SIZE];
    pthread_mutexattr_t attributes;
    endpoint_path(path, self_identity, queue_pair);
    struct shared_endpoint *endpoint = create_file(path, sizeof *endpoint);
    if (!endpoint)
        return NULL;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&endpoint->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    endpoint->magic = SHARED_MAGIC;
    return endpoint;
}

void registry_remove_endpoint(struct shared_endpoint *endpoint, uint16_t queue_pair)
{
    char path[PATH_SIZE];
    endpoint_path(path, self_identity, queue_pair);
    unlink(path);
    munmap(endpoint, sizeof *endpoint);
}

struct shared_endpoint *registry_map_endpoint(struct process_identity identity, uint16_t queue_pair)
{
    char path[PATH_SIZE];
    endpoint_path(path, identity, queue_pair);
    struct shared_endpoint *endpoint = open_file(path, sizeof *endpoint);
    if (endpoint && endpoint->magic != SHARED_MAGIC) {
        munmap(endpoint, sizeof *endpoint);
        return NULL;
    }
    return endpoint;
}

void registry_unmap_endpoint(struct shared_endpoint *endpoint)
{
    munmap(endpoint, sizeof *endpoint);
}

/* FNV-1a, spread over 56 bits. */
uint64_t registry_host_number(void)
{
    uint64_t hash = 1469598103934665603u;
    char text[64];
    const struct settings *settings = settings_get();
    if (settings && *settings->host_name)
        snprintf(text, sizeof text, "%s", settings->host_name);
    else
        snprintf(text, sizeof text, "%u.%llu", self_identity.pid,
                 (unsigned long long)self_identity.start_time);
    for (const char *c = text; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 1099511628211u;
    return hash & 0x00ffffffffffffffu;
}
