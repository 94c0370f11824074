/* What is simulated: read once from the EFA_KV_SIM_* variables (README.md lists them). */
#ifndef SIMNIC_SETTINGS_H
#define SIMNIC_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fault.h"
#include "instance.h"

#define SIMNIC_DEVICE_NAME_SIZE 32
#define SIMNIC_HOST_NAME_SIZE 32
#define SIMNIC_MAX_FABRICS 2

enum thread_check { THREAD_CHECK_AUTO, THREAD_CHECK_OFF, THREAD_CHECK_ON };

struct settings {
    const struct instance *instance;
    int nic_count;
    char device_names[SIMNIC_MAX_NICS][SIMNIC_DEVICE_NAME_SIZE];
    const char *fabrics[SIMNIC_MAX_FABRICS];
    int fabric_count;
    char host_name[SIMNIC_HOST_NAME_SIZE]; /* empty: every process is a host of its own */
    const char *sysfs_directory;           /* NULL: no tree is written */
    double rate_gbps;                      /* per NIC and direction; 0: as fast as memory */
    double operation_rate;                 /* per NIC and second; 0: no limit */
    double latency_us;
    double unresponsive_ms; /* how long a silent peer takes to become an error */
    bool no_copy;
    bool mutual_addresses; /* the target too must have the initiator in its address vector */
    bool device_memory;    /* offer FI_HMEM, taking device pointers as host memory */
    bool statistics;
    enum thread_check thread_check;
    size_t reorder_window; /* 1: completions in order */
    size_t transmit_queue_size;
    size_t receive_queue_size;
    uint64_t max_region_bytes;     /* one registration; 0: no limit */
    uint64_t max_registered_bytes; /* all registrations of a NIC; 0: no limit */
    uint64_t seed;
    struct nic_faults faults[SIMNIC_MAX_NICS];
};

/* NULL when a variable cannot be understood; the reason has then been printed to stderr, once. */
const struct settings *settings_get(void);

#endif
