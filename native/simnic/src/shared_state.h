/* What the processes of one machine share: files in /dev/shm, mapped by everyone who talks to their
 * owner. One file per process (memory regions, visits, NICs), one per endpoint (mailbox, known
 * peers), and one per named host for the NICs that several processes use together. */
#ifndef SIMNIC_SHARED_STATE_H
#define SIMNIC_SHARED_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "process.h"
#include "settings.h"

#define SHARED_MAGIC 0x656661736e696d01u /* the last byte is the version of the layout */

enum {
    REGION_CAPACITY = 65536,
    VISIT_CAPACITY = 4096,
    VISIT_SEGMENTS = 128, /* pieces of memory moved by one system call */
    KNOWN_PEER_CAPACITY = 32768,
    MAILBOX_SLOTS = 128,
    MESSAGE_MAX_BYTES = 8192,
};

/* The address of an endpoint, as fi_getname gives it. The first three fields have the shape of
 * EFA's; the last says which process to look for. */
struct simnic_address {
    uint8_t gid[16];
    uint16_t queue_pair;
    uint16_t nic;
    uint32_t queue_key;
    uint64_t process; /* pid in the low 24 bits, start time above */
};
_Static_assert(sizeof(struct simnic_address) == 32, "EFA addresses have 32 bytes");

enum nic_fault_kind { NIC_HEALTHY, NIC_DEAD, NIC_STALLED, NIC_VANISHED };

/* A NIC as seen by all who use it. Clocks count 1/64 ns, so that no operation rounds to nothing. */
struct shared_nic {
    _Atomic uint64_t send_free_at;
    _Atomic uint64_t receive_free_at;
    _Atomic uint64_t operation_free_at;
    _Atomic uint64_t ticks_per_kibibyte; /* 0: no line rate */
    _Atomic uint64_t ticks_per_operation;
    _Atomic uint64_t operations; /* posted, for faults that count */
    _Atomic uint64_t fault_kind;
    _Atomic uint64_t fault_from_ns; /* UINT64_MAX: no fault planned */
    _Atomic uint64_t fault_until_ns;
    _Atomic uint64_t open_count;
} __attribute__((aligned(64)));

/* A registered region. The key is written last and cleared first. */
struct shared_region {
    _Atomic uint32_t key;
    _Atomic uint32_t domain;
    _Atomic uint64_t address;
    _Atomic uint64_t length;
    _Atomic uint64_t access;
};

/* One initiator (a NIC of some process) that moves bytes into or out of the owner's memory. The
 * sequence is odd while it may be doing so. The remote segments lie here, not in the initiator's
 * memory, so that the owner can void them when the initiator has been stopped half-way. */
struct shared_visit {
    _Atomic uint64_t sequence;
    _Atomic uint32_t pid;
    _Atomic uint32_t thread;
    _Atomic uint64_t start_time;
    struct iovec remote[VISIT_SEGMENTS];
} __attribute__((aligned(64)));

struct shared_process {
    uint64_t magic;
    uint64_t start_time;
    uint32_t pid;
    char host_name[SIMNIC_HOST_NAME_SIZE];
    struct shared_nic nics[SIMNIC_MAX_NICS]; /* in use while host_name is empty */
    _Atomic uint32_t visit_count;            /* no visit at or above this index was ever claimed */
    struct shared_region regions[REGION_CAPACITY];
    struct shared_visit visits[VISIT_CAPACITY];
};

enum mail_kind { MAIL_MESSAGE, MAIL_WRITE_DATA };

struct shared_mail {
    uint32_t kind;
    uint32_t has_data;
    uint64_t data;
    uint64_t length;
    struct simnic_address source;
    uint8_t payload[MESSAGE_MAX_BYTES];
};

struct shared_endpoint {
    uint64_t magic;
    uint32_t domain;
    _Atomic uint32_t queue_key; /* 0 once closed */
    pthread_mutex_t mutex;      /* robust: a depositor may be killed while it holds it */
    _Atomic uint64_t tail;      /* mails deposited */
    _Atomic uint64_t head;      /* mails taken out */
    _Atomic int64_t receive_credits;
    _Atomic uint64_t known_peers[KNOWN_PEER_CAPACITY];
    struct shared_mail slots[MAILBOX_SLOTS];
};

static inline uint64_t address_process(struct process_identity identity)
{
    return (uint64_t)identity.pid | identity.start_time << 24;
}

static inline struct process_identity address_identity(const struct simnic_address *address)
{
    struct process_identity identity = {(uint32_t)(address->process & 0xffffff),
                                        address->process >> 24};
    return identity;
}

/* A number for the NIC behind an address, never 0 or 1. */
static inline uint64_t address_nic_number(const struct simnic_address *address)
{
    uint64_t number;
    __builtin_memcpy(&number, address->gid + 8, sizeof number);
    return number | 2;
}

#endif
