/* Finds and creates the files of shared_state.h. */
#ifndef SIMNIC_REGISTRY_H
#define SIMNIC_REGISTRY_H

#include "shared_state.h"

/* Another process (or this one), mapped once however many endpoints of it are known. */
struct remote_process {
    struct process_identity identity;
    struct shared_process *shared;
    struct shared_nic *nics;
    struct remote_process *next;
    int references;
    int handle; /* see process_open_handle */
    bool is_self;
    _Atomic bool has_exited;
    _Atomic uint64_t checked_ns;
};

/* This process's own file, created at the first call, which also removes what killed processes left
 * behind. NULL when it cannot be created. */
struct shared_process *registry_self(void);
struct process_identity registry_self_identity(void);
struct shared_nic *registry_self_nics(void);

/* NULL when that process is gone or has no simulated NIC. */
struct remote_process *registry_attach(struct process_identity identity);
void registry_release(struct remote_process *process);

/* Asks the kernel at most once a millisecond. */
bool registry_has_exited(struct remote_process *process);

struct shared_endpoint *registry_create_endpoint(uint16_t queue_pair);
void registry_remove_endpoint(struct shared_endpoint *endpoint, uint16_t queue_pair);
struct shared_endpoint *registry_map_endpoint(struct process_identity identity,
                                              uint16_t queue_pair);
void registry_unmap_endpoint(struct shared_endpoint *endpoint);

/* The bytes 8 to 15 of the GIDs of this process's host; the last one is left to the NIC. */
uint64_t registry_host_number(void);

#endif
