/* efa_kv.h - the contract of the native transfer core.
 *
 * An engine owns some local NICs ("rails"), the memory registered with them
 * ("regions") and the engines it may write to or read from ("peers").  Callers
 * hand it whole batches of descriptors ("jobs"); its progress threads post them,
 * settle them and answer once per job.
 *
 * Rules that hold for every call:
 *  - Return value: >= 0 is success, < 0 is an ekv_code.  Calls that can fail for
 *    an outside reason also fill a caller-owned ekv_error (NULL is allowed).
 *  - Every struct begins with struct_size, set by the caller to sizeof the struct
 *    it was compiled with, so that fields can be appended without a new symbol.
 *    Arrays of structs use the first element's struct_size as their stride.
 *  - Ids are 64-bit numbers that carry their kind and a generation: an id that is
 *    stale, foreign or of the wrong kind gives EKV_ESTALE, never a crash.  0 is
 *    never a valid id.
 *  - All calls are safe from any thread.  Calls marked [blocks] may wait for a
 *    progress thread; all others only touch rings, tables and atomics.
 *  - No callbacks, no globals that outlive an engine, no environment reads.
 *  - After fork() the child is refused with EKV_EFORK.
 *  - Text that the library returns as const char * is static.
 */
#ifndef EFA_KV_H
#define EFA_KV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EKV_API __attribute__((visibility("default")))

#define EKV_ABI_VERSION 1u

/* ---- errors --------------------------------------------------------------- */

/* Name, number, class (see ekv_class) and one sentence, kept in one list so that
 * the enum, the texts and the Python exceptions cannot drift apart. */
#define EKV_CODE_LIST(X)                                                                           \
    X(EKV_OK, 0, EKV_CLASS_NONE, "success")                                                        \
    X(EKV_EINVAL, -1, EKV_CLASS_CALLER, "an argument is out of its range")                         \
    X(EKV_ENOMEM, -2, EKV_CLASS_LOCAL, "out of memory")                                            \
    X(EKV_ESTALE, -3, EKV_CLASS_CALLER, "the id is not (or no longer) known here")                 \
    X(EKV_EBUSY, -4, EKV_CLASS_RETRY, "a bounded table or ring is full, or still in use")          \
    X(EKV_EFORK, -5, EKV_CLASS_CALLER, "the engine was opened before a fork")                      \
    X(EKV_ECLOSED, -6, EKV_CLASS_CALLER, "the engine is closing")                                  \
    X(EKV_ENOFABRIC, -7, EKV_CLASS_LOCAL, "libfabric is missing, unusable or loaded twice")        \
    X(EKV_ENODEVICE, -8, EKV_CLASS_LOCAL, "no matching network device")                            \
    X(EKV_EVERSION, -9, EKV_CLASS_LOCAL, "libfabric is too old for this provider")                 \
    X(EKV_EREGISTER, -10, EKV_CLASS_LOCAL, "memory could not be registered")                       \
    X(EKV_EREGION, -11, EKV_CLASS_CALLER, "an address is outside every registered region")         \
    X(EKV_EREMOTEREGION, -12, EKV_CLASS_PEER, "an address is outside every region of the peer")    \
    X(EKV_EACCESS, -13, EKV_CLASS_PEER, "the peer's memory key was refused")                       \
    X(EKV_EPEER, -14, EKV_CLASS_PEER, "the peer cannot be reached")                                \
    X(EKV_ERAIL, -15, EKV_CLASS_LOCAL, "every rail has failed")                                    \
    X(EKV_EDEADLINE, -16, EKV_CLASS_PEER, "the deadline passed")                                   \
    X(EKV_ECANCELED, -17, EKV_CLASS_CALLER, "the job was cancelled")                               \
    X(EKV_EPROVIDER, -18, EKV_CLASS_LOCAL, "the provider reported an error")                       \
    X(EKV_ENOTSUP, -19, EKV_CLASS_CALLER, "not supported by this build or provider")               \
    X(EKV_ESYSTEM, -20, EKV_CLASS_LOCAL, "a system call failed")

typedef enum ekv_class {
    EKV_CLASS_NONE = 0,
    EKV_CLASS_RETRY = 1,  /* try again later, nothing is wrong */
    EKV_CLASS_CALLER = 2, /* the caller asked for something it must not */
    EKV_CLASS_LOCAL = 3,  /* this host's fault */
    EKV_CLASS_PEER = 4    /* the other side's fault, or the network's */
} ekv_class;

typedef enum ekv_code {
#define EKV_CODE_ENUM(name, number, class_, text) name = (number),
    EKV_CODE_LIST(EKV_CODE_ENUM)
#undef EKV_CODE_ENUM
} ekv_code;

typedef struct ekv_error {
    uint32_t struct_size;
    int32_t code;          /* ekv_code */
    int32_t provider_code; /* libfabric's or errno's own number, 0 if none */
    uint32_t reserved;
    char where[64]; /* the call that failed, e.g. "fi_mr_reg" */
    char text[512]; /* what was found, what was expected, what to do */
} ekv_error;

EKV_API uint32_t ekv_abi_version(void);
EKV_API const char *ekv_code_name(int code);
EKV_API const char *ekv_code_text(int code);
EKV_API int ekv_code_class(int code);

/* ---- devices -------------------------------------------------------------- */

typedef uint64_t ekv_region_id;
typedef uint64_t ekv_peer_id;
typedef uint64_t ekv_job_id;

#define EKV_NAME_BYTES 64
#define EKV_ADDRESS_BYTES 128 /* longest raw endpoint address accepted */

/* Behaviour of a rail, in ekv_nic.flags. */
#define EKV_NIC_DELIVERY_COMPLETE (1u << 0) /* completions mean landed at the target */
#define EKV_NIC_VIRTUAL_ADDRESS (1u << 1)   /* remote addresses are virtual, not offsets */
#define EKV_NIC_LOCAL_KEYS (1u << 2)        /* every post carries a local descriptor */
#define EKV_NIC_PROVIDER_KEYS (1u << 3)     /* the provider chooses memory keys */
#define EKV_NIC_WAIT_FD (1u << 4)           /* idle waiting without polling */
#define EKV_NIC_DOWN (1u << 5)              /* taken out after a failure */
/* Once a key is gone or an operation has ended, well or not, no byte of it can land.
 * Without this flag a write that has begun goes on (software providers): what keeps late
 * bytes out there is ekv_rail_reset at the target. */
#define EKV_NIC_FENCES (1u << 6)
/* GPU memory is registered with it.  Without this flag GPU memory is carried in messages,
 * through host memory, and the target's own progress thread puts it in its place. */
#define EKV_NIC_DEVICE_MEMORY (1u << 7)

/* One NIC: a local rail, or (name, fabric, provider, address, speed, numa_node
 * filled) a peer's. */
typedef struct ekv_nic {
    uint32_t struct_size;
    uint32_t flags;
    char name[EKV_NAME_BYTES];     /* libfabric domain name, e.g. rdmap79s0-rdm, eth0 */
    char fabric[EKV_NAME_BYTES];   /* libfabric fabric name */
    char provider[EKV_NAME_BYTES]; /* as libfabric reports it */
    char pci[16];                  /* 0000:4f:00.0, or empty */
    int32_t numa_node;             /* -1 unknown */
    uint32_t queue_depth;          /* operations in flight allowed now */
    uint32_t provider_queue_depth; /* tx_attr.size as read back */
    uint32_t completion_queue_size;
    uint64_t speed_bits_per_second; /* 0 unknown */
    uint32_t address_length;
    uint8_t address[EKV_ADDRESS_BYTES];
    uint32_t resets; /* of a local rail: how often its address changed */
} ekv_nic;

/* How peers of this process and of this host are reached.  Host memory of another
 * process is copied by the kernel where it permits that; what it does not permit takes
 * the provider.  Where Yama's ptrace_scope is 1 the kernel asks the owner of the memory
 * for consent.  EKV_NEAR_CONSENT gives it, with PR_SET_PTRACER_ANY: every process of
 * the same user may then debug this one and read its memory, as it may where Yama is
 * off.  That is the operator's choice, so it is not what EKV_NEAR_ALLOWED does. */
#define EKV_NEAR_NEVER 0u
#define EKV_NEAR_ALLOWED 1u
#define EKV_NEAR_CONSENT 2u

typedef struct ekv_options {
    uint32_t struct_size;
    uint32_t progress_threads; /* rail groups; 0 = chosen from the number of rails */
    const char *protocol; /* "efa", "tcp" or "shm"; a full libfabric provider name also works */
    const char
        *devices;     /* comma-separated names or globs; NULL = all (tcp: the one that has host) */
    const char *host; /* local address for tcp; NULL = 127.0.0.1 */
    const char *libfabric_path;  /* tried after a copy already loaded; NULL = none */
    uint32_t max_in_flight;      /* operations per rail; 0 = the provider's own limit */
    uint32_t max_jobs;           /* jobs not yet released; 0 = 4096 */
    uint32_t max_peers;          /* 0 = 1024 */
    uint32_t max_regions;        /* 0 = 4096 */
    uint64_t stripe_bytes;       /* 0 = 1 MiB */
    uint64_t incarnation;        /* sent in notices; must not be 0 */
    uint32_t near;               /* EKV_NEAR_* */
    uint32_t spin_us;            /* spinning after the last activity before blocking; 0 = default */
    uint32_t trace_capacity;     /* trace records kept; 0 = default */
    uint32_t max_notices;        /* notices nobody has read yet; 0 = 16384 */
    uint64_t region_chunk_bytes; /* most bytes under one key; 0 = what the device takes */
    const char *sysfs_root;      /* where NICs and GPUs are looked up; NULL = /sys */
    uint32_t register_everywhere; /* 1: device memory on every rail, not on its nearest */
    uint32_t reserved_rails;
    uint64_t device_bytes_max;   /* most bytes registered with one NIC; 0 = not known */
    uint64_t device_entries_max; /* and page-table entries, of 4 KiB (host) or 64 KiB (GPU) */
    const char *cuda_path;       /* NVIDIA's driver, for GPU memory; NULL = libcuda.so.1 */
} ekv_options;

/* Path and version of the libfabric in use ("1.17 /usr/lib/..."), loading it if
 * needed. [blocks] */
EKV_API int ekv_fabric_library(const char *libfabric_path, char *text, size_t text_bytes,
                               ekv_error *error);

/* Lists NICs that match, without opening an engine. *count receives the number
 * found, which may exceed capacity. [blocks] */
EKV_API int ekv_fabric_list(const ekv_options *options, ekv_nic *nics, size_t capacity,
                            size_t *count, ekv_error *error);

/* ---- engine --------------------------------------------------------------- */

typedef struct ekv_engine ekv_engine;

EKV_API int ekv_engine_open(const ekv_options *options, ekv_engine **engine, ekv_error *error);

/* Cancels every job, waits at most timeout_s for operations in flight to settle,
 * closes the endpoints (which fences what is left) and frees the engine.  Returns
 * the number of jobs that had not settled, and one more when a process of this host may
 * still be inside a copy into memory of ours (it is stopped): leave that memory mapped
 * and unused until the process has ended. [blocks] */
EKV_API int ekv_engine_close(ekv_engine *engine, double timeout_s);

/* Readable when ekv_poll or ekv_notices has something.  Owned by the engine. */
EKV_API int ekv_engine_event_fd(ekv_engine *engine);

/* What processes of this host need to copy to and from this one's memory, to be sent to
 * them: its process id and start (field 22 of /proc/PID/stat), and the number of a file
 * descriptor.  EKV_ENOTSUP, with gate -1: it offers nothing. */
typedef struct ekv_gate {
    uint32_t struct_size;
    int32_t gate;
    uint64_t process;
    uint64_t start_ticks;
} ekv_gate;

EKV_API int ekv_engine_gate(ekv_engine *engine, ekv_gate *gate);

EKV_API int ekv_engine_rails(ekv_engine *engine, ekv_nic *nics, size_t capacity, size_t *count);

/* Closes the endpoint of a rail and opens another one: nothing that was on its way over
 * the rail, in either direction, can move a byte from the return on.  Operations in
 * flight end in EKV_EPEER; where the rail fences they go on over a path that is left.
 * The rail has a new address, which peers must be told (ekv_peer_nics there).  The core
 * does the same by itself, and sets the event fd, to a rail on which a failed job's
 * operations do not end, or which alone has fallen silent.  EKV_ENOTSUP: memory is bound
 * to this provider's endpoints.  [blocks] */
EKV_API int ekv_rail_reset(ekv_engine *engine, uint32_t rail, ekv_error *error);

/* How often any rail's address changed; each change sets the event fd. */
EKV_API int ekv_engine_resets(ekv_engine *engine, uint64_t *count);

/* ---- regions -------------------------------------------------------------- */

#define EKV_MEMORY_HOST 0u
#define EKV_MEMORY_CUDA 1u

#define EKV_ACCESS_REMOTE_WRITE (1u << 0) /* peers may write here */
#define EKV_ACCESS_REMOTE_READ (1u << 1)  /* peers may read here */

typedef struct ekv_memory {
    uint32_t struct_size;
    uint32_t kind; /* EKV_MEMORY_* */
    uint64_t address;
    uint64_t length_bytes;
    int32_t device;  /* CUDA ordinal, -1 for host memory, or to have the driver asked */
    uint32_t access; /* EKV_ACCESS_*; always usable locally */
    char place[16];  /* PCI address of its GPU, 0000:53:00.0; empty: the driver's, or host memory */
} ekv_memory;

/* In the place of a rail or NIC: the key for neighbours, who need no NIC. */
#define EKV_KEY_NEAR 65535u
/* The key for memory that no NIC reaches: its owner copies, see EKV_NIC_DEVICE_MEMORY. */
#define EKV_KEY_STAGED 65534u

/* The key of a region on one rail, to be sent to peers. */
typedef struct ekv_region_key {
    uint32_t struct_size;
    uint32_t rail; /* index into ekv_engine_rails, EKV_KEY_NEAR or EKV_KEY_STAGED */
    uint64_t key;
    uint64_t base;         /* remote address of the key's first byte: virtual address or 0 */
    uint64_t offset_bytes; /* where in the region this key begins (device limits may cut it) */
    uint64_t length_bytes;
} ekv_region_key;

/* Registers; all or nothing.  GPU memory (place) on the rails nearest to it and, where
 * that is one alone, on those of the next distance too; host memory on all.  A device
 * that is full is EKV_EREGISTER and says how much it holds already. Overlapping regions are
 * allowed, a later lookup by address takes any region that holds the range. [blocks] */
EKV_API int ekv_region_add(ekv_engine *engine, const ekv_memory *memory, ekv_region_id *region,
                           ekv_error *error);
EKV_API int ekv_region_keys(ekv_engine *engine, ekv_region_id region, ekv_region_key *keys,
                            size_t capacity, size_t *count);

/* New jobs on it are refused from now on; waits up to timeout_s for operations in
 * flight, then deregisters.  EKV_EBUSY: still in use, still refused to new jobs,
 * call again.  After success no peer can write there any more, with the same limit as
 * ekv_region_rotate. [blocks] */
EKV_API int ekv_region_remove(ekv_engine *engine, ekv_region_id region, double timeout_s,
                              ekv_error *error);

/* Deregisters and registers again with fresh keys: from the return on, a write with
 * an old key cannot begin, and none that has begun can land where the rails fence
 * (EKV_NIC_FENCES); the others need ekv_rail_reset behind it.  Local operations in flight,
 * and neighbours in the middle of a copy, are waited for up to timeout_s, else EKV_EBUSY
 * and nothing changed. [blocks] */
EKV_API int ekv_region_rotate(ekv_engine *engine, ekv_region_id region, double timeout_s,
                              ekv_error *error);

/* ---- peers ---------------------------------------------------------------- */

typedef struct ekv_peer_options {
    uint32_t struct_size;
    uint32_t same_process; /* 1: the peer's addresses are ours too (used when near = 1) */
    uint64_t incarnation;  /* the peer engine's incarnation */
    uint32_t same_host;    /* 1: another process of this host (used when near is not 0) */
    int32_t gate;          /* its ekv_gate; -1: it has none */
    uint64_t process;      /* 0: its process id means nothing here (other pid namespace) */
    uint64_t start_ticks;
} ekv_peer_options;

/* A remote region on one of the peer's NICs. */
typedef struct ekv_remote_key {
    uint32_t struct_size;
    uint32_t nic; /* index into the nics given to ekv_peer_add, or an EKV_KEY_* */
    uint64_t key;
    uint64_t base;
    uint64_t offset_bytes;
    uint64_t length_bytes;
} ekv_remote_key;

/* Adds a peer; NICs on another fabric or provider than every local rail are ignored,
 * and none left is EKV_EPEER.  Rail-aligned pairs are resolved at once, others when
 * first used. [blocks] */
EKV_API int ekv_peer_add(ekv_engine *engine, const ekv_peer_options *options, const ekv_nic *nics,
                         size_t nic_count, ekv_peer_id *peer, ekv_error *error);

/* Tells the addresses that the peer's NICs have now, after it has reset rails: the same
 * NICs in the same order, else EKV_EINVAL.  Operations on their way to an old address
 * are left to end. [blocks] */
EKV_API int ekv_peer_nics(ekv_engine *engine, ekv_peer_id peer, const ekv_nic *nics,
                          size_t nic_count, ekv_error *error);

/* Tells where the peer's memory is.  remote_region is the peer's own id for it, used
 * to remove it again. [blocks] */
EKV_API int ekv_peer_region_add(ekv_engine *engine, ekv_peer_id peer, uint64_t remote_region,
                                uint64_t address, uint64_t length_bytes, const ekv_remote_key *keys,
                                size_t key_count, ekv_error *error);
EKV_API int ekv_peer_region_remove(ekv_engine *engine, ekv_peer_id peer, uint64_t remote_region,
                                   ekv_error *error);

/* Resolves every pair of NICs and moves one empty message over each. [blocks] */
EKV_API int ekv_peer_warm(ekv_engine *engine, ekv_peer_id peer, double timeout_s, ekv_error *error);

/* Fails the peer's jobs with EKV_EPEER once their operations have settled and frees
 * the id when the last one has; new jobs are refused at once. */
EKV_API int ekv_peer_remove(ekv_engine *engine, ekv_peer_id peer);

/* ---- jobs ----------------------------------------------------------------- */

#define EKV_WRITE 0u
#define EKV_READ 1u

/* What the target's table receives when every byte of a job has landed. */
typedef struct ekv_notice {
    uint32_t struct_size;
    int32_t status;       /* ekv_code or any number the two sides agree on */
    uint64_t transfer[2]; /* 128-bit transfer id, meaning agreed on by the two sides */
    uint64_t generation;
    uint64_t bytes;  /* filled by the sender's core */
    uint64_t sender; /* incarnation of the sending engine, filled by its core */
} ekv_notice;

#define EKV_JOB_POLLED (1u << 0) /* report through ekv_poll and the event fd */
#define EKV_JOB_NOTICE (1u << 1) /* send notice to the peer after the last byte landed */

typedef struct ekv_job_options {
    uint32_t struct_size;
    uint32_t operation; /* EKV_WRITE or EKV_READ */
    ekv_peer_id peer;
    uint64_t user_data; /* comes back in ekv_result */
    double deadline_s;  /* from now; must be > 0 and finite */
    uint32_t flags;     /* EKV_JOB_* */
    uint32_t reserved;
    ekv_notice notice; /* used with EKV_JOB_NOTICE */
} ekv_job_options;

/* One row of a paged job, typically one per layer (or K and V of a layer): block b
 * lies at address + b * stride_bytes on its own side and is length_bytes long. */
typedef struct ekv_row {
    uint64_t local_address;
    uint64_t remote_address;
    uint64_t local_stride_bytes;
    uint64_t remote_stride_bytes;
    uint64_t length_bytes;
} ekv_row;

typedef struct ekv_result {
    uint32_t struct_size;
    int32_t status; /* ekv_code; EKV_OK means every byte has landed */
    ekv_job_id job;
    uint64_t user_data;
    uint64_t bytes;       /* landed for certain */
    uint64_t descriptors; /* operations posted after merging and cutting */
    uint32_t done;        /* 0: still running */
    uint32_t fenced;      /* 1: no operation of this job can move a byte any more */
    int32_t provider_code;
    int32_t notice_status; /* EKV_OK sent; EKV_EBUSY not asked for; else why it was not */
    char text[160];        /* the provider's words for the first error, or empty */
    uint32_t stray;        /* 1: writes failed on a rail that does not fence, so bytes of them
                            * may still land until the target fences itself */
} ekv_result;

/* Takes count descriptors of absolute addresses; the arrays are copied.  count may be
 * 0 (a bare notice).  Every address is checked against the regions of both sides
 * before anything is posted: EKV_EREGION, EKV_EREMOTEREGION. EKV_EBUSY: job table or
 * submission ring full. Never waits for the network. */
EKV_API int ekv_submit(ekv_engine *engine, const ekv_job_options *options,
                       const uint64_t *local_addresses, const uint64_t *remote_addresses,
                       const uint64_t *lengths_bytes, size_t count, ekv_job_id *job,
                       ekv_error *error);

/* The paged form: block pair i of every row. Runs that are contiguous on both sides
 * are found once and used for each row whose blocks are dense. */
EKV_API int ekv_submit_paged(ekv_engine *engine, const ekv_job_options *options,
                             const ekv_row *rows, size_t row_count, const uint32_t *local_blocks,
                             const uint32_t *remote_blocks, size_t block_count, ekv_job_id *job,
                             ekv_error *error);

/* Fills *result with the present state. */
EKV_API int ekv_job_result(ekv_engine *engine, ekv_job_id job, ekv_result *result);

/* Waits until the job is done (or, with until_fenced, fenced); EKV_EDEADLINE when
 * timeout_s passed first - which says nothing about the job. [blocks] */
EKV_API int ekv_job_wait(ekv_engine *engine, ekv_job_id job, double timeout_s, int until_fenced,
                         ekv_result *result);

/* Stops posting; the job is done with EKV_ECANCELED when what is in flight settled. */
EKV_API int ekv_job_cancel(ekv_engine *engine, ekv_job_id job);

/* Forgets the job.  Allowed at any time; a running job goes on and is dropped when it
 * is done and fenced. */
EKV_API int ekv_job_release(ekv_engine *engine, ekv_job_id job);

/* Results of EKV_JOB_POLLED jobs, each once when done and, if it was not fenced then,
 * once more when it is.  Returns how many were written. */
EKV_API int ekv_poll(ekv_engine *engine, ekv_result *results, size_t capacity);

/* Notices that peers sent here, each once.  Returns how many were written. */
EKV_API int ekv_notices(ekv_engine *engine, ekv_notice *notices, size_t capacity);

/* ---- what happened -------------------------------------------------------- */

typedef struct ekv_rail_counters {
    uint32_t struct_size;
    uint32_t in_flight;
    uint64_t operations_posted;
    uint64_t operations_settled;
    uint64_t operations_failed;
    uint64_t operations_resent;
    uint64_t bytes_written;
    uint64_t bytes_read;
    uint64_t again; /* posts refused for back-pressure */
    uint64_t in_flight_peak;
    uint64_t failures; /* times the rail was taken out */
    uint64_t notices_sent;
    uint64_t notices_received;
    uint64_t notices_dropped;   /* the notice table was full */
    uint64_t stray_completions; /* completions of operations no longer known */
    uint64_t progress_wakeups;
    uint64_t operations_near; /* copies without the provider; on the first rail of a group */
    uint64_t bytes_near;
    /* How often a peer or a job of this host took the provider, on the first rail: */
    uint64_t near_refused_namespace;  /* another pid namespace: another container */
    uint64_t near_refused_permission; /* another user, Yama, a security module */
    uint64_t near_refused_identity;   /* another process is behind the process id */
    uint64_t near_refused_system;     /* the kernel or /proc lacks what it takes */
    uint64_t near_refused_memory;     /* memory of a device, or memory not offered */
    uint64_t operations_staged;       /* messages that carried memory no NIC reaches, from here */
    uint64_t bytes_staged;
    uint64_t turned_ns; /* CLOCK_MONOTONIC when its progress thread last looked around */
} ekv_rail_counters;

EKV_API int ekv_counters(ekv_engine *engine, ekv_rail_counters *rails, size_t capacity,
                         size_t *count);

typedef struct ekv_log_record {
    uint32_t struct_size;
    uint32_t level;   /* 10 debug, 20 info, 30 warning, 40 error */
    uint64_t time_ns; /* CLOCK_REALTIME */
    uint64_t dropped; /* records lost before this one */
    char text[384];
} ekv_log_record;

EKV_API int ekv_log_read(ekv_engine *engine, ekv_log_record *records, size_t capacity);

/* What a trace record says about its job. */
#define EKV_TRACE_SUBMITTED 1u
#define EKV_TRACE_FIRST_POST 2u
#define EKV_TRACE_LAST_POST 3u
#define EKV_TRACE_LANDED 4u
#define EKV_TRACE_NOTICED 5u
#define EKV_TRACE_FAILED 6u
#define EKV_TRACE_RAIL_DOWN 7u
#define EKV_TRACE_RAIL_UP 8u
#define EKV_TRACE_RAIL_MOVED 9u /* what one rail carried of a job, when the job has ended */

typedef struct ekv_trace_record {
    uint32_t struct_size;
    uint32_t event;   /* EKV_TRACE_* */
    uint64_t time_ns; /* CLOCK_MONOTONIC */
    ekv_job_id job;
    uint64_t user_data;
    uint64_t bytes;
    uint32_t rail;
    int32_t status;
    uint64_t begun_ns;   /* of EKV_TRACE_RAIL_MOVED: its first post; time_ns is its last end */
    uint32_t operations; /* of the same */
    uint32_t reserved;
} ekv_trace_record;

EKV_API int ekv_trace_read(ekv_engine *engine, ekv_trace_record *records, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif /* EFA_KV_H */
