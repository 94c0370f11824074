#include "sysfs.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_SIZE = 512 };

static bool has_failed;

static void make_directories(const char *path)
{
    char part[PATH_SIZE];
    for (size_t i = 1; path[i - 1]; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0755) != 0 && errno != EEXIST)
            has_failed = true;
    }
}

/* Several processes may write the same tree at once: each file appears whole or not at all. */
static void write_file(const char *directory, const char *name, const char *format, ...)
{
    char path[PATH_SIZE], temporary[PATH_SIZE + 32];
    va_list arguments;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid());
    FILE *file = fopen(temporary, "w");
    if (!file) {
        has_failed = true;
        return;
    }
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    if (fclose(file) != 0 || rename(temporary, path) != 0)
        has_failed = true;
}

static void make_link(const char *target, const char *path)
{
    if (symlink(target, path) != 0 && errno != EEXIST)
        has_failed = true;
}

static void write_device_files(const char *directory, const struct pci_place *place,
                               const char *class, const char *vendor, const char *device)
{
    write_file(directory, "class", "%s\n", class);
    write_file(directory, "vendor", "%s\n", vendor);
    write_file(directory, "device", "%s\n", device);
    write_file(directory, "numa_node", "%d\n", place->numa_node);
}

/* Root port, switch, port of the switch, device: the depth that a p5 shows. */
static void write_pci_device(const char *root, const struct pci_place *place, int port,
                             const char *class, const char *vendor, const char *device,
                             const char *rdma_name)
{
    char relative[128], directory[PATH_SIZE], link[PATH_SIZE + 64], target[256];
    snprintf(relative, sizeof relative,
             "devices/pci0000:%02x/0000:%02x:00.0/0000:%02x:00.0/0000:%02x:01.%x/0000:%02x:%02x.0",
             place->root_bus, place->root_bus, place->root_bus + 1, place->root_bus + 2, port,
             place->bus, place->slot);
    snprintf(directory, sizeof directory, "%s/%s", root, relative);
    make_directories(directory);
    write_device_files(directory, place, class, vendor, device);
    snprintf(link, sizeof link, "%s/bus/pci/devices/0000:%02x:%02x.0", root, place->bus,
             place->slot);
    snprintf(target, sizeof target, "../../../%s", relative);
    make_link(target, link);
    if (!rdma_name)
        return;
    snprintf(link, sizeof link, "%s/infiniband/%s", directory, rdma_name);
    make_directories(link);
    snprintf(target, sizeof target, "../../../0000:%02x:%02x.0", place->bus, place->slot);
    strcat(link, "/device");
    make_link(target, link);
    snprintf(link, sizeof link, "%s/class/infiniband/%s", root, rdma_name);
    snprintf(target, sizeof target, "../../%s/infiniband/%s", relative, rdma_name);
    make_link(target, link);
}

bool sysfs_write(const struct settings *settings)
{
    const struct instance *instance = settings->instance;
    char directory[PATH_SIZE];
    has_failed = strlen(settings->sysfs_directory) > PATH_SIZE / 2;
    if (!has_failed) {
        snprintf(directory, sizeof directory, "%s/bus/pci/devices", settings->sysfs_directory);
        make_directories(directory);
        snprintf(directory, sizeof directory, "%s/class/infiniband", settings->sysfs_directory);
        make_directories(directory);
        for (int nic = 0; nic < settings->nic_count; nic++) {
            struct pci_place place = instance_nic_place(instance, nic);
            write_pci_device(settings->sysfs_directory, &place, nic % instance->nics_per_switch,
                             "0x020000", "0x1d0f", "0xefa2", settings->device_names[nic]);
        }
        for (int gpu = 0; gpu < instance_gpu_count(instance); gpu++) {
            struct pci_place place = instance_gpu_place(instance, gpu);
            write_pci_device(settings->sysfs_directory, &place,
                             instance->nics_per_switch + gpu % instance->gpus_per_switch,
                             "0x030200", "0x10de", "0x2330", NULL);
        }
    }
    if (has_failed)
        fprintf(stderr, "simnic: cannot write the tree %s\n", settings->sysfs_directory);
    return !has_failed;
}
