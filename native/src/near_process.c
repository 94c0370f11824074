/* near_process.c - see near_process.h.
 *
 * A turn takes the lock of one region of the peer, looks at its key, copies at most
 * NEAR_BATCH_BYTES in one system call and lets go, so that the progress thread is soon
 * back with its NICs and the owner never waits long for its memory. */
#define _GNU_SOURCE
#include "near_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "engine.h"
#include "gate.h"

#define NEAR_BATCH_BYTES (UINT64_C(256) << 10)
#define NEAR_BATCH_PIECES 128u

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3, the same number on every architecture */
#endif

void (*near_process_before_copy)(void) = NULL;

/* The pieces of one system call; the first is the owner's mark, see gate.h. */
struct batch {
    struct iovec local[NEAR_BATCH_PIECES + 1];
    struct iovec remote[NEAR_BATCH_PIECES + 1];
    uint32_t count;
    uint64_t bytes; /* without the mark */
    uint64_t mark;
};

const char *near_refusal_name(enum near_refusal refusal)
{
    static const char *const names[NEAR_REFUSALS] = {
        [NEAR_ALLOWED] = "allowed",       [NEAR_NAMESPACE] = "namespace",
        [NEAR_PERMISSION] = "permission", [NEAR_IDENTITY] = "identity",
        [NEAR_SYSTEM] = "system",         [NEAR_MEMORY] = "memory"};

    return names[refusal];
}

static enum near_refusal refusal_of(int reason)
{
    switch (reason) {
    case EPERM:
    case EACCES:
        return NEAR_PERMISSION;
    case ESRCH:
    case ENOENT:
    case EBADF:
    case EFAULT:
        return NEAR_IDENTITY;
    default:
        return NEAR_SYSTEM;
    }
}

static void batch_begin(struct batch *batch, const struct neighbour *neighbour)
{
    batch->mark = neighbour->incarnation;
    batch->local[0] = (struct iovec){&batch->mark, sizeof batch->mark};
    batch->remote[0] =
        (struct iovec){(void *)(uintptr_t)neighbour->ledger->address, sizeof batch->mark};
    batch->count = 1;
    batch->bytes = 0;
}

static ssize_t batch_copy(const struct batch *batch, const struct neighbour *neighbour, bool write)
{
    pid_t process = (pid_t)neighbour->process;

    return write ? process_vm_writev(process, batch->local, batch->count, batch->remote,
                                     batch->count, 0)
                 : process_vm_readv(process, batch->local, batch->count, batch->remote,
                                    batch->count, 0);
}

/* ---- who is there --------------------------------------------------------- */

static bool neighbour_is_gone(const struct neighbour *neighbour)
{
    struct pollfd fd = {.fd = neighbour->process_fd, .events = POLLIN};

    return poll(&fd, 1, 0) == 1;
}

/* A description of its own for each thread: the kernel's locks belong to those.  The
 * number came over the network: nothing is opened that is not a ledger by its name. */
static bool neighbour_open_locks(struct neighbour *neighbour, int gate)
{
    static const char wanted[] = "/memfd:" LEDGER_NAME;
    char path[64];
    char link[sizeof wanted] = {0};

    snprintf(path, sizeof path, "/proc/%llu/fd/%d", (unsigned long long)neighbour->process, gate);
    if (readlink(path, link, sizeof link) < 0)
        return false;
    errno = EBADF;
    if (memcmp(link, wanted, sizeof wanted - 1) != 0)
        return false;
    for (uint32_t i = 0; i < neighbour->lock_count; i++) {
        neighbour->locks[i] = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (neighbour->locks[i] < 0)
            return false;
    }
    return true;
}

/* A file that cannot shrink under the mapping, and long enough for what it says. */
static bool neighbour_map(struct neighbour *neighbour)
{
    const struct ledger *ledger;
    int seals = fcntl(neighbour->locks[0], F_GET_SEALS);
    off_t length = lseek(neighbour->locks[0], 0, SEEK_END);
    void *mapped;

    errno = EBADF;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || length < (off_t)sizeof *ledger)
        return false;
    mapped = mmap(NULL, (size_t)length, PROT_READ, MAP_SHARED, neighbour->locks[0], 0);
    if (mapped == MAP_FAILED)
        return false;
    neighbour->ledger = ledger = mapped;
    neighbour->ledger_bytes = (size_t)length;
    errno = ENOENT;
    return ledger->magic == LEDGER_MAGIC && ledger->incarnation == neighbour->incarnation &&
           ledger->process == neighbour->process &&
           (uint64_t)length >=
               sizeof *ledger + ledger->slot_count * (uint64_t)sizeof(struct ledger_slot);
}

/* Both directions, with the mark alone. */
static bool neighbour_try(const struct neighbour *neighbour)
{
    struct batch batch;

    batch_begin(&batch, neighbour);
    batch.mark = 0;
    if (batch_copy(&batch, neighbour, false) != (ssize_t)sizeof batch.mark)
        return false;
    errno = ENOENT;
    return batch.mark == neighbour->incarnation &&
           batch_copy(&batch, neighbour, true) == (ssize_t)sizeof batch.mark;
}

static bool neighbour_find(struct neighbour *neighbour, const ekv_peer_options *options)
{
    neighbour->process_fd = (int)syscall(SYS_pidfd_open, (pid_t)neighbour->process, 0);
    if (neighbour->process_fd < 0)
        return false;
    errno = ENOENT;
    if (process_start_ticks(neighbour->process) != options->start_ticks)
        return false;
    return neighbour_open_locks(neighbour, options->gate) && neighbour_map(neighbour) &&
           neighbour->ledger->start_ticks == options->start_ticks && neighbour_try(neighbour);
}

static struct neighbour *neighbour_make(const ekv_peer_options *options, uint32_t lock_count)
{
    struct neighbour *neighbour = calloc(1, sizeof *neighbour);

    if (neighbour)
        neighbour->locks = calloc(lock_count, sizeof *neighbour->locks);
    if (!neighbour || !neighbour->locks) {
        free(neighbour);
        return NULL;
    }
    neighbour->process = options->process;
    neighbour->incarnation = options->incarnation;
    neighbour->process_fd = -1;
    neighbour->lock_count = lock_count;
    for (uint32_t i = 0; i < lock_count; i++)
        neighbour->locks[i] = -1;
    return neighbour;
}

struct neighbour *neighbour_open(const ekv_peer_options *options, uint32_t lock_count,
                                 enum near_refusal *refusal, char *text, size_t text_bytes)
{
    struct neighbour *neighbour;

    *refusal = NEAR_NAMESPACE;
    snprintf(text, text_bytes, "it is in another pid namespace");
    if (options->process == 0)
        return NULL;
    *refusal = NEAR_SYSTEM;
    snprintf(text, text_bytes, "it offers no memory to other processes");
    if (options->gate < 0)
        return NULL;
    neighbour = neighbour_make(options, lock_count);
    errno = ENOMEM;
    if (neighbour && neighbour_find(neighbour, options)) {
        *refusal = NEAR_ALLOWED;
        return neighbour;
    }
    *refusal = refusal_of(errno);
    snprintf(text, text_bytes, "process %llu: %s", (unsigned long long)options->process,
             strerror(errno));
    neighbour_close(neighbour);
    return NULL;
}

void neighbour_close(struct neighbour *neighbour)
{
    if (!neighbour)
        return;
    if (neighbour->ledger)
        munmap((void *)(uintptr_t)neighbour->ledger, neighbour->ledger_bytes);
    for (uint32_t i = 0; i < neighbour->lock_count; i++)
        if (neighbour->locks[i] >= 0)
            close(neighbour->locks[i]);
    if (neighbour->process_fd >= 0)
        close(neighbour->process_fd);
    free(neighbour->locks);
    free(neighbour);
}

/* ---- one batch ------------------------------------------------------------ */

static bool slot_lock(int fd, uint64_t key, short kind)
{
    struct flock lock = {
        .l_type = kind, .l_whence = SEEK_SET, .l_start = (off_t)(key & GATE_SLOT_MASK), .l_len = 1};

    return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

/* The job goes on with the provider, from where it is. */
static enum near_turn job_leave_near(struct group *group, struct job *job,
                                     enum near_refusal refusal)
{
    counter *refused = group->engine->rails[0].counters.near_refused;

    job->neighbour = false;
    atomic_fetch_add(&refused[refusal], 1);
    return NEAR_MOVED;
}

static enum near_turn job_end_near(struct job *job, int code, const char *text)
{
    job_fail(job, code, 0, text);
    return NEAR_OVER;
}

/* Gathers pieces in one region of the peer; the plan has been checked against what the
 * peer published, and here against the owner's own ledger.  EKV_OK or the failure. */
static int batch_gather(struct batch *batch, struct job *job, const struct remote_region *remote,
                        const struct ledger_slot *slot)
{
    uint32_t access =
        job->operation == EKV_WRITE ? EKV_ACCESS_REMOTE_WRITE : EKV_ACCESS_REMOTE_READ;
    struct piece piece;

    if (!(slot->access & access))
        return EKV_EACCESS;
    while (batch->count <= NEAR_BATCH_PIECES && batch->bytes < NEAR_BATCH_BYTES &&
           plan_peek(&job->plan, &piece) && piece.remote >= remote->begin &&
           piece.remote < remote->end) {
        if (piece.length > remote->end - piece.remote)
            piece.length = remote->end - piece.remote;
        if (piece.length > NEAR_BATCH_BYTES - batch->bytes)
            piece.length = NEAR_BATCH_BYTES - batch->bytes;
        if (piece.remote < slot->begin || piece.remote + piece.length > slot->end)
            return EKV_EREMOTEREGION;
        batch->local[batch->count] = (struct iovec){(void *)(uintptr_t)piece.local, piece.length};
        batch->remote[batch->count] = (struct iovec){(void *)(uintptr_t)piece.remote, piece.length};
        batch->count++;
        batch->bytes += piece.length;
        plan_consume(&job->plan, piece.length);
    }
    return EKV_OK;
}

static void job_count_near(struct group *group, struct job *job, uint64_t bytes, uint64_t pieces)
{
    struct rail *rail = &group->engine->rails[group->rail_first];

    atomic_fetch_add(&job->bytes, bytes);
    atomic_fetch_add(&job->descriptors, pieces);
    counter_add(&rail->counters.operations_near, pieces);
    counter_add(&rail->counters.bytes_near, bytes);
    if (!job->first_posted) {
        job->first_posted = true;
        trace_job(group->engine, EKV_TRACE_FIRST_POST, job, rail->index);
    }
}

/* What came of the system call; before is the plan as it was. */
static enum near_turn batch_settle(struct group *group, struct job *job, const struct batch *batch,
                                   const struct plan *before, ssize_t copied, int reason)
{
    struct neighbour *neighbour = job->peer->neighbour;
    uint64_t landed = copied > 0 ? (uint64_t)copied - sizeof batch->mark : 0;

    if (copied > 0 && batch->mark != neighbour->incarnation)
        return job_end_near(job, EKV_EPEER, "another program has taken the peer's place");
    if (copied > 0 && landed == batch->bytes) {
        job_count_near(group, job, landed, batch->count - 1);
        return NEAR_MOVED;
    }
    if (copied > 0) {
        job_count_near(group, job, landed, batch->count - 1);
        return job_end_near(job, EKV_EREMOTEREGION,
                            "memory of a region is no longer mapped, here or at the peer");
    }
    job->plan = *before;
    if (reason == ESRCH || reason == EFAULT)
        return job_end_near(job, EKV_EPEER, "the peer's process is gone");
    atomic_store(&neighbour->refused, refusal_of(reason));
    return job_leave_near(group, job, refusal_of(reason));
}

/* With the region's lock held. */
static enum near_turn job_copy_locked(struct group *group, struct job *job,
                                      const struct remote_region *remote)
{
    const struct neighbour *neighbour = job->peer->neighbour;
    const struct ledger *ledger = neighbour->ledger;
    const struct ledger_slot *slot = &ledger->slots[remote->near_key & GATE_SLOT_MASK];
    uint64_t key = atomic_load(&slot->key);
    const struct plan before = job->plan; /* a cursor: copying it is remembering it */
    struct batch batch;
    ssize_t copied;
    int code;

    if (atomic_load(&ledger->closed) || neighbour_is_gone(neighbour))
        return job_end_near(job, EKV_EPEER, "the peer has closed, or its process has ended");
    if (key == GATE_KEY_CHANGING)
        return NEAR_BLOCKED;
    if (key == GATE_KEY_GONE)
        return job_end_near(job, EKV_EREMOTEREGION, "the peer's region went away");
    if (key != remote->near_key)
        return job_end_near(job, EKV_EACCESS, "the peer changed its keys");
    batch_begin(&batch, neighbour);
    code = batch_gather(&batch, job, remote, slot);
    if (code != EKV_OK)
        return job_end_near(job, code, "the peer's ledger does not allow this copy");
    if (near_process_before_copy)
        near_process_before_copy();
    copied = batch_copy(&batch, neighbour, job->operation == EKV_WRITE);
    return batch_settle(group, job, &batch, &before, copied, errno);
}

enum near_turn near_process_turn(struct group *group, struct job *job)
{
    const struct neighbour *neighbour = job->peer->neighbour;
    const struct remote_region *remote;
    struct piece piece;
    enum near_turn turn;
    int fd = neighbour->locks[group->index];

    if (atomic_load(&neighbour->refused) != NEAR_ALLOWED)
        return job_leave_near(group, job, atomic_load(&neighbour->refused));
    if (!plan_peek(&job->plan, &piece)) {
        if (!job->plan_over)
            trace_job(group->engine, EKV_TRACE_LAST_POST, job, 0);
        job->plan_over = true;
        return NEAR_OVER;
    }
    remote = peer_region_at(job->peer, piece.remote, piece.length);
    if (!remote)
        return job_end_near(job, EKV_EREMOTEREGION, "the peer's region went away");
    /* As in post.c: a job from before must not come in with newer keys. */
    if (remote->told > job->region_tells)
        return job_end_near(job, EKV_EACCESS,
                            "the peer changed its keys after the job was submitted");
    if (remote->near_key == 0 ||
        (remote->near_key & GATE_SLOT_MASK) >= neighbour->ledger->slot_count)
        return job_leave_near(group, job, NEAR_MEMORY);
    if (!slot_lock(fd, remote->near_key, F_RDLCK)) {
        if (errno == EAGAIN || errno == EACCES)
            return NEAR_BLOCKED; /* the owner has it this very moment */
        return job_leave_near(group, job, NEAR_SYSTEM);
    }
    turn = job_copy_locked(group, job, remote);
    slot_lock(fd, remote->near_key, F_UNLCK);
    return turn;
}
