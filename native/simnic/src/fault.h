/* Faults asked for, e.g. "nic=3,die_at_op=1000;nic=2,slow=0.25;eagain=0.01". */
#ifndef SIMNIC_FAULT_H
#define SIMNIC_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "instance.h"

/* What goes wrong on one NIC. A count of 0 and a time below 0 mean never. Operations count from 1.
 */
struct nic_faults {
    uint64_t error_at_op;
    double error_rate;
    uint32_t error_code; /* provider code of the error entry */
    uint64_t die_at_op;
    uint64_t stall_at_op;
    uint64_t vanish_at_op; /* from then on no peer answers */
    double die_after_ms;   /* counted from the opening of the NIC */
    double stall_after_ms;
    double vanish_after_ms;
    double recover_after_ms; /* counted from the death, stall or vanishing */
    double slow;             /* factor on the line rate */
    double eagain;           /* probability of a spurious -FI_EAGAIN per post */
};

void faults_reset(struct nic_faults faults[SIMNIC_MAX_NICS]);

/* Adds a list of faults. One with host=NAME counts only where that is this process's host name.
 * On failure message says what is wrong. */
bool faults_parse(const char *text, const char *host_name,
                  struct nic_faults faults[SIMNIC_MAX_NICS], char *message, size_t message_size);

/* True when any operation on this NIC has to be counted. */
bool faults_count_operations(const struct nic_faults *faults);

#endif
