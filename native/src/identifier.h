/* identifier.h - 64-bit ids: kind (8 bits), engine tag (8), generation (24), index (24).
 *
 * The tag makes an id of another engine of this process stale here, the generation an
 * id of an earlier tenant of the same slot.  Stateless. */
#ifndef EKV_IDENTIFIER_H
#define EKV_IDENTIFIER_H

#include <stdbool.h>
#include <stdint.h>

enum identifier_kind { IDENTIFIER_REGION = 1, IDENTIFIER_PEER = 2, IDENTIFIER_JOB = 3 };

#define IDENTIFIER_INDEX_LIMIT (1u << 24)
#define IDENTIFIER_GENERATION_MASK 0xffffffu

static inline uint64_t identifier_make(enum identifier_kind kind, uint8_t tag, uint32_t generation,
                                       uint32_t index)
{
    return (uint64_t)kind << 56 | (uint64_t)tag << 48 |
           (uint64_t)(generation & IDENTIFIER_GENERATION_MASK) << 24 |
           (index & (IDENTIFIER_INDEX_LIMIT - 1));
}

static inline bool identifier_is(uint64_t id, enum identifier_kind kind, uint8_t tag)
{
    return (id >> 56) == (uint64_t)kind && ((id >> 48) & 0xff) == tag;
}

static inline uint32_t identifier_index(uint64_t id)
{
    return (uint32_t)(id & (IDENTIFIER_INDEX_LIMIT - 1));
}

static inline uint32_t identifier_generation(uint64_t id)
{
    return (uint32_t)(id >> 24) & IDENTIFIER_GENERATION_MASK;
}

#endif
