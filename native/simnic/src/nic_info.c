/* The description of a device that travels in fi_info. */
#include "info.h"
#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* All parts in one piece of memory, which one free gives back. */
struct nic_info {
    struct fid_nic nic;
    struct fi_device_attr device;
    struct fi_bus_attr bus;
    struct fi_link_attr link;
    char name[SIMNIC_DEVICE_NAME_SIZE];
    char address[64];
};

static void point_to_own_parts(struct nic_info *info)
{
    info->nic.device_attr = &info->device;
    info->nic.bus_attr = &info->bus;
    info->nic.link_attr = &info->link;
    info->device.name = info->name;
    info->link.address = info->address;
}

static int close_info(struct fid *fid)
{
    free(fid);
    return 0;
}

static int duplicate(struct fid *fid, int command, void *result)
{
    if (command != FI_DUP)
        return -FI_ENOSYS;
    struct nic_info *copy = malloc(sizeof *copy);
    if (!copy)
        return -FI_ENOMEM;
    memcpy(copy, fid, sizeof *copy);
    point_to_own_parts(copy);
    *(struct fid_nic **)result = &copy->nic;
    return 0;
}

static int to_text(const struct fid *fid, char *text, size_t size)
{
    const struct nic_info *info = (const struct nic_info *)(const void *)fid;
    const struct fi_pci_attr *pci = &info->bus.attr.pci;
    snprintf(
        text, size,
        "nic:\n    fi_device_attr:\n        name: %s\n        device_id: %s\n        driver: %s\n"
        "    fi_bus_attr:\n        bus_type: FI_BUS_PCI\n        pci: %04x:%02x:%02x.%x\n"
        "    fi_link_attr:\n        address: %s\n        mtu: %zu\n        speed: %zu\n",
        info->name, info->device.device_id, info->device.driver, pci->domain_id, pci->bus_id,
        pci->device_id, pci->function_id, info->address, info->link.mtu, info->link.speed);
    return 0;
}

static struct fi_ops nic_fid_ops = {sizeof nic_fid_ops,
                                    close_info,
                                    unsupported_bind,
                                    duplicate,
                                    unsupported_ops_open,
                                    to_text,
                                    NULL};

struct fid_nic *nic_info_new(const struct settings *settings, int nic)
{
    static char device_id[] = "0xefa2", device_version[] = "0x0", vendor_id[] = "0x1d0f",
                driver[] = "efa", firmware[] = "0.0.0.0", network_type[] = "Ethernet";
    struct nic_info *info = calloc(1, sizeof *info);
    if (!info)
        return NULL;
    struct pci_place place = instance_nic_place(settings->instance, nic);
    point_to_own_parts(info);
    info->nic.fid.fclass = FI_CLASS_NIC;
    info->nic.fid.ops = &nic_fid_ops;
    strcpy(info->name, settings->device_names[nic]);
    snprintf(info->address, sizeof info->address, "EFA-fe80::%x", nic + 1);
    info->device.device_id = device_id;
    info->device.device_version = device_version;
    info->device.vendor_id = vendor_id;
    info->device.driver = driver;
    info->device.firmware = firmware;
    info->bus.bus_type = FI_BUS_PCI;
    info->bus.attr.pci.bus_id = place.bus;
    info->bus.attr.pci.device_id = place.slot;
    info->link.mtu = 8928;
    info->link.speed =
        (size_t)((settings->rate_gbps > 0 ? settings->rate_gbps : settings->instance->speed_gbps) *
                 1e9);
    info->link.state = FI_LINK_UP;
    info->link.network_type = network_type;
    return &info->nic;
}
