/* fabric.c - see fabric.h. */
#define _GNU_SOURCE
#include "fabric.h"

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

#define FABRIC_SONAME "libfabric.so.1"

/* The EFA provider uses the device's own RDMA only for callers that ask for at least
 * this version.  Nothing we touch changed its layout between it and the oldest
 * headers we compile with. */
#define FABRIC_API_WANTED FI_VERSION(1, 18)

struct mapped_copies {
    unsigned count;
    char device_and_inode[2][64];
    char path[2][256];
};

/* libfabric.so.1.x, and the names that wheels give a bundled copy. */
static bool path_is_libfabric(const char *path)
{
    const char *base = strrchr(path, '/');

    return base && strncmp(base + 1, "libfabric", strlen("libfabric")) == 0 &&
           strstr(base, ".so") != NULL;
}

static void mapped_copies_note(struct mapped_copies *copies, const char *identity, const char *path)
{
    for (unsigned i = 0; i < copies->count && i < 2; i++)
        if (strcmp(copies->device_and_inode[i], identity) == 0)
            return;
    if (copies->count < 2) {
        snprintf(copies->device_and_inode[copies->count], 64, "%s", identity);
        snprintf(copies->path[copies->count], 256, "%s", path);
    }
    copies->count++;
}

static void mapped_copies_find(struct mapped_copies *copies)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char *line = NULL;
    size_t line_bytes = 0;

    memset(copies, 0, sizeof *copies);
    if (!maps)
        return;
    while (getline(&line, &line_bytes, maps) > 0) {
        char device[24], inode[24], path[256];

        if (sscanf(line, "%*s %*s %*s %23s %23s %255[^\n]", device, inode, path) == 3 &&
            path[0] == '/' && path_is_libfabric(path)) {
            char identity[64];

            snprintf(identity, sizeof identity, "%s %s", device, inode);
            mapped_copies_note(copies, identity, path);
        }
    }
    free(line);
    fclose(maps);
}

static void *fabric_dlopen(const struct mapped_copies *copies, const char *libfabric_path,
                           char *reason, size_t reason_bytes)
{
    const char *candidates[] = {libfabric_path, "/opt/amazon/efa/lib/" FABRIC_SONAME,
                                "/opt/amazon/efa/lib64/" FABRIC_SONAME, FABRIC_SONAME};
    void *handle = dlopen(FABRIC_SONAME, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);

    reason[0] = '\0';
    if (!handle && copies->count == 1)
        handle = dlopen(copies->path[0], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    for (size_t i = 0; !handle && i < sizeof candidates / sizeof candidates[0]; i++) {
        if (!candidates[i] || !candidates[i][0])
            continue;
        handle = dlopen(candidates[i], RTLD_NOW | RTLD_LOCAL);
        if (!handle) {
            const char *words = dlerror();
            size_t used = strlen(reason);

            snprintf(reason + used, reason_bytes - used, "%s%s", used ? "; " : "",
                     words ? words : "unknown reason");
        }
    }
    return handle;
}

static int fabric_check_single(ekv_error *error)
{
    struct mapped_copies copies;

    mapped_copies_find(&copies);
    if (copies.count < 2)
        return EKV_OK;
    return error_set(error, EKV_ENOFABRIC, 0, "dlopen",
                     "two copies of libfabric are loaded in this process (%s and %s); their "
                     "providers would fight over the devices. Make every user load the same "
                     "one: set EFA_KV_LIBFABRIC or LD_LIBRARY_PATH to it before the start",
                     copies.path[0], copies.path[1]);
}

static bool fabric_symbols(struct fabric *fabric, void *handle)
{
    struct {
        const char *name;
        void *to;
    } symbols[] = {{"fi_getinfo", &fabric->getinfo},    {"fi_freeinfo", &fabric->freeinfo},
                   {"fi_dupinfo", &fabric->dupinfo},    {"fi_fabric", &fabric->open},
                   {"fi_version", &fabric->version_of}, {"fi_strerror", &fabric->strerror}};

    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *address = dlsym(handle, symbols[i].name);

        if (!address)
            return false;
        memcpy(symbols[i].to, &address, sizeof address);
    }
    return true;
}

int fabric_open(struct fabric *fabric, const char *libfabric_path, ekv_error *error)
{
    struct mapped_copies copies;
    struct link_map *map = NULL;
    char reason[400];
    void *handle;
    uint32_t built = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);

    memset(fabric, 0, sizeof *fabric);
    mapped_copies_find(&copies);
    handle = fabric_dlopen(&copies, libfabric_path, reason, sizeof reason);
    if (!handle)
        return error_set(error, EKV_ENOFABRIC, 0, "dlopen",
                         "libfabric cannot be loaded (%s). Install it (Debian: libfabric1; AWS: "
                         "the EFA installer) or set EFA_KV_LIBFABRIC to libfabric.so.1",
                         reason);
    if (fabric_check_single(error) != EKV_OK)
        return EKV_ENOFABRIC;
    if (!fabric_symbols(fabric, handle))
        return error_set(error, EKV_ENOFABRIC, 0, "dlsym", "%s lacks the libfabric interface",
                         FABRIC_SONAME);
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map)
        snprintf(fabric->path, sizeof fabric->path, "%s", map->l_name);
    fabric->running_version = fabric->version_of();
    fabric->api_version = built > FABRIC_API_WANTED ? built : FABRIC_API_WANTED;
    if (fabric->running_version < fabric->api_version)
        fabric->api_version = fabric->running_version;
    return EKV_OK;
}
