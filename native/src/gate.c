/* gate.c - see gate.h. */
#define _GNU_SOURCE
#include "gate.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "clock.h"

/* Where the ledger is mapped is drawn from this much address space, so that another
 * program has nothing there; see gate.h. */
#define LEDGER_ADDRESS_MASK UINT64_C(0x3ffffffff000)

uint64_t process_start_ticks(uint64_t process)
{
    char path[64];
    char text[1024];
    char *at, *rest;
    ssize_t length;
    int fd;

    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)process);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = '\0';
    /* The name of the executable may hold spaces and brackets; the rest may not. */
    at = strrchr(text, ')');
    for (int field = 3; at && field <= 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, &rest, 10) : 0;
}

static bool gate_map(struct gate *gate)
{
    uint64_t place = 0;
    void *mapped;

    if (getrandom(&place, sizeof place, GRND_NONBLOCK) != (ssize_t)sizeof place)
        place = 0;
    mapped = mmap((void *)(uintptr_t)(place & LEDGER_ADDRESS_MASK), gate->ledger_bytes,
                  PROT_READ | PROT_WRITE, MAP_SHARED, gate->fd, 0);
    if (mapped == MAP_FAILED)
        return false;
    gate->ledger = mapped;
    return madvise(mapped, gate->ledger_bytes, MADV_DONTFORK) == 0;
}

static void gate_free(struct gate *gate)
{
    if (gate->ledger)
        munmap(gate->ledger, gate->ledger_bytes);
    if (gate->fd >= 0)
        close(gate->fd);
    gate->ledger = NULL;
    gate->fd = -1;
}

bool gate_open(struct gate *gate, uint64_t incarnation, uint32_t slot_count)
{
    uint64_t process = (uint64_t)getpid();

    assert(slot_count <= GATE_SLOT_MASK);
    *gate = (struct gate){.fd = -1, .start_ticks = process_start_ticks(process)};
    gate->ledger_bytes = sizeof(struct ledger) + slot_count * sizeof(struct ledger_slot);
    if (gate->start_ticks == 0) {
        errno = ENOENT;
        return false;
    }
    gate->fd = memfd_create(LEDGER_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (gate->fd < 0 || ftruncate(gate->fd, (off_t)gate->ledger_bytes) != 0 ||
        fcntl(gate->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 ||
        !gate_map(gate)) {
        int reason = errno;

        gate_free(gate);
        errno = reason;
        return false;
    }
    gate->ledger->incarnation = gate->ledger->canary = incarnation;
    gate->ledger->process = process;
    gate->ledger->start_ticks = gate->start_ticks;
    gate->ledger->address = (uint64_t)(uintptr_t)&gate->ledger->canary;
    gate->ledger->slot_count = slot_count;
    gate->ledger->magic = LEDGER_MAGIC;
    atomic_store(&gate->next_number, 1);
    return true;
}

static uint64_t gate_draw(struct gate *gate, uint32_t slot)
{
    return atomic_fetch_add(&gate->next_number, 1) << GATE_SLOT_BITS | slot;
}

static struct ledger_slot *gate_slot(struct gate *gate, uint64_t key)
{
    return &gate->ledger->slots[key & GATE_SLOT_MASK];
}

uint64_t gate_admit(struct gate *gate, uint32_t slot, const ekv_memory *memory)
{
    struct ledger_slot *entry;
    uint64_t key;

    if (gate->fd < 0 || memory->kind != EKV_MEMORY_HOST)
        return 0;
    /* Its last tenant was shut out for good before the slot became free. */
    entry = &gate->ledger->slots[slot];
    key = gate_draw(gate, slot);
    entry->begin = memory->address;
    entry->end = memory->address + memory->length_bytes;
    entry->access = memory->access;
    atomic_store(&entry->key, key);
    return key;
}

/* Has the lock exclusively once, which nobody can while a copy is under way. */
static bool gate_wait(const struct gate *gate, uint64_t first, uint64_t count, uint64_t until_ns)
{
    const struct timespec nap = {.tv_nsec = (long)(100 * NS_PER_US)};
    struct flock lock = {.l_whence = SEEK_SET, .l_start = (off_t)first, .l_len = (off_t)count};

    for (;;) {
        lock.l_type = F_WRLCK;
        if (fcntl(gate->fd, F_OFD_SETLK, &lock) == 0)
            break;
        if (clock_now_ns() >= until_ns)
            return false;
        nanosleep(&nap, NULL);
    }
    lock.l_type = F_UNLCK;
    fcntl(gate->fd, F_OFD_SETLK, &lock);
    return true;
}

bool gate_shut(struct gate *gate, uint64_t key, bool gone, uint64_t until_ns)
{
    if (key == 0)
        return true; /* never offered */
    /* Before the lock is asked for; see gate.h. */
    atomic_store(&gate_slot(gate, key)->key, gone ? GATE_KEY_GONE : GATE_KEY_CHANGING);
    return gate_wait(gate, key & GATE_SLOT_MASK, 1, until_ns);
}

void gate_reopen(struct gate *gate, uint64_t key)
{
    if (key != 0)
        atomic_store(&gate_slot(gate, key)->key, key);
}

uint64_t gate_renew(struct gate *gate, uint64_t key)
{
    uint64_t fresh = key ? gate_draw(gate, (uint32_t)(key & GATE_SLOT_MASK)) : 0;

    if (key != 0)
        atomic_store(&gate_slot(gate, key)->key, fresh);
    return fresh;
}

bool gate_close(struct gate *gate, uint64_t until_ns)
{
    bool quiet;

    if (gate->fd < 0)
        return true;
    atomic_store(&gate->ledger->closed, 1);
    for (uint32_t i = 0; i < gate->ledger->slot_count; i++)
        if (atomic_load(&gate->ledger->slots[i].key) != GATE_KEY_CHANGING)
            atomic_store(&gate->ledger->slots[i].key, GATE_KEY_GONE);
    quiet = gate_wait(gate, 0, GATE_SLOT_MASK, until_ns);
    gate_free(gate);
    return quiet;
}
