/* budget.c - see budget.h. */
#include "budget.h"

#include <assert.h>
#include <stdio.h>

uint64_t budget_entries(uint64_t address, uint64_t length_bytes, uint64_t page_bytes)
{
    uint64_t first = address / page_bytes;
    uint64_t last = (address + length_bytes - 1) / page_bytes;

    assert(length_bytes > 0);
    return last - first + 1;
}

static bool fits(uint64_t have, uint64_t more, uint64_t most)
{
    return most == 0 || (have <= most && more <= most - have);
}

bool budget_allows(const struct budget *budget, uint64_t bytes, uint64_t entries)
{
    return fits(budget->bytes, bytes, budget->bytes_max) &&
           fits(budget->entries, entries, budget->entries_max);
}

void budget_take(struct budget *budget, uint64_t bytes, uint64_t entries, uint32_t registrations)
{
    budget->bytes += bytes;
    budget->entries += entries;
    budget->registrations += registrations;
}

void budget_give(struct budget *budget, uint64_t bytes, uint64_t entries, uint32_t registrations)
{
    assert(budget->bytes >= bytes && budget->entries >= entries &&
           budget->registrations >= registrations);
    budget->bytes -= bytes;
    budget->entries -= entries;
    budget->registrations -= registrations;
}

void budget_describe(const struct budget *budget, char *text, size_t text_bytes)
{
    char limits[96] = "";
    int used = 0;

    if (budget->bytes_max)
        used = snprintf(limits, sizeof limits, "; limit %llu bytes",
                        (unsigned long long)budget->bytes_max);
    if (budget->entries_max)
        snprintf(limits + used, sizeof limits - (size_t)used, "; limit %llu entries",
                 (unsigned long long)budget->entries_max);
    snprintf(text, text_bytes, "%llu bytes, %llu page-table entries in %u registrations%s",
             (unsigned long long)budget->bytes, (unsigned long long)budget->entries,
             budget->registrations, limits);
}
