/* rail.c - opening, closing and describing a rail; see rail.h. */
#define _GNU_SOURCE
#include "rail.h"

#include <assert.h>
#include <pthread.h>
#include <rdma/fi_errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "error.h"

#define RAIL_RECEIVES_WANTED 128u
#define RAIL_SPARE_SLOTS 64u

static int rail_fail(struct rail *rail, ekv_error *error, ssize_t answer, const char *where)
{
    return error_set(error, EKV_EPROVIDER, (int)-answer, where, "%s (%s): %s", rail->nic.name,
                     rail->nic.provider, rail_strerror(rail, (int)answer));
}

const char *rail_strerror(const struct rail *rail, int code)
{
    return rail->library->strerror(code < 0 ? -code : code);
}

static void rail_set_depth(struct rail *rail, const struct rail_options *options)
{
    size_t offered = rail->info->tx_attr->size;
    size_t completions;

    rail->depth = offered > 65536 ? 65536 : (uint32_t)offered;
    if (rail->depth == 0)
        rail->depth = 1;
    if (options->max_in_flight > rail->depth)
        log_write(rail->log, LOG_WARNING,
                  "%s: max_in_flight %u is more than the provider's queue of %u, which is used",
                  rail->nic.name, options->max_in_flight, rail->depth);
    else if (options->max_in_flight)
        rail->depth = options->max_in_flight;
    rail->receive_count = RAIL_RECEIVES_WANTED;
    if (rail->info->rx_attr->size < rail->receive_count)
        rail->receive_count = (uint32_t)rail->info->rx_attr->size;
    rail->nic.queue_depth = rail->depth;
    completions = rail->info->tx_attr->size + rail->info->rx_attr->size;
    if (completions < (size_t)rail->depth + rail->receive_count + RAIL_SPARE_SLOTS)
        completions = (size_t)rail->depth + rail->receive_count + RAIL_SPARE_SLOTS;
    rail->nic.completion_queue_size = (uint32_t)completions;
}

static ssize_t rail_open_completions(struct rail *rail)
{
    struct fi_cq_attr attributes = {.format = FI_CQ_FORMAT_MSG,
                                    .wait_obj = FI_WAIT_FD,
                                    .size = rail->nic.completion_queue_size};
    ssize_t answer;

    rail->wait_fd = -1;
    answer = fi_cq_open(rail->domain, &attributes, &rail->completions, rail);
    if (answer == 0 && fi_control(&rail->completions->fid, FI_GETWAIT, &rail->wait_fd) != 0) {
        fi_close(&rail->completions->fid);
        answer = -FI_ENOSYS;
    }
    if (answer != 0) {
        rail->wait_fd = -1;
        attributes.wait_obj = FI_WAIT_NONE;
        answer = fi_cq_open(rail->domain, &attributes, &rail->completions, rail);
    }
    if (answer != 0)
        rail->completions = NULL;
    return answer;
}

/* Without an event queue some providers abort the process on asynchronous errors. */
static ssize_t rail_open_events(struct rail *rail)
{
    struct fi_eq_attr attributes = {.wait_obj = FI_WAIT_NONE};
    ssize_t answer = fi_eq_open(rail->fabric, &attributes, &rail->events, rail);

    if (answer == 0)
        answer = fi_ep_bind(rail->endpoint, &rail->events->fid, 0);
    if (answer != 0 && rail->events) {
        fi_close(&rail->events->fid);
        rail->events = NULL;
    }
    return answer;
}

/* Only a hint when to stay awake, so a refusal is no error. */
static void rail_open_remote_count(struct rail *rail)
{
    struct fi_cntr_attr attributes = {.events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_NONE};

    if (fi_cntr_open(rail->domain, &attributes, &rail->remote_count, rail) != 0) {
        rail->remote_count = NULL;
        return;
    }
    if (fi_ep_bind(rail->endpoint, &rail->remote_count->fid, FI_REMOTE_WRITE | FI_REMOTE_READ) !=
        0) {
        fi_close(&rail->remote_count->fid);
        rail->remote_count = NULL;
    }
}

static int rail_open_domain(struct rail *rail, ekv_error *error)
{
    ssize_t answer = rail->library->open(rail->info->fabric_attr, &rail->fabric, rail);

    if (answer != 0)
        return rail_fail(rail, error, answer, "fi_fabric");
    answer = fi_domain(rail->fabric, rail->info, &rail->domain, rail);
    if (answer != 0)
        return rail_fail(rail, error, answer, "fi_domain");
    return EKV_OK;
}

static int rail_open_endpoint(struct rail *rail, ekv_error *error)
{
    /* A hint; shm refuses more than it can ever hold, the others grow. */
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = 256};
    ssize_t answer = fi_av_open(rail->domain, &av, &rail->addresses, rail);

    if (answer != 0)
        return rail_fail(rail, error, answer, "fi_av_open");
    answer = rail_open_completions(rail);
    if (answer != 0)
        return rail_fail(rail, error, answer, "fi_cq_open");
    answer = fi_endpoint(rail->domain, rail->info, &rail->endpoint, rail);
    if (answer != 0)
        return rail_fail(rail, error, answer, "fi_endpoint");
    answer = fi_ep_bind(rail->endpoint, &rail->addresses->fid, 0);
    if (answer == 0)
        answer = fi_ep_bind(rail->endpoint, &rail->completions->fid, FI_TRANSMIT | FI_RECV);
    if (answer != 0)
        return rail_fail(rail, error, answer, "fi_ep_bind");
    if (rail->info->caps & FI_RMA_EVENT)
        rail_open_remote_count(rail);
    answer = rail_open_events(rail);
    if (answer != 0)
        log_write(rail->log, LOG_DEBUG, "%s: no event queue: %s", rail->nic.name,
                  rail_strerror(rail, (int)answer));
    answer = fi_enable(rail->endpoint);
    /* Not removed here: another container may share the folder and use the number too. */
    if (answer == -FI_EBUSY && rail_is_guarded(rail))
        return error_set(error, EKV_EPROVIDER, FI_EBUSY, "fi_enable",
                         "a process that was killed and had our number, %d, has left its shared "
                         "memory behind. Remove /dev/shm/%d:* and start again",
                         (int)getpid(), (int)getpid());
    if (answer != 0)
        return rail_fail(rail, error, answer, "fi_enable");
    return EKV_OK;
}

/* Only an enabled endpoint has an address worth publishing. */
static int rail_read_address(struct rail *rail, ekv_nic *nic, ekv_error *error)
{
    size_t length = sizeof nic->address;
    ssize_t answer = fi_getname(&rail->endpoint->fid, nic->address, &length);

    if (answer != 0 || length == 0 || length > sizeof nic->address)
        return rail_fail(rail, error, answer ? answer : -FI_ETOOSMALL, "fi_getname");
    nic->address_length = (uint32_t)length;
    return EKV_OK;
}

static int rail_open_slots(struct rail *rail, ekv_error *error)
{
    size_t count = 2 * (size_t)rail->depth + rail->receive_count + RAIL_SPARE_SLOTS;
    size_t bytes = (count + 1) * sizeof *rail->messages;
    void *room = NULL;
    ssize_t answer;

    if (!inflight_open(&rail->inflight, count) || posix_memalign(&room, 4096, bytes) != 0)
        return error_set(error, EKV_ENOMEM, 0, "rail_open", "out of memory");
    memset(room, 0, bytes);
    rail->messages = room;
    for (size_t i = 0; i < count; i++)
        rail->inflight.slots[i].message = &rail->messages[i];
    rail->unposted = calloc(rail->receive_count, sizeof(struct operation *));
    if (!rail->unposted)
        return error_set(error, EKV_ENOMEM, 0, "rail_open", "out of memory");
    answer = rail_register(
        rail, &(struct rail_memory){.address = room, .length = bytes, .device = -1, .dmabuf = -1},
        FI_SEND | FI_RECV | FI_READ | FI_WRITE, UINT64_C(1) << 62 | rail->index,
        &rail->messages_mr);
    if (answer != 0)
        return rail_fail(rail, error, answer, "fi_mr_reg");
    rail->messages_descriptor = fi_mr_desc(rail->messages_mr);
    rail->receive_bytes = sizeof *rail->messages;
    rail->receive_descriptor = rail->messages_descriptor;
    for (uint32_t i = 0; i < rail->receive_count; i++) {
        struct operation *operation = inflight_take(&rail->inflight, 0);

        operation->kind = OPERATION_RECEIVE;
        rail->unposted[rail->unposted_count++] = operation;
    }
    return EKV_OK;
}

int rail_open(struct rail *rail, const struct fabric *library, struct log *log,
              struct fi_info *info, const struct rail_options *options, ekv_error *error)
{
    int code;

    rail->library = library; /* nic is filled already, the rest is zero */
    rail->log = log;
    rail->info = info;
    rail->index = options->index;
    rail->wait_fd = -1;
    rail->nic.struct_size = sizeof rail->nic;
    rail_set_depth(rail, options);
    code = rail_open_domain(rail, error);
    if (code == EKV_OK)
        code = rail_open_endpoint(rail, error);
    if (code == EKV_OK)
        code = rail_read_address(rail, &rail->nic, error);
    if (code == EKV_OK)
        code = rail_open_slots(rail, error);
    if (code == EKV_OK && options->cuda)
        code = stage_open(rail, options->cuda, error);
    if (code == EKV_OK)
        rail_post_receives(rail);
    if (code != EKV_OK) {
        rail_close(rail);
        return code;
    }
    if (rail->wait_fd >= 0)
        rail->nic.flags |= EKV_NIC_WAIT_FD;
    atomic_store(&rail->flags, rail->nic.flags);
    log_write(log, LOG_INFO,
              "rail %u: device %s, provider %s, fabric %s, queue depth %u of %u, completion queue "
              "%u, speed %.1f Gbit/s, PCI %s, NUMA node %d, %s",
              rail->index, rail->nic.name, rail->nic.provider, rail->nic.fabric, rail->depth,
              rail->nic.provider_queue_depth, rail->nic.completion_queue_size,
              (double)rail->nic.speed_bits_per_second / 1e9,
              rail->nic.pci[0] ? rail->nic.pci : "unknown", rail->nic.numa_node,
              rail->nic.flags & EKV_NIC_DELIVERY_COMPLETE ? "completion means landed"
                                                          : "writes are flushed");
    return EKV_OK;
}

static void fid_close(struct fid *fid)
{
    if (fid)
        fi_close(fid);
}

/* Process-wide, since that is how far the provider's pointers reach. */
static pthread_rwlock_t guard = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

bool rail_stages(const struct rail *rail)
{
    return !(rail->nic.flags & EKV_NIC_DEVICE_MEMORY) && strncmp(rail->nic.provider, "efa", 3) != 0;
}

bool rail_is_guarded(const struct rail *rail)
{
    return strcmp(rail->nic.provider, "shm") == 0;
}

void rail_guard_enter(const struct rail *rail)
{
    if (rail_is_guarded(rail))
        pthread_rwlock_rdlock(&guard);
}

void rail_guard_leave(const struct rail *rail)
{
    if (rail_is_guarded(rail))
        pthread_rwlock_unlock(&guard);
}

void rail_close_endpoint(struct rail *rail)
{
    bool guarded = rail_is_guarded(rail);

    if (!rail->endpoint)
        return;
    if (guarded)
        pthread_rwlock_wrlock(&guard);
    fi_close(&rail->endpoint->fid);
    rail->endpoint = NULL;
    if (guarded)
        pthread_rwlock_unlock(&guard);
}

static void rail_close_queues(struct rail *rail)
{
    fid_close(rail->addresses ? &rail->addresses->fid : NULL);
    fid_close(rail->remote_count ? &rail->remote_count->fid : NULL);
    fid_close(rail->completions ? &rail->completions->fid : NULL);
    fid_close(rail->events ? &rail->events->fid : NULL);
    rail->addresses = NULL;
    rail->remote_count = NULL;
    rail->remote_seen = 0;
    rail->completions = NULL;
    rail->events = NULL;
    rail->wait_fd = -1;
    rail->known_count = 0;
    rail->known_idle = false;
    rail->exhausted = false;
}

bool rail_can_reopen(const struct rail *rail)
{
    return !((uint64_t)rail->info->domain_attr->mr_mode & FI_MR_ENDPOINT);
}

int rail_reopen(struct rail *rail, ekv_nic *nic, ekv_error *error)
{
    int code;

    assert(!rail->endpoint);
    rail_close_queues(rail);
    code = rail_open_endpoint(rail, error);
    if (code == EKV_OK)
        code = rail_read_address(rail, nic, error);
    if (code != EKV_OK) {
        rail_close_endpoint(rail);
        rail_close_queues(rail);
        return code;
    }
    /* The old endpoint has given up its receives with everything else. */
    rail->unposted_count = 0;
    stage_reset(rail);
    for (size_t i = 0; i < rail->inflight.count; i++)
        if (rail->inflight.slots[i].kind == OPERATION_RECEIVE)
            rail->unposted[rail->unposted_count++] = &rail->inflight.slots[i];
    rail_post_receives(rail);
    return EKV_OK;
}

void rail_close(struct rail *rail)
{
    rail_close_endpoint(rail);
    stage_close(rail);
    fid_close(rail->messages_mr ? &rail->messages_mr->fid : NULL);
    rail_close_queues(rail);
    fid_close(rail->domain ? &rail->domain->fid : NULL);
    fid_close(rail->fabric ? &rail->fabric->fid : NULL);
    rail->messages_mr = NULL;
    rail->domain = NULL;
    rail->fabric = NULL;
    inflight_close(&rail->inflight);
    free(rail->unposted);
    free(rail->messages);
    free(rail->known);
    rail->unposted = NULL;
    rail->messages = NULL;
    rail->known = NULL;
    if (rail->info)
        rail->library->freeinfo(rail->info);
    rail->info = NULL;
}

/* From libfabric 1.20 on (fi_mr(3)); the headers built against may be older. */
#define RAIL_DMABUF_VERSION FI_VERSION(1, 20)
#define RAIL_MR_DMABUF (UINT64_C(1) << 40)

struct rail_dmabuf {
    int fd;
    uint64_t offset;
    size_t length;
    void *base;
};

/* The struct grows with libfabric versions newer than the headers. */
union registration_entry {
    struct fi_mr_attr entry;
    uint8_t room[256];
};

static int rail_register_device(struct rail *rail, const struct rail_memory *memory,
                                uint64_t access, uint64_t key, struct fid_mr **mr)
{
    struct iovec range = {.iov_base = memory->address, .iov_len = memory->length};
    struct rail_dmabuf dmabuf = {.fd = memory->dmabuf,
                                 .offset =
                                     (uint64_t)(uintptr_t)memory->address - memory->dmabuf_base,
                                 .length = memory->length,
                                 .base = (void *)(uintptr_t)memory->dmabuf_base};
    union registration_entry attributes;
    int answer = -FI_ENOSYS;

    memset(&attributes, 0, sizeof attributes);
    attributes.entry.iov_count = 1;
    attributes.entry.access = access;
    attributes.entry.requested_key = key;
    attributes.entry.iface = FI_HMEM_CUDA;
    attributes.entry.device.cuda = memory->device;
    if (memory->dmabuf >= 0 && FI_VERSION_GE(rail->library->running_version, RAIL_DMABUF_VERSION)) {
        attributes.entry.mr_iov = (const void *)&dmabuf;
        answer = fi_mr_regattr(rail->domain, &attributes.entry, RAIL_MR_DMABUF, mr);
    }
    if (answer == 0)
        return 0;
    attributes.entry.mr_iov = &range;
    return fi_mr_regattr(rail->domain, &attributes.entry, 0, mr);
}

int rail_register(struct rail *rail, const struct rail_memory *memory, uint64_t access,
                  uint64_t key, struct fid_mr **mr)
{
    uint64_t mode = (uint64_t)rail->info->domain_attr->mr_mode;
    int answer;

    if (mode & FI_MR_PROV_KEY)
        key = 0;
    else if (rail->info->domain_attr->mr_key_size < sizeof key)
        key &= (UINT64_C(1) << (8 * rail->info->domain_attr->mr_key_size)) - 1;
    if (memory->device >= 0)
        answer = rail_register_device(rail, memory, access, key, mr);
    else
        answer =
            fi_mr_reg(rail->domain, memory->address, memory->length, access, 0, key, 0, mr, NULL);
    if (answer == 0 && (mode & FI_MR_ENDPOINT)) {
        answer = fi_mr_bind(*mr, &rail->endpoint->fid, 0);
        if (answer == 0)
            answer = fi_mr_enable(*mr);
        if (answer != 0)
            fi_close(&(*mr)->fid);
    }
    return answer;
}

static struct rail_address *rail_address_find(struct rail *rail, const uint8_t *bytes,
                                              uint32_t length)
{
    for (uint32_t i = 0; i < rail->known_count; i++)
        if (rail->known[i].users > 0 && rail->known[i].length == length &&
            memcmp(rail->known[i].bytes, bytes, length) == 0)
            return &rail->known[i];
    return NULL;
}

/* shm of libfabric 1.17 crashes in a write after an address was removed and another one
 * inserted (seen); there they stay until the rail is reset. */
static bool rail_keeps_addresses(const struct rail *rail)
{
    return rail_is_guarded(rail);
}

bool rail_address_take(struct rail *rail, const uint8_t *bytes, uint32_t length, fi_addr_t *address)
{
    struct rail_address *known = rail_address_find(rail, bytes, length);

    if (!known) {
        struct rail_address made = {.length = length};

        if (length > sizeof made.bytes)
            return false;
        memcpy(made.bytes, bytes, length);
        /* Anything but one inserted address is a failure, whatever errno says. */
        if (fi_av_insert(rail->addresses, made.bytes, 1, &made.address, 0, NULL) != 1) {
            rail->exhausted |= rail->known_idle && rail_keeps_addresses(rail);
            return false;
        }
        if (rail->known_count == rail->known_capacity) {
            uint32_t capacity = rail->known_capacity ? rail->known_capacity * 2 : 16;
            struct rail_address *grown = realloc(rail->known, capacity * sizeof *grown);

            if (!grown)
                return false;
            rail->known = grown;
            rail->known_capacity = capacity;
        }
        known = &rail->known[rail->known_count++];
        *known = made;
    }
    known->users++;
    *address = known->address;
    return true;
}

/* One user less; the entry when it was the last. */
static struct rail_address *rail_address_leave(struct rail *rail, fi_addr_t address)
{
    uint32_t i = 0;

    while (i < rail->known_count &&
           (rail->known[i].users == 0 || rail->known[i].address != address))
        i++;
    assert(i < rail->known_count);
    return --rail->known[i].users == 0 ? &rail->known[i] : NULL;
}

/* Removed, so that a new engine at this address gets a new connection. */
static void rail_address_remove(struct rail *rail, struct rail_address *known)
{
    fi_av_remove(rail->addresses, &known->address, 1, 0);
    *known = rail->known[--rail->known_count];
}

void rail_address_give(struct rail *rail, fi_addr_t address)
{
    struct rail_address *known = rail_address_leave(rail, address);

    if (!known)
        return;
    if (rail_keeps_addresses(rail))
        rail->known_idle = true;
    else
        rail_address_remove(rail, known);
}

void rail_address_retire(struct rail *rail, fi_addr_t address)
{
    rail->known_idle |= rail_address_leave(rail, address) != NULL;
}

void rail_address_sweep(struct rail *rail)
{
    if (!rail->known_idle || rail->in_flight > 0 || rail_keeps_addresses(rail))
        return;
    rail->known_idle = false;
    for (uint32_t i = rail->known_count; i-- > 0;)
        if (rail->known[i].users == 0)
            rail_address_remove(rail, &rail->known[i]);
}
