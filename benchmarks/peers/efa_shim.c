/* efa_shim.c - preloaded into a program that looks for EFA devices the way Mooncake's EFA wheel
 * does, on a machine that has none, so that it can be measured beside efa-kv.
 *
 * Such a program lists devices with libibverbs, checks that their files exist, and then asks
 * libfabric for the provider "efa" and the domain "<device>-rdm".  This library
 *  - lists the devices named in EFA_SHIM_DEVICES (with commas between),
 *  - lets the checks of files under /dev/infiniband and /sys/class/infiniband succeed, and
 *  - with EFA_SHIM_PROVIDER, gives that software provider when "efa" is asked for, with memory
 *    keys and virtual addresses as EFA has them.  Without it the provider "efa" is left alone,
 *    which is how the simulated NIC is used.
 * All later calls go through tables inside libfabric's objects and need no help.
 *
 * The structs below are the parts of libibverbs' stable ABI that are touched; libibverbs' headers
 * are not needed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define VERBS_FILES "/dev/infiniband/"
#define VERBS_CLASS "/sys/class/infiniband/"

enum { DEVICES_MAX = 32, PORT_ACTIVE = 4 };

struct ibv_device {
    void *operations[2];
    int node_type;
    int transport_type;
    char name[64];
    char dev_name[64];
    char dev_path[256];
    char ibdev_path[256];
};

struct ibv_context {
    struct ibv_device *device;
    char rest[1024];
};

struct ibv_device_attr {
    char firmware[64];
    uint64_t guids[2];
    uint64_t max_mr_size;
    char counts[136];
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay;
    uint8_t phys_port_cnt;
};

struct ibv_port_attr {
    int state;
    int max_mtu;
    int active_mtu;
    int gid_tbl_len;
};

static struct ibv_device devices[DEVICES_MAX];
static struct ibv_device *device_list[DEVICES_MAX + 1];

static void *next_symbol(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

/* The fabric libraries list devices too; they must go on finding none. */
static int is_fabric_library(const void *caller)
{
    static const char *const libraries[] = {"libfabric",  "-fi.so",    "libefa",
                                            "libibverbs", "librdmacm", "psm"};
    Dl_info place;

    if (!dladdr(caller, &place) || !place.dli_fname)
        return 0;
    for (size_t i = 0; i < sizeof libraries / sizeof libraries[0]; i++)
        if (strstr(place.dli_fname, libraries[i]))
            return 1;
    return 0;
}

struct ibv_device **ibv_get_device_list(int *count)
{
    const char *names = getenv("EFA_SHIM_DEVICES");
    int found = 0;

    if (names && !is_fabric_library(__builtin_return_address(0)))
        while (*names && found < DEVICES_MAX) {
            int length = (int)strcspn(names, ",");
            struct ibv_device *device = &devices[found];

            snprintf(device->name, sizeof device->name, "%.*s", length, names);
            snprintf(device->dev_name, sizeof device->dev_name, "uverbs%d", found);
            device_list[found++] = device;
            names += length + (names[length] == ',');
        }
    device_list[found] = NULL;
    if (count)
        *count = found;
    return device_list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    (void)list;
}

const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct ibv_context *context = calloc(1, sizeof *context);

    if (context)
        context->device = device;
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes)
{
    (void)context;
    memset(attributes, 0, sizeof *attributes);
    attributes->max_mr_size = UINT64_C(1) << 37;
    attributes->phys_port_cnt = 1;
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attributes)
{
    (void)context;
    (void)port;
    attributes->state = PORT_ACTIVE;
    attributes->gid_tbl_len = 1;
    return 0;
}

int stat(const char *path, struct stat *result)
{
    int (*real)(const char *, struct stat *) = next_symbol("stat");

    return real(strncmp(path, VERBS_FILES, strlen(VERBS_FILES)) == 0 ? "/dev/null" : path, result);
}

int access(const char *path, int mode)
{
    int (*real)(const char *, int) = next_symbol("access");

    return real(strncmp(path, VERBS_FILES, strlen(VERBS_FILES)) == 0 ? "/dev/null" : path, mode);
}

char *__realpath_chk(const char *path, char *resolved, size_t length)
{
    char *(*real)(const char *, char *, size_t) = next_symbol("__realpath_chk");

    if (strncmp(path, VERBS_CLASS, strlen(VERBS_CLASS)) == 0)
        return strcpy(resolved, "/sys/devices");
    return real(path, resolved, length);
}

typedef int getinfo_function(uint32_t, const char *, const char *, uint64_t, const struct fi_info *,
                             struct fi_info **);

static int redirected(getinfo_function *real, uint32_t version, const struct fi_info *hints,
                      const char *provider, struct fi_info **info)
{
    struct fi_info *wanted = fi_dupinfo(hints);
    int code;

    if (!wanted)
        return -FI_ENOMEM;
    free(wanted->fabric_attr->prov_name);
    free(wanted->fabric_attr->name);
    free(wanted->domain_attr->name);
    wanted->fabric_attr->prov_name = strdup(provider);
    wanted->fabric_attr->name = NULL;
    wanted->domain_attr->name = NULL;
    wanted->domain_attr->mr_mode = FI_MR_BASIC;
    code = real(version, "127.0.0.1", NULL, FI_SOURCE, wanted, info);
    fi_freeinfo(wanted);
    return code;
}

/* Newer libraries come back here from inside their older version of the same function, and then
 * mean the newest one. */
static _Thread_local int is_inside;

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
               const struct fi_info *hints, struct fi_info **info)
{
    const char *provider = getenv("EFA_SHIM_PROVIDER");
    getinfo_function *real = NULL;
    int is_for_efa = provider && hints && hints->fabric_attr && hints->fabric_attr->prov_name &&
                     strcmp(hints->fabric_attr->prov_name, "efa") == 0;
    int code;

    if (!is_inside)
        real = (getinfo_function *)dlvsym(RTLD_NEXT, "fi_getinfo", "FABRIC_1.3");
    if (!real)
        real = (getinfo_function *)next_symbol("fi_getinfo");
    if (!real)
        return -FI_ENOSYS;
    if (is_inside)
        return real(version, node, service, flags, hints, info);
    /* The wheel asks for a newer interface than it uses. */
    if (FI_VERSION_LT(fi_version(), version))
        version = fi_version();
    is_inside = 1;
    code = is_for_efa ? redirected(real, version, hints, provider, info)
                      : real(version, node, service, flags, hints, info);
    is_inside = 0;
    return code;
}
