/* One simulated NIC: its line rate as clocks that run ahead, and its health. */
#ifndef SIMNIC_NIC_H
#define SIMNIC_NIC_H

#include "shared_state.h"

/* Sets rates, and at the first opening plans the faults that come with time. */
void nic_open(struct shared_nic *nic, const struct settings *settings, int index);

/* What is wrong with the NIC now. Reads the clock only when a fault is planned. */
enum nic_fault_kind nic_health(const struct shared_nic *nic);

/* Counts one posted operation, which may be the one that a fault waits for. */
void nic_count_operation(struct shared_nic *nic, const struct nic_faults *faults, uint64_t *count);

/* True when an operation between the two takes simulated time. */
bool nic_is_paced(const struct shared_nic *initiator, const struct shared_nic *target,
                  double latency_us);

/* Books line time for an operation on both NICs; gives the time at which its last byte lands. */
uint64_t nic_book(struct shared_nic *initiator, struct shared_nic *target, bool is_read,
                  uint64_t length, double latency_us, uint64_t now_ns);

#endif
