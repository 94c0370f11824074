/* notice.h - the 64-byte message that tells a target its job has landed, and the
 * bounded table where the target keeps those nobody has read yet.
 *
 * The table is filled by progress threads and emptied by any caller, under its lock. */
#ifndef EKV_NOTICE_H
#define EKV_NOTICE_H

#include <pthread.h>
#include <stdbool.h>

#include "efa_kv.h"

#define NOTICE_MAGIC UINT32_C(0x564b4645) /* "EFKV" */
#define NOTICE_VERSION 1u
#define NOTICE_KIND_JOB 1u   /* a job has landed */
#define NOTICE_KIND_EMPTY 2u /* warms a path up; nobody is told */

/* Little-endian on the wire, like every host this runs on. */
struct notice_message {
    uint32_t magic;
    uint16_t version;
    uint16_t kind;
    int32_t status;
    uint32_t reserved;
    uint64_t transfer[2];
    uint64_t generation;
    uint64_t bytes;
    uint64_t sender;
    uint64_t reserved2;
};

_Static_assert(sizeof(struct notice_message) == 64, "the wire format is 64 bytes");

void notice_encode(struct notice_message *message, uint16_t kind, const ekv_notice *notice);

/* The kind, or 0 for a message that is not ours. */
uint16_t notice_decode(const struct notice_message *message, size_t length, ekv_notice *notice);

struct notice_table {
    pthread_mutex_t lock;
    ekv_notice *items;
    size_t capacity;
    size_t first;
    size_t count;
};

bool notice_table_open(struct notice_table *table, size_t capacity);
void notice_table_close(struct notice_table *table);

/* False: full, the notice is lost (and the caller counts it). */
bool notice_table_put(struct notice_table *table, const ekv_notice *notice);
int notice_table_take(struct notice_table *table, ekv_notice *notices, size_t capacity);
bool notice_table_is_empty(struct notice_table *table);

#endif
