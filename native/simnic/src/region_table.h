/* Registered memory: who may touch which bytes, and the proof that nobody does any more. */
#ifndef SIMNIC_REGION_TABLE_H
#define SIMNIC_REGION_TABLE_H

#include "registry.h"

/* A key that was never given out before by this process; 0 when there is no room. */
uint32_t region_add(uint32_t domain, uint64_t address, uint64_t length, uint64_t access);

/* When this returns, no operation that named the key moves another byte. */
void region_remove(uint32_t key);

/* True when the key names a region of that domain which holds the range and grants the access. */
bool region_allows(const struct shared_process *owner, uint32_t key, uint32_t domain,
                   uint64_t address, uint64_t length, uint64_t access);

/* A place among the owner's visitors; NULL when all are taken. */
struct shared_visit *visit_claim(struct shared_process *owner);
void visit_release(struct shared_visit *visit);

/* Around every movement of bytes. Regions must be checked after the remote segments have been
 * filled in: the owner voids those segments when it revokes a stopped visitor. */
void visit_begin(struct shared_visit *visit);
void visit_end(struct shared_visit *visit);

#endif
