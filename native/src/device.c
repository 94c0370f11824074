/* device.c - see device.h. */
#define _GNU_SOURCE
#include "device.h"

#include <assert.h>
#include <fnmatch.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "place.h"

/* fabric_attr.prov_version of the oldest EFA provider that uses the device's own RDMA
 * on every instance type: libfabric 1.18 calls its providers 118.0. */
#define DEVICE_EFA_VERSION FI_VERSION(118, 0)

#define DEVICE_TRIES_MAX 4

/* What a protocol means, in the order tried.  Over TCP the native endpoint is taken
 * first: it acknowledges a write only when it was placed at the target, reports a
 * killed peer on every operation, and needs no second layer of connections.  Its name
 * is "net" up to libfabric 1.17 (there "tcp" has no such endpoint) and "tcp" since. */
struct device_protocol {
    const char *name;
    const char *providers[DEVICE_TRIES_MAX];
};

static const struct device_protocol protocols[] = {
    {"tcp", {"tcp", "net", "tcp;ofi_rxm", NULL}},
    {"shm", {"shm", NULL}},
    {"efa", {"efa", NULL}},
};

static struct fi_info *device_hints(const struct fabric *fabric, const char *provider,
                                    uint64_t op_flags, uint64_t caps)
{
    struct fi_info *hints = fabric->dupinfo(NULL);

    if (!hints)
        return NULL;
    hints->caps = FI_MSG | FI_RMA | caps;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->tx_attr->op_flags = op_flags;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
                                  FI_MR_ENDPOINT | (caps & FI_HMEM ? FI_MR_HMEM : 0);
    hints->fabric_attr->prov_name = strdup(provider);
    if (!hints->fabric_attr->prov_name) {
        fabric->freeinfo(hints);
        return NULL;
    }
    return hints;
}

/* Comma-separated names or globs; NULL or empty matches everything. */
static bool device_is_wanted(const char *devices, const char *name)
{
    char pattern[EKV_NAME_BYTES];

    if (!devices || !devices[0])
        return true;
    while (*devices) {
        size_t length = strcspn(devices, ",");

        if (length > 0 && length < sizeof pattern) {
            memcpy(pattern, devices, length);
            pattern[length] = '\0';
            if (fnmatch(pattern, name, 0) == 0)
                return true;
        }
        devices += length;
        if (*devices == ',')
            devices++;
    }
    return false;
}

static bool info_is_usable(const struct fi_info *info, const char *provider,
                           const ekv_options *options)
{
    const struct fi_info *i = info;

    return strcmp(i->fabric_attr->prov_name, provider) == 0 && i->domain_attr->name &&
           i->ep_attr->type == FI_EP_RDM && (i->caps & FI_RMA) && (i->caps & FI_MSG) &&
           (i->addr_format != FI_SOCKADDR_IN6 || options->host) &&
           device_is_wanted(options->devices, i->domain_attr->name);
}

static bool fabric_is_direct(const struct fi_info *info)
{
    return strcmp(info->fabric_attr->name, "efa-direct") == 0;
}

/* One rail per domain name.  EFA offers each device on two fabrics; the lighter one
 * wins when it is there. */
static int device_list_put(struct device_list *list, const struct fabric *fabric,
                           const struct fi_info *info)
{
    uint32_t at = 0;
    struct fi_info *copy;

    while (at < list->count &&
           strcmp(list->infos[at]->domain_attr->name, info->domain_attr->name) != 0)
        at++;
    if (at < list->count && (!fabric_is_direct(info) || fabric_is_direct(list->infos[at])))
        return EKV_OK;
    if (at == DEVICES_MAX)
        return EKV_OK;
    copy = fabric->dupinfo(info);
    if (!copy)
        return EKV_ENOMEM;
    if (at < list->count)
        fabric->freeinfo(list->infos[at]);
    else
        list->count++;
    list->infos[at] = copy;
    return EKV_OK;
}

static bool protocol_is_ip(const char *provider)
{
    return strncmp(provider, "tcp", 3) == 0 || strncmp(provider, "net", 3) == 0 ||
           strncmp(provider, "udp", 3) == 0 || strcmp(provider, "sockets") == 0;
}

/* Asks one provider; *provider_code keeps the last answer. */
static int device_query(struct device_list *list, const struct fabric *fabric,
                        const ekv_options *options, const char *provider, uint64_t op_flags,
                        bool gpus, int *provider_code)
{
    const char *node = NULL;
    /* shm cannot wake us, and a target's share of the work leaves no completion: ask for
     * a count of it, so that the progress thread knows when it is needed. */
    uint64_t caps = (strcmp(provider, "shm") == 0 ? FI_RMA_EVENT : 0) | (gpus ? FI_HMEM : 0);
    struct fi_info *hints = device_hints(fabric, provider, op_flags, caps);
    struct fi_info *found = NULL;
    int code = EKV_OK;

    if (!hints)
        return EKV_ENOMEM;
    if (protocol_is_ip(provider) && (options->host || !options->devices))
        node = options->host ? options->host : "127.0.0.1";
    *provider_code =
        fabric->getinfo(fabric->api_version, node, NULL, node ? FI_SOURCE : 0, hints, &found);
    fabric->freeinfo(hints);
    if (*provider_code != 0)
        return EKV_OK;
    for (struct fi_info *info = found; info && code == EKV_OK; info = info->next)
        if (info_is_usable(info, provider, options))
            code = device_list_put(list, fabric, info);
    fabric->freeinfo(found);
    return code;
}

static int device_check_version(const struct device_list *list, ekv_error *error)
{
    const struct fi_info *info = list->infos[0];

    if (strcmp(info->fabric_attr->prov_name, "efa") != 0 ||
        info->fabric_attr->prov_version >= DEVICE_EFA_VERSION)
        return EKV_OK;
    return error_set(error, EKV_EVERSION, (int)info->fabric_attr->prov_version, "fi_getinfo",
                     "the efa provider is %u.%u; before 118.0 (libfabric 1.18) it emulates RDMA "
                     "on newer instances. Install the current EFA software or set "
                     "EFA_KV_LIBFABRIC to a newer libfabric",
                     FI_MAJOR(info->fabric_attr->prov_version),
                     FI_MINOR(info->fabric_attr->prov_version));
}

static int device_by_name(const void *a, const void *b)
{
    const struct fi_info *const *left = a;
    const struct fi_info *const *right = b;

    /* Numeric-aware, so that rdmap80s0 comes before rdmap130s0. */
    return strverscmp((*left)->domain_attr->name, (*right)->domain_attr->name);
}

/* Of the providers that can reach GPU memory only EFA is trusted with it: shm's copies
 * ignore whose memory it is (reported to libfabric), and the others copy it themselves. */
static bool provider_reaches_gpus(const char *provider)
{
    return strncmp(provider, "efa", 3) == 0;
}

/* The best that a provider offers: GPU memory first, then completions that mean landed. */
static int device_query_best(struct device_list *list, const struct fabric *fabric,
                             const ekv_options *options, const char *provider, bool gpus,
                             int *provider_code)
{
    const uint64_t flags[] = {FI_DELIVERY_COMPLETE, 0};
    int code = EKV_OK;

    for (int with = gpus && provider_reaches_gpus(provider); with >= 0; with--)
        for (size_t i = 0; i < 2 && list->count == 0 && code == EKV_OK; i++)
            code = device_query(list, fabric, options, provider, flags[i], with, provider_code);
    return code;
}

int device_list_open(struct device_list *list, const struct fabric *fabric,
                     const ekv_options *options, bool gpus, ekv_error *error)
{
    const char *const *providers = NULL;
    const char *alone[] = {options->protocol, NULL};
    int provider_code = 0;

    memset(list, 0, sizeof *list);
    for (size_t i = 0; i < sizeof protocols / sizeof protocols[0]; i++)
        if (strcmp(protocols[i].name, options->protocol) == 0)
            providers = protocols[i].providers;
    if (!providers)
        providers = alone;
    for (size_t i = 0; providers[i] && list->count == 0; i++)
        if (device_query_best(list, fabric, options, providers[i], gpus, &provider_code) !=
            EKV_OK) {
            device_list_close(list, fabric);
            return error_set(error, EKV_ENOMEM, 0, "fi_getinfo", "out of memory");
        }
    if (list->count == 0)
        return error_set(
            error, EKV_ENODEVICE, -provider_code, "fi_getinfo",
            "no device for protocol \"%s\"%s%s%s%s in libfabric %u.%u (%s)%s%s", options->protocol,
            options->host ? ", host " : "", options->host ? options->host : "",
            options->devices ? ", devices " : "", options->devices ? options->devices : "",
            FI_MAJOR(fabric->running_version), FI_MINOR(fabric->running_version), fabric->path,
            provider_code ? ": " : "", provider_code ? fabric->strerror(-provider_code) : "");
    qsort(list->infos, list->count, sizeof list->infos[0], device_by_name);
    if (device_check_version(list, error) != EKV_OK) {
        device_list_close(list, fabric);
        return EKV_EVERSION;
    }
    return EKV_OK;
}

void device_list_close(struct device_list *list, const struct fabric *fabric)
{
    for (uint32_t i = 0; i < list->count; i++)
        if (list->infos[i])
            fabric->freeinfo(list->infos[i]);
    list->count = 0;
}

static void device_describe_place(const struct fi_info *info, const char *sysfs_root, ekv_nic *nic,
                                  struct place *place)
{
    if (info->nic && info->nic->bus_attr && info->nic->bus_attr->bus_type == FI_BUS_PCI) {
        const struct fi_pci_attr *pci = &info->nic->bus_attr->attr.pci;

        snprintf(nic->pci, sizeof nic->pci, "%04x:%02x:%02x.%x", pci->domain_id, pci->bus_id,
                 pci->device_id, pci->function_id);
        place_of_pci(sysfs_root, nic->pci, place);
    } else {
        place_of_interface(sysfs_root, nic->name, nic->pci, place);
    }
    nic->numa_node = place->numa_node;
    if (info->nic && info->nic->link_attr && info->nic->link_attr->speed)
        nic->speed_bits_per_second = info->nic->link_attr->speed;
    else
        nic->speed_bits_per_second = place_interface_speed(sysfs_root, nic->name);
}

void device_describe(const struct fi_info *info, const char *sysfs_root, ekv_nic *nic,
                     struct place *place)
{
    uint64_t mode = (uint64_t)info->domain_attr->mr_mode;

    memset(nic, 0, sizeof *nic);
    snprintf(nic->name, sizeof nic->name, "%s", info->domain_attr->name);
    snprintf(nic->fabric, sizeof nic->fabric, "%s", info->fabric_attr->name);
    snprintf(nic->provider, sizeof nic->provider, "%s", info->fabric_attr->prov_name);
    nic->provider_queue_depth = (uint32_t)info->tx_attr->size;
    if (mode & FI_MR_VIRT_ADDR)
        nic->flags |= EKV_NIC_VIRTUAL_ADDRESS;
    if (mode & FI_MR_LOCAL)
        nic->flags |= EKV_NIC_LOCAL_KEYS;
    if (mode & FI_MR_PROV_KEY)
        nic->flags |= EKV_NIC_PROVIDER_KEYS;
    if (info->tx_attr->op_flags & FI_DELIVERY_COMPLETE)
        nic->flags |= EKV_NIC_DELIVERY_COMPLETE;
    if (info->caps & FI_HMEM)
        nic->flags |= EKV_NIC_DEVICE_MEMORY;
    /* The device checks the key of every packet and flushes what it drops.  A software
     * provider checks once and then receives into the buffer for as long as it takes. */
    if (strncmp(nic->provider, "efa", 3) == 0)
        nic->flags |= EKV_NIC_FENCES;
    device_describe_place(info, sysfs_root, nic, place);
}
