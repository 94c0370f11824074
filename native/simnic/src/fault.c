#include "fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "provider_error.h"

enum field_type { FIELD_COUNT, FIELD_NUMBER, FIELD_CODE };

struct field {
    const char *name;
    enum field_type type;
    size_t offset;
};

static const struct field FIELDS[] = {
    {"error_at_op", FIELD_COUNT, offsetof(struct nic_faults, error_at_op)},
    {"error_rate", FIELD_NUMBER, offsetof(struct nic_faults, error_rate)},
    {"error_code", FIELD_CODE, offsetof(struct nic_faults, error_code)},
    {"die_at_op", FIELD_COUNT, offsetof(struct nic_faults, die_at_op)},
    {"stall_at_op", FIELD_COUNT, offsetof(struct nic_faults, stall_at_op)},
    {"vanish_at_op", FIELD_COUNT, offsetof(struct nic_faults, vanish_at_op)},
    {"die_after_ms", FIELD_NUMBER, offsetof(struct nic_faults, die_after_ms)},
    {"stall_after_ms", FIELD_NUMBER, offsetof(struct nic_faults, stall_after_ms)},
    {"vanish_after_ms", FIELD_NUMBER, offsetof(struct nic_faults, vanish_after_ms)},
    {"recover_after_ms", FIELD_NUMBER, offsetof(struct nic_faults, recover_after_ms)},
    {"slow", FIELD_NUMBER, offsetof(struct nic_faults, slow)},
    {"eagain", FIELD_NUMBER, offsetof(struct nic_faults, eagain)},
};
enum { FIELD_TOTAL = sizeof FIELDS / sizeof FIELDS[0], MAX_PAIRS = 16 };

/* One fault while it is read: the NICs it is for and the values it sets. */
struct parsed_fault {
    int nic; /* -1: all */
    bool applies;
    int value_count;
    const struct field *fields[MAX_PAIRS];
    double values[MAX_PAIRS];
};

void faults_reset(struct nic_faults faults[SIMNIC_MAX_NICS])
{
    for (int nic = 0; nic < SIMNIC_MAX_NICS; nic++) {
        memset(&faults[nic], 0, sizeof faults[nic]);
        faults[nic].error_code = PROVIDER_ERROR_REMOTE_BAD_ADDRESS;
        faults[nic].die_after_ms = -1;
        faults[nic].stall_after_ms = -1;
        faults[nic].vanish_after_ms = -1;
        faults[nic].recover_after_ms = -1;
        faults[nic].slow = 1;
    }
}

static const struct field *field_by_name(const char *name)
{
    for (int i = 0; i < FIELD_TOTAL; i++)
        if (strcmp(FIELDS[i].name, name) == 0)
            return &FIELDS[i];
    return NULL;
}

static bool value_in_range(const struct field *field, double value)
{
    if (strcmp(field->name, "slow") == 0)
        return value > 0 && value <= 1;
    if (strcmp(field->name, "eagain") == 0 || strcmp(field->name, "error_rate") == 0)
        return value >= 0 && value <= 1;
    if (field->type == FIELD_NUMBER)
        return value >= 0;
    return value >= 1 && value == (double)(uint64_t)value;
}

/* Reads "name=value". */
static bool parse_pair(char *pair, const char *host_name, struct parsed_fault *fault, char *message,
                       size_t size)
{
    char *value = strchr(pair, '=');
    if (!value) {
        snprintf(message, size, "'%s' is not name=value", pair);
        return false;
    }
    *value++ = '\0';
    if (strcmp(pair, "host") == 0) {
        fault->applies = strcmp(value, host_name) == 0;
        return true;
    }
    char *end;
    errno = 0;
    double number = strtod(value, &end);
    if (errno || end == value || *end) {
        snprintf(message, size, "%s: '%s' is not a number", pair, value);
        return false;
    }
    if (strcmp(pair, "nic") == 0) {
        if (number < 0 || number >= SIMNIC_MAX_NICS || number != (double)(int)number) {
            snprintf(message, size, "nic: %s is not between 0 and %d", value, SIMNIC_MAX_NICS - 1);
            return false;
        }
        fault->nic = (int)number;
        return true;
    }
    const struct field *field = field_by_name(pair);
    if (!field || !value_in_range(field, number) || fault->value_count == MAX_PAIRS) {
        snprintf(message, size, field ? "%s: %s is out of range" : "unknown fault '%s' (=%s)", pair,
                 value);
        return false;
    }
    fault->fields[fault->value_count] = field;
    fault->values[fault->value_count++] = number;
    return true;
}

static void store(struct nic_faults *faults, const struct field *field, double value)
{
    char *place = (char *)faults + field->offset;
    if (field->type == FIELD_COUNT)
        *(uint64_t *)(void *)place = (uint64_t)value;
    else if (field->type == FIELD_CODE)
        *(uint32_t *)(void *)place = (uint32_t)value;
    else
        *(double *)(void *)place = value;
}

bool faults_parse(const char *text, const char *host_name,
                  struct nic_faults faults[SIMNIC_MAX_NICS], char *message, size_t message_size)
{
    char copy[2048];
    if (strlen(text) >= sizeof copy) {
        snprintf(message, message_size, "too long");
        return false;
    }
    strcpy(copy, text);
    char *fault_rest = NULL;
    for (char *one = strtok_r(copy, ";", &fault_rest); one;
         one = strtok_r(NULL, ";", &fault_rest)) {
        struct parsed_fault fault = {.nic = -1, .applies = true};
        char *pair_rest = NULL;
        for (char *pair = strtok_r(one, ", ", &pair_rest); pair;
             pair = strtok_r(NULL, ", ", &pair_rest))
            if (!parse_pair(pair, host_name, &fault, message, message_size))
                return false;
        if (!fault.applies)
            continue;
        for (int nic = 0; nic < SIMNIC_MAX_NICS; nic++)
            for (int i = 0; i < fault.value_count && (fault.nic < 0 || fault.nic == nic); i++)
                store(&faults[nic], fault.fields[i], fault.values[i]);
    }
    return true;
}

bool faults_count_operations(const struct nic_faults *faults)
{
    return faults->error_at_op || faults->die_at_op || faults->stall_at_op ||
           faults->vanish_at_op || faults->error_rate > 0;
}
