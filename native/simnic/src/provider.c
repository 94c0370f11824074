/* The entry point that libfabric calls when it loads the provider. */
#include "info.h"
#include "objects.h"
#include "sysfs.h"

#include <dlfcn.h>
#include <rdma/providers/fi_prov.h>
#include <stdio.h>

static struct libfabric libfabric;

static int get_info(uint32_t version, const char *node, const char *service, uint64_t flags,
                    const struct fi_info *hints, struct fi_info **result)
{
    static bool tree_is_written;
    const struct settings *settings = settings_get();
    (void)version;
    (void)node;
    (void)service;
    (void)flags;
    if (!settings)
        return -FI_ENODATA;
    if (settings->sysfs_directory && !tree_is_written)
        tree_is_written = sysfs_write(settings);
    return info_get(&libfabric, settings, hints, result);
}

static void clean_up(void)
{
}

static struct fi_provider provider = {
    .version = SIMNIC_VERSION,
    .name = "efa",
    .getinfo = get_info,
    .fabric = fabric_open,
    .cleanup = clean_up,
};

static void *library_symbol(void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    if (!symbol)
        fprintf(stderr, "simnic: no %s in the libfabric that loads this provider\n", name);
    return symbol;
}

/* The copy of libfabric that calls: found by the address it returns to, since it may have been
 * loaded under any name and without RTLD_GLOBAL, beside other copies. */
static void *calling_library(const void *return_address)
{
    Dl_info caller;
    void *library = NULL;
    if (dladdr(return_address, &caller) && caller.dli_fname)
        library = dlopen(caller.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (library && dlsym(library, "fi_dupinfo"))
        return library;
    library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_NOLOAD);
    return library ? library : RTLD_DEFAULT;
}

/* The provider is linked with no libfabric, so that one file serves all versions: it takes the
 * functions of the copy that loads it, in their newest form, since fi_info must have the layout
 * that this copy works with. */
FI_EXT_INI
{
    void *library = calling_library(__builtin_return_address(0));
    uint32_t (*version)(void);
    *(void **)&libfabric.dupinfo = library_symbol(library, "fi_dupinfo");
    *(void **)&libfabric.freeinfo = library_symbol(library, "fi_freeinfo");
    *(void **)&version = library_symbol(library, "fi_version");
    if (!libfabric.dupinfo || !libfabric.freeinfo || !version)
        return NULL;
    provider.fi_version = version();
    return &provider;
}
