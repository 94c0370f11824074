/* near_process.h - the short way to an engine of another process of this host: the
 * kernel copies between the two memories (process_vm_writev, process_vm_readv).
 *
 * The owner's side, and why this is safe, is in gate.h. */
#ifndef EKV_NEAR_PROCESS_H
#define EKV_NEAR_PROCESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "efa_kv.h"

struct group;
struct job;
struct ledger;

/* Why the provider is used where the short way might have been. */
enum near_refusal {
    NEAR_ALLOWED = 0,
    NEAR_NAMESPACE,  /* the peer is in another pid namespace: another container */
    NEAR_PERMISSION, /* the kernel forbids it: another user, Yama, a security module */
    NEAR_IDENTITY,   /* no engine of that incarnation is behind that process id */
    NEAR_SYSTEM,     /* this kernel or /proc lacks what it takes */
    NEAR_MEMORY,     /* memory of a device, or memory that is not offered */
    NEAR_REFUSALS
};

/* An engine of another process, and what it takes to copy there.  Fixed once it is
 * open but for `refused`; each progress thread has a lock descriptor of its own, since
 * two users of one would release each other's lock. */
struct neighbour {
    uint64_t process;
    uint64_t incarnation;
    int process_fd; /* readable once the process is gone */
    const struct ledger *ledger;
    size_t ledger_bytes;
    int *locks;
    uint32_t lock_count;
    _Atomic int refused; /* enum near_refusal: found out in the middle of a job */
};

/* NULL with *refusal set and the reason in words in text, when it has to be the
 * provider. [blocks on the file system only] */
struct neighbour *neighbour_open(const ekv_peer_options *options, uint32_t lock_count,
                                 enum near_refusal *refusal, char *text, size_t text_bytes);
void neighbour_close(struct neighbour *neighbour);

const char *near_refusal_name(enum near_refusal refusal);

enum near_turn {
    NEAR_MOVED,   /* some bytes, or the job goes on with the provider */
    NEAR_BLOCKED, /* the owner is changing its keys: come again */
    NEAR_OVER     /* nothing is left to move, or the job has failed */
};

/* Moves one bounded batch of the job in the calling progress thread.  With job->lock
 * and, for reading, the peer's lock held. */
enum near_turn near_process_turn(struct group *group, struct job *job);

/* For tests alone: called with the lock held and the key seen, before the copy. */
extern void (*near_process_before_copy)(void);

#endif
