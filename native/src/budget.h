/* budget.h - PURE: what is registered with one device, and whether more may be.
 *
 * A device takes so many bytes and so many page-table entries over all registrations of
 * all processes, and seldom says how many; the limits are the operator's, 0 where they
 * are not known.  Owned by whoever registers on the rail. */
#ifndef EKV_BUDGET_H
#define EKV_BUDGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* CUDA's driver hands device memory to NICs in pages of this size. */
#define BUDGET_DEVICE_PAGE_BYTES 65536u
#define BUDGET_HOST_PAGE_BYTES 4096u

struct budget {
    uint64_t bytes; /* registered now, by this engine */
    uint64_t entries;
    uint32_t registrations;
    uint64_t bytes_max; /* 0: not known */
    uint64_t entries_max;
};

/* Page-table entries of a range, at most: huge pages need fewer. */
uint64_t budget_entries(uint64_t address, uint64_t length_bytes, uint64_t page_bytes);

bool budget_allows(const struct budget *budget, uint64_t bytes, uint64_t entries);
void budget_take(struct budget *budget, uint64_t bytes, uint64_t entries, uint32_t registrations);
void budget_give(struct budget *budget, uint64_t bytes, uint64_t entries, uint32_t registrations);

/* "12345 bytes, 4 page-table entries in 2 registrations" and the limits that are known. */
void budget_describe(const struct budget *budget, char *text, size_t text_bytes);

#endif
