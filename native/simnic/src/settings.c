#include "settings.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct settings current;
static bool current_is_valid;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool complain(const char *variable, const char *value, const char *reason)
{
    fprintf(stderr, "simnic: %s=%s: %s\n", variable, value, reason);
    return false;
}

/* Leaves the value alone when the variable is absent or empty. */
static bool read_number(const char *variable, double minimum, double maximum, double *value)
{
    const char *text = getenv(variable);
    if (!text || !*text)
        return true;
    char *end;
    errno = 0;
    double number = strtod(text, &end);
    if (errno || end == text || *end)
        return complain(variable, text, "not a number");
    if (!(number >= minimum && number <= maximum))
        return complain(variable, text, "out of range");
    *value = number;
    return true;
}

static bool read_size(const char *variable, double minimum, double maximum, size_t *value)
{
    double number = (double)*value;
    if (!read_number(variable, minimum, maximum, &number))
        return false;
    *value = (size_t)number;
    return true;
}

static bool read_bytes(const char *variable, uint64_t *value)
{
    double number = (double)*value;
    if (!read_number(variable, 0, 1e18, &number))
        return false;
    *value = (uint64_t)number;
    return true;
}

static bool read_switch(const char *variable, bool *value)
{
    double number = *value ? 1 : 0;
    if (!read_number(variable, 0, 1, &number))
        return false;
    *value = number != 0;
    return true;
}

static bool read_instance(struct settings *settings)
{
    const char *name = getenv("EFA_KV_SIM_INSTANCE");
    size_t nic_count = 0;
    if (!read_size("EFA_KV_SIM_NICS", 1, SIMNIC_MAX_NICS, &nic_count))
        return false;
    if (name && *name) {
        settings->instance = instance_by_name(name);
        if (!settings->instance)
            return complain("EFA_KV_SIM_INSTANCE", name, "unknown instance type");
    } else {
        settings->instance = instance_by_nic_count(nic_count ? (int)nic_count : 16);
    }
    if (nic_count > (size_t)settings->instance->nic_count)
        return complain("EFA_KV_SIM_NICS", getenv("EFA_KV_SIM_NICS"),
                        "more than the instance type has");
    settings->nic_count = nic_count ? (int)nic_count : settings->instance->nic_count;
    for (int nic = 0; nic < settings->nic_count; nic++) {
        struct pci_place place = instance_nic_place(settings->instance, nic);
        snprintf(settings->device_names[nic], SIMNIC_DEVICE_NAME_SIZE, "rdmap%us%u", place.bus,
                 place.slot);
    }
    return true;
}

static bool read_fabrics(struct settings *settings)
{
    const char *text = getenv("EFA_KV_SIM_FABRICS");
    settings->fabrics[0] = "efa";
    settings->fabric_count = 1;
    if (!text || !*text || strcmp(text, "efa") == 0)
        return true;
    if (strcmp(text, "efa-direct") == 0) {
        settings->fabrics[0] = "efa-direct";
        return true;
    }
    if (strcmp(text, "efa,efa-direct") != 0 && strcmp(text, "efa-direct,efa") != 0)
        return complain("EFA_KV_SIM_FABRICS", text,
                        "expected efa, efa-direct, or both with a comma");
    bool direct_first = strcmp(text, "efa-direct,efa") == 0;
    settings->fabrics[0] = direct_first ? "efa-direct" : "efa";
    settings->fabrics[1] = direct_first ? "efa" : "efa-direct";
    settings->fabric_count = 2;
    return true;
}

static bool read_host_name(struct settings *settings)
{
    const char *text = getenv("EFA_KV_SIM_HOST");
    if (!text)
        return true;
    if (strlen(text) >= SIMNIC_HOST_NAME_SIZE)
        return complain("EFA_KV_SIM_HOST", text, "too long");
    for (const char *c = text; *c; c++)
        if (!isalnum((unsigned char)*c) && *c != '-' && *c != '_')
            return complain("EFA_KV_SIM_HOST", text, "only letters, digits, '-' and '_'");
    strcpy(settings->host_name, text);
    return true;
}

static bool read_thread_check(struct settings *settings)
{
    const char *text = getenv("EFA_KV_SIM_CHECK_THREADS");
    settings->thread_check = THREAD_CHECK_AUTO;
    if (!text || !*text || strcmp(text, "auto") == 0)
        return true;
    if (strcmp(text, "0") == 0)
        settings->thread_check = THREAD_CHECK_OFF;
    else if (strcmp(text, "1") == 0)
        settings->thread_check = THREAD_CHECK_ON;
    else
        return complain("EFA_KV_SIM_CHECK_THREADS", text, "expected auto, 0 or 1");
    return true;
}

static bool read_faults(struct settings *settings)
{
    const char *text = getenv("EFA_KV_SIM_FAULTS");
    char message[256] = "";
    faults_reset(settings->faults);
    if (!text || !*text)
        return true;
    if (!faults_parse(text, settings->host_name, settings->faults, message, sizeof message))
        return complain("EFA_KV_SIM_FAULTS", text, message);
    fprintf(stderr, "simnic: faults %s, seed %llu\n", text, (unsigned long long)settings->seed);
    return true;
}

static bool read_all(struct settings *settings)
{
    settings->unresponsive_ms = 5;
    settings->mutual_addresses = true;
    settings->reorder_window = 16;
    settings->receive_queue_size = 8192;
    settings->seed = 1;
    settings->sysfs_directory = getenv("EFA_KV_SIM_SYSFS");
    if (settings->sysfs_directory && !*settings->sysfs_directory)
        settings->sysfs_directory = NULL;
    if (!read_instance(settings))
        return false;
    settings->transmit_queue_size = settings->instance->transmit_queue_size;
    return read_fabrics(settings) && read_host_name(settings) && read_thread_check(settings) &&
           read_number("EFA_KV_SIM_RATE_GBPS", 0, 1e6, &settings->rate_gbps) &&
           read_number("EFA_KV_SIM_OP_RATE", 0, 1e12, &settings->operation_rate) &&
           read_number("EFA_KV_SIM_LATENCY_US", 0, 1e9, &settings->latency_us) &&
           read_number("EFA_KV_SIM_UNRESPONSIVE_MS", 0, 1e6, &settings->unresponsive_ms) &&
           read_switch("EFA_KV_SIM_NO_COPY", &settings->no_copy) &&
           read_switch("EFA_KV_SIM_MUTUAL_AV", &settings->mutual_addresses) &&
           read_switch("EFA_KV_SIM_HMEM", &settings->device_memory) &&
           read_switch("EFA_KV_SIM_STATS", &settings->statistics) &&
           read_size("EFA_KV_SIM_REORDER", 1, 65536, &settings->reorder_window) &&
           read_size("FI_EFA_TX_SIZE", 1, 65536, &settings->transmit_queue_size) &&
           read_size("FI_EFA_RX_SIZE", 1, 65536, &settings->receive_queue_size) &&
           read_bytes("EFA_KV_SIM_MAX_REGION_BYTES", &settings->max_region_bytes) &&
           read_bytes("EFA_KV_SIM_MAX_REGISTERED_BYTES", &settings->max_registered_bytes) &&
           read_bytes("EFA_KV_SIM_SEED", &settings->seed) && read_faults(settings);
}

static void read_once(void)
{
    current_is_valid = read_all(&current);
}

const struct settings *settings_get(void)
{
    pthread_once(&once, read_once);
    return current_is_valid ? &current : NULL;
}
