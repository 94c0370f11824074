/* gate.h - how an engine lets other processes of its host at its memory, and how it
 * takes that back.
 *
 * A neighbour that copies into our memory with process_vm_writev asks no NIC, so no
 * key that we change can stop it.  The gate is what stops it:
 *
 *  - The ledger is a sealed memfd, mapped here and read-only by neighbours.  It holds
 *    for every region a key that is never used twice, its bounds and its access.
 *  - A neighbour takes a shared open-file-description lock on the region's byte of that
 *    file, then compares its key with the ledger's, copies a bounded batch, and unlocks.
 *  - To take a region back we first change the ledger's key and then take the lock
 *    exclusively.  Once we have had it, whoever had seen the old key has finished, and
 *    whoever comes later sees the new one.
 *
 * A neighbour that is stopped between its look and its copy holds the lock, so taking
 * the region back fails with EKV_EBUSY for as long as it is stopped: memory that may
 * still be written is never given back.  A neighbour that dies loses the lock to the
 * kernel, after its last system call has ended.  Each region has its own byte, and a
 * changed key turns newcomers away, so writers of other regions cannot starve us.
 *
 * Why not let the owner of the destination do the copying, which would need no lock: a
 * job is posted by the producer as writes and settled by the producer's core.  A pull
 * would need a queue of descriptors between the processes, a thread of the consumer
 * that is awake, and a second way to report what has landed.
 *
 * The first piece of every copy is the owner's incarnation, onto itself, at an address
 * drawn at random when the engine opened.  A process that has only inherited the number
 * (pid) or the pid's next program after an exec has nothing mapped there, and the
 * kernel ends the call before it touches another byte.  The page is not inherited by
 * fork, and is unmapped first when the engine closes.
 *
 * A child that a neighbour forked during a copy shares the lock's description: should
 * the neighbour die in that very moment, the lock lasts until the child has gone too.
 * That costs time, never safety.
 *
 * Owner: callers' threads; a region's slot belongs to whoever has claimed the region. */
#ifndef EKV_GATE_H
#define EKV_GATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "efa_kv.h"

#define LEDGER_NAME "efa-kv-ledger"
#define LEDGER_MAGIC UINT64_C(0x6c65646765723101)
#define GATE_SLOT_BITS 24u
#define GATE_SLOT_MASK ((UINT64_C(1) << GATE_SLOT_BITS) - 1)
#define GATE_KEY_CHANGING UINT64_C(0) /* wait: a new one comes, or the old one again */
#define GATE_KEY_GONE UINT64_MAX      /* the region is no longer offered */

struct ledger_slot {
    _Atomic uint64_t key; /* number << GATE_SLOT_BITS | slot */
    uint64_t begin;
    uint64_t end;
    uint64_t access; /* EKV_ACCESS_* */
};

struct ledger {
    uint64_t magic;
    uint64_t incarnation;
    uint64_t process;
    uint64_t start_ticks;
    uint64_t address; /* of canary, in the owner's address space */
    uint64_t canary;  /* the incarnation; neighbours write it onto itself */
    uint32_t slot_count;
    _Atomic uint32_t closed;
    struct ledger_slot slots[];
};

struct gate {
    int fd; /* -1: this engine offers nothing to other processes */
    struct ledger *ledger;
    size_t ledger_bytes;
    uint64_t start_ticks;
    _Atomic uint64_t next_number;
};

/* Field 22 of /proc/PID/stat; 0: it cannot be read. */
uint64_t process_start_ticks(uint64_t process);

/* Not offering memory to neighbours is no failure: false, with the reason in errno. */
bool gate_open(struct gate *gate, uint64_t incarnation, uint32_t slot_count);

/* The first key of a region, or 0 when the gate is shut. */
uint64_t gate_admit(struct gate *gate, uint32_t slot, const ekv_memory *memory);

/* Waits until nobody copies under this key any more; newcomers wait, or are refused for
 * good with gone.  False: somebody still may; nothing is proven. [blocks] */
bool gate_shut(struct gate *gate, uint64_t key, bool gone, uint64_t until_ns);
/* After gate_shut: the same key again, or a fresh one, which is returned. */
void gate_reopen(struct gate *gate, uint64_t key);
uint64_t gate_renew(struct gate *gate, uint64_t key);

/* False: a neighbour may still be copying; true also when there is no gate. [blocks] */
bool gate_close(struct gate *gate, uint64_t until_ns);

#endif
