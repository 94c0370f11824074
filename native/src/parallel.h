/* parallel.h - one call per index, at the same time, in threads that are gone when it
 * returns.  For calls into different libfabric domains: the caller waits, so each domain
 * is still used by one thread at a time, and the caller sees all they wrote. */
#ifndef EKV_PARALLEL_H
#define EKV_PARALLEL_H

#include <stdint.h>

/* Where no thread can be had, the caller does it. */
void parallel_each(uint32_t count, void (*run)(void *context, uint32_t index), void *context);

#endif
