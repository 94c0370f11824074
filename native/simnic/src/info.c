#include "info.h"

#include <stdlib.h>
#include <string.h>

#include "objects.h"

#define SEND_CAPS (FI_MSG | FI_RMA | FI_SEND | FI_READ | FI_WRITE)
#define RECEIVE_CAPS (FI_MSG | FI_RMA | FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_SOURCE)
#define DOMAIN_CAPS (FI_LOCAL_COMM | FI_REMOTE_COMM)
#define ALL_CAPS (SEND_CAPS | RECEIVE_CAPS | DOMAIN_CAPS)
#define REGION_MODE (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)

/* The two whole modes of before API 1.5, which older programs still ask for.  libfabric 2
 * has their names only as deprecated ones. */
enum { MODE_UNSPECIFIED = 0, MODE_BASIC = 1 };

/* Counts that a p5 instance shows. */
enum { COMPLETION_QUEUES = 512, CONTEXTS = 256, PROTOCOL_VERSION = 4 };

static uint64_t offered_caps(const struct settings *settings)
{
    return ALL_CAPS | (settings->device_memory ? FI_HMEM : 0);
}

static bool differs(const char *wanted, const char *offered)
{
    return wanted && strcmp(wanted, offered) != 0;
}

static bool domain_matches(const struct fi_domain_attr *wanted, uint64_t caps)
{
    int needed = REGION_MODE | (caps & FI_HMEM ? FI_MR_HMEM : 0);
    if (!wanted)
        return true;
    if (wanted->mr_mode != MODE_UNSPECIFIED && wanted->mr_mode != MODE_BASIC &&
        (wanted->mr_mode & needed) != needed)
        return false;
    if (wanted->threading == FI_THREAD_FID || wanted->threading == FI_THREAD_ENDPOINT)
        return false;
    return wanted->cq_data_size <= 4 && wanted->mr_key_size <= 4 &&
           (wanted->av_type == FI_AV_UNSPEC || wanted->av_type == FI_AV_TABLE ||
            wanted->av_type == FI_AV_MAP);
}

static bool endpoint_matches(const struct fi_ep_attr *wanted)
{
    if (!wanted)
        return true;
    return (wanted->type == FI_EP_UNSPEC || wanted->type == FI_EP_RDM) &&
           (wanted->protocol == FI_PROTO_UNSPEC || wanted->protocol == FI_PROTO_EFA) &&
           wanted->max_msg_size <= SIMNIC_MAX_RMA_BYTES;
}

/* No order is kept, so asking for any is asking for another provider. */
static bool queues_match(const struct settings *settings, const struct fi_info *hints)
{
    const struct fi_tx_attr *send = hints->tx_attr;
    const struct fi_rx_attr *receive = hints->rx_attr;
    if (send &&
        (send->size > settings->transmit_queue_size || send->inject_size > SIMNIC_INJECT_BYTES ||
         send->iov_limit > 1 || send->rma_iov_limit > 1 || send->msg_order != 0))
        return false;
    return !receive || (receive->size <= settings->receive_queue_size && receive->iov_limit <= 1 &&
                        receive->msg_order == 0);
}

static bool hints_match(const struct settings *settings, const struct fi_info *hints)
{
    if (!hints)
        return true;
    return !(hints->caps & ~offered_caps(settings)) &&
           (hints->addr_format == FI_FORMAT_UNSPEC || hints->addr_format == FI_ADDR_EFA) &&
           domain_matches(hints->domain_attr, hints->caps) && endpoint_matches(hints->ep_attr) &&
           queues_match(settings, hints);
}

/* Asking for a primary capability alone means all the directions of it. */
static uint64_t granted_caps(const struct fi_info *hints)
{
    if (!hints || !hints->caps)
        return ALL_CAPS;
    uint64_t caps = hints->caps | DOMAIN_CAPS;
    if (caps & FI_MSG && !(caps & (FI_SEND | FI_RECV)))
        caps |= FI_SEND | FI_RECV;
    if (caps & FI_RMA && !(caps & (FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)))
        caps |= FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    return caps;
}

static void set_queue_attributes(const struct settings *settings, const struct fi_info *hints,
                                 struct fi_info *info)
{
    bool has_send = hints && hints->tx_attr, has_receive = hints && hints->rx_attr;
    info->tx_attr->caps = info->caps & (SEND_CAPS | FI_HMEM);
    info->tx_attr->mode = info->mode;
    info->tx_attr->op_flags = has_send ? hints->tx_attr->op_flags : 0;
    info->tx_attr->inject_size = SIMNIC_INJECT_BYTES;
    info->tx_attr->size =
        has_send && hints->tx_attr->size ? hints->tx_attr->size : settings->transmit_queue_size;
    info->tx_attr->iov_limit = 1;
    info->tx_attr->rma_iov_limit = 1;
    info->rx_attr->caps = info->caps & (RECEIVE_CAPS | FI_HMEM);
    info->rx_attr->mode = info->mode;
    info->rx_attr->op_flags = has_receive ? hints->rx_attr->op_flags : 0;
    info->rx_attr->size =
        has_receive && hints->rx_attr->size ? hints->rx_attr->size : settings->receive_queue_size;
    info->rx_attr->iov_limit = 1;
    info->ep_attr->type = FI_EP_RDM;
    info->ep_attr->protocol = FI_PROTO_EFA;
    info->ep_attr->protocol_version = PROTOCOL_VERSION;
    info->ep_attr->max_msg_size = SIMNIC_MAX_RMA_BYTES;
    info->ep_attr->tx_ctx_cnt = 1;
    info->ep_attr->rx_ctx_cnt = 1;
}

static void set_domain_attributes(const struct fi_info *hints, struct fi_info *info)
{
    struct fi_domain_attr *domain = info->domain_attr;
    const struct fi_domain_attr *wanted = hints ? hints->domain_attr : NULL;
    domain->threading = wanted && wanted->threading ? wanted->threading : FI_THREAD_SAFE;
    /* The manual page: automatic progress may be asked for, but manual is what there is. */
    domain->control_progress =
        wanted && wanted->control_progress ? wanted->control_progress : FI_PROGRESS_MANUAL;
    domain->data_progress =
        wanted && wanted->data_progress ? wanted->data_progress : FI_PROGRESS_MANUAL;
    domain->resource_mgmt = FI_RM_ENABLED;
    domain->av_type = FI_AV_TABLE;
    domain->mr_mode = REGION_MODE | (info->caps & FI_HMEM ? FI_MR_HMEM : 0);
    if (wanted && wanted->mr_mode == MODE_BASIC)
        domain->mr_mode = MODE_BASIC;
    domain->mr_key_size = 4;
    domain->cq_data_size = 4;
    domain->cq_cnt = COMPLETION_QUEUES;
    domain->ep_cnt = SIMNIC_MAX_ENDPOINTS;
    domain->tx_ctx_cnt = CONTEXTS;
    domain->rx_ctx_cnt = CONTEXTS;
    domain->max_ep_tx_ctx = 1;
    domain->max_ep_rx_ctx = 1;
    domain->mr_iov_limit = 1;
    domain->mr_cnt = REGION_CAPACITY;
    domain->caps = DOMAIN_CAPS;
}

static bool set_names(const struct settings *settings, int nic, const char *fabric,
                      struct fi_info *info)
{
    struct simnic_address *address = calloc(1, sizeof *address);
    char name[SIMNIC_DEVICE_NAME_SIZE + sizeof "-rdm"];
    strcpy(name, settings->device_names[nic]);
    strcat(name, "-rdm");
    info->addr_format = FI_ADDR_EFA;
    info->src_addr = address;
    info->src_addrlen = sizeof *address;
    info->domain_attr->name = strdup(name);
    info->fabric_attr->name = strdup(fabric);
    info->fabric_attr->prov_version = SIMNIC_VERSION;
    info->nic = nic_info_new(settings, nic);
    if (!address || !info->domain_attr->name || !info->fabric_attr->name || !info->nic)
        return false;
    address->gid[0] = 0xfe;
    address->gid[1] = 0x80;
    address->gid[15] = (uint8_t)(nic + 1);
    address->nic = (uint16_t)nic;
    return true;
}

static struct fi_info *new_info(const struct libfabric *libfabric, const struct settings *settings,
                                const struct fi_info *hints, int nic, const char *fabric)
{
    struct fi_info *info = libfabric->dupinfo(NULL);
    if (!info)
        return NULL;
    info->caps = granted_caps(hints);
    info->mode = strcmp(fabric, SIMNIC_DIRECT_FABRIC) == 0 ? FI_CONTEXT2 : 0;
    set_queue_attributes(settings, hints, info);
    set_domain_attributes(hints, info);
    if (set_names(settings, nic, fabric, info))
        return info;
    libfabric->freeinfo(info);
    return NULL;
}

static bool wants_fabric(const struct fi_info *hints, const char *fabric)
{
    if (!hints)
        return true;
    if (hints->fabric_attr && differs(hints->fabric_attr->name, fabric))
        return false;
    /* The light fabric keeps its own state in the context of an operation. */
    return strcmp(fabric, SIMNIC_DIRECT_FABRIC) != 0 || hints->mode & FI_CONTEXT2;
}

static bool wants_device(const struct settings *settings, const struct fi_info *hints, int nic)
{
    size_t length = strlen(settings->device_names[nic]);
    if (!hints || !hints->domain_attr || !hints->domain_attr->name)
        return true;
    return strncmp(hints->domain_attr->name, settings->device_names[nic], length) == 0 &&
           strcmp(hints->domain_attr->name + length, "-rdm") == 0;
}

int info_get(const struct libfabric *libfabric, const struct settings *settings,
             const struct fi_info *hints, struct fi_info **result)
{
    struct fi_info *first = NULL, **next = &first;
    if (!hints_match(settings, hints))
        return -FI_ENODATA;
    for (int fabric = 0; fabric < settings->fabric_count; fabric++) {
        for (int nic = 0; nic < settings->nic_count; nic++) {
            if (!wants_fabric(hints, settings->fabrics[fabric]) ||
                !wants_device(settings, hints, nic))
                continue;
            *next = new_info(libfabric, settings, hints, nic, settings->fabrics[fabric]);
            if (!*next) {
                libfabric->freeinfo(first);
                return -FI_ENOMEM;
            }
            next = &(*next)->next;
        }
    }
    *result = first;
    return first ? 0 : -FI_ENODATA;
}
