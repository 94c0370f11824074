/* efa_kv.cdef.h - the contract of include/efa_kv.h as cffi reads it: no macros, no
 * comments, sizes as numbers.  tests/test_contract.c compares the two. */
#define EKV_ABI_VERSION ...
#define EKV_NIC_DELIVERY_COMPLETE ...
#define EKV_NIC_VIRTUAL_ADDRESS ...
#define EKV_NIC_LOCAL_KEYS ...
#define EKV_NIC_PROVIDER_KEYS ...
#define EKV_NIC_WAIT_FD ...
#define EKV_NIC_DOWN ...
#define EKV_NIC_FENCES ...
#define EKV_NIC_DEVICE_MEMORY ...
#define EKV_MEMORY_HOST ...
#define EKV_MEMORY_CUDA ...
#define EKV_ACCESS_REMOTE_WRITE ...
#define EKV_ACCESS_REMOTE_READ ...
#define EKV_KEY_NEAR ...
#define EKV_KEY_STAGED ...
#define EKV_NEAR_NEVER ...
#define EKV_NEAR_ALLOWED ...
#define EKV_NEAR_CONSENT ...
#define EKV_WRITE ...
#define EKV_READ ...
#define EKV_JOB_POLLED ...
#define EKV_JOB_NOTICE ...
#define EKV_TRACE_SUBMITTED ...
#define EKV_TRACE_FIRST_POST ...
#define EKV_TRACE_LAST_POST ...
#define EKV_TRACE_LANDED ...
#define EKV_TRACE_NOTICED ...
#define EKV_TRACE_FAILED ...
#define EKV_TRACE_RAIL_DOWN ...
#define EKV_TRACE_RAIL_UP ...
#define EKV_TRACE_RAIL_MOVED ...
#define EKV_NAME_BYTES ...
#define EKV_ADDRESS_BYTES ...

typedef enum ekv_class {
    EKV_CLASS_NONE = 0,
    EKV_CLASS_RETRY = 1,
    EKV_CLASS_CALLER = 2,
    EKV_CLASS_LOCAL = 3,
    EKV_CLASS_PEER = 4
} ekv_class;

typedef enum ekv_code {
    EKV_OK = 0,
    EKV_EINVAL = -1,
    EKV_ENOMEM = -2,
    EKV_ESTALE = -3,
    EKV_EBUSY = -4,
    EKV_EFORK = -5,
    EKV_ECLOSED = -6,
    EKV_ENOFABRIC = -7,
    EKV_ENODEVICE = -8,
    EKV_EVERSION = -9,
    EKV_EREGISTER = -10,
    EKV_EREGION = -11,
    EKV_EREMOTEREGION = -12,
    EKV_EACCESS = -13,
    EKV_EPEER = -14,
    EKV_ERAIL = -15,
    EKV_EDEADLINE = -16,
    EKV_ECANCELED = -17,
    EKV_EPROVIDER = -18,
    EKV_ENOTSUP = -19,
    EKV_ESYSTEM = -20
} ekv_code;

typedef struct ekv_error {
    uint32_t struct_size;
    int32_t code;
    int32_t provider_code;
    uint32_t reserved;
    char where[64];
    char text[512];
} ekv_error;

uint32_t ekv_abi_version(void);
const char *ekv_code_name(int code);
const char *ekv_code_text(int code);
int ekv_code_class(int code);

typedef uint64_t ekv_region_id;
typedef uint64_t ekv_peer_id;
typedef uint64_t ekv_job_id;

typedef struct ekv_nic {
    uint32_t struct_size;
    uint32_t flags;
    char name[64];
    char fabric[64];
    char provider[64];
    char pci[16];
    int32_t numa_node;
    uint32_t queue_depth;
    uint32_t provider_queue_depth;
    uint32_t completion_queue_size;
    uint64_t speed_bits_per_second;
    uint32_t address_length;
    uint8_t address[128];
    uint32_t resets;
} ekv_nic;

typedef struct ekv_options {
    uint32_t struct_size;
    uint32_t progress_threads;
    const char *protocol;
    const char *devices;
    const char *host;
    const char *libfabric_path;
    uint32_t max_in_flight;
    uint32_t max_jobs;
    uint32_t max_peers;
    uint32_t max_regions;
    uint64_t stripe_bytes;
    uint64_t incarnation;
    uint32_t near;
    uint32_t spin_us;
    uint32_t trace_capacity;
    uint32_t max_notices;
    uint64_t region_chunk_bytes;
    const char *sysfs_root;
    uint32_t register_everywhere;
    uint32_t reserved_rails;
    uint64_t device_bytes_max;
    uint64_t device_entries_max;
    const char *cuda_path;
} ekv_options;

int ekv_fabric_library(const char *libfabric_path, char *text, size_t text_bytes, ekv_error *error);

int ekv_fabric_list(const ekv_options *options, ekv_nic *nics, size_t capacity, size_t *count,
                    ekv_error *error);

typedef struct ekv_engine ekv_engine;

int ekv_engine_open(const ekv_options *options, ekv_engine **engine, ekv_error *error);

int ekv_engine_close(ekv_engine *engine, double timeout_s);

int ekv_engine_event_fd(ekv_engine *engine);

typedef struct ekv_gate {
    uint32_t struct_size;
    int32_t gate;
    uint64_t process;
    uint64_t start_ticks;
} ekv_gate;

int ekv_engine_gate(ekv_engine *engine, ekv_gate *gate);

int ekv_engine_rails(ekv_engine *engine, ekv_nic *nics, size_t capacity, size_t *count);
int ekv_rail_reset(ekv_engine *engine, uint32_t rail, ekv_error *error);
int ekv_engine_resets(ekv_engine *engine, uint64_t *count);

typedef struct ekv_memory {
    uint32_t struct_size;
    uint32_t kind;
    uint64_t address;
    uint64_t length_bytes;
    int32_t device;
    uint32_t access;
    char place[16];
} ekv_memory;

typedef struct ekv_region_key {
    uint32_t struct_size;
    uint32_t rail;
    uint64_t key;
    uint64_t base;
    uint64_t offset_bytes;
    uint64_t length_bytes;
} ekv_region_key;

int ekv_region_add(ekv_engine *engine, const ekv_memory *memory, ekv_region_id *region,
                   ekv_error *error);
int ekv_region_keys(ekv_engine *engine, ekv_region_id region, ekv_region_key *keys, size_t capacity,
                    size_t *count);

int ekv_region_remove(ekv_engine *engine, ekv_region_id region, double timeout_s, ekv_error *error);

int ekv_region_rotate(ekv_engine *engine, ekv_region_id region, double timeout_s, ekv_error *error);

typedef struct ekv_peer_options {
    uint32_t struct_size;
    uint32_t same_process;
    uint64_t incarnation;
    uint32_t same_host;
    int32_t gate;
    uint64_t process;
    uint64_t start_ticks;
} ekv_peer_options;

typedef struct ekv_remote_key {
    uint32_t struct_size;
    uint32_t nic;
    uint64_t key;
    uint64_t base;
    uint64_t offset_bytes;
    uint64_t length_bytes;
} ekv_remote_key;

int ekv_peer_add(ekv_engine *engine, const ekv_peer_options *options, const ekv_nic *nics,
                 size_t nic_count, ekv_peer_id *peer, ekv_error *error);

int ekv_peer_nics(ekv_engine *engine, ekv_peer_id peer, const ekv_nic *nics, size_t nic_count,
                  ekv_error *error);
int ekv_peer_region_add(ekv_engine *engine, ekv_peer_id peer, uint64_t remote_region,
                        uint64_t address, uint64_t length_bytes, const ekv_remote_key *keys,
                        size_t key_count, ekv_error *error);
int ekv_peer_region_remove(ekv_engine *engine, ekv_peer_id peer, uint64_t remote_region,
                           ekv_error *error);

int ekv_peer_warm(ekv_engine *engine, ekv_peer_id peer, double timeout_s, ekv_error *error);

int ekv_peer_remove(ekv_engine *engine, ekv_peer_id peer);

typedef struct ekv_notice {
    uint32_t struct_size;
    int32_t status;
    uint64_t transfer[2];
    uint64_t generation;
    uint64_t bytes;
    uint64_t sender;
} ekv_notice;

typedef struct ekv_job_options {
    uint32_t struct_size;
    uint32_t operation;
    ekv_peer_id peer;
    uint64_t user_data;
    double deadline_s;
    uint32_t flags;
    uint32_t reserved;
    ekv_notice notice;
} ekv_job_options;

typedef struct ekv_row {
    uint64_t local_address;
    uint64_t remote_address;
    uint64_t local_stride_bytes;
    uint64_t remote_stride_bytes;
    uint64_t length_bytes;
} ekv_row;

typedef struct ekv_result {
    uint32_t struct_size;
    int32_t status;
    ekv_job_id job;
    uint64_t user_data;
    uint64_t bytes;
    uint64_t descriptors;
    uint32_t done;
    uint32_t fenced;
    int32_t provider_code;
    int32_t notice_status;
    char text[160];
    uint32_t stray;
} ekv_result;

int ekv_submit(ekv_engine *engine, const ekv_job_options *options, const uint64_t *local_addresses,
               const uint64_t *remote_addresses, const uint64_t *lengths_bytes, size_t count,
               ekv_job_id *job, ekv_error *error);

int ekv_submit_paged(ekv_engine *engine, const ekv_job_options *options, const ekv_row *rows,
                     size_t row_count, const uint32_t *local_blocks, const uint32_t *remote_blocks,
                     size_t block_count, ekv_job_id *job, ekv_error *error);

int ekv_job_result(ekv_engine *engine, ekv_job_id job, ekv_result *result);

int ekv_job_wait(ekv_engine *engine, ekv_job_id job, double timeout_s, int until_fenced,
                 ekv_result *result);

int ekv_job_cancel(ekv_engine *engine, ekv_job_id job);

int ekv_job_release(ekv_engine *engine, ekv_job_id job);

int ekv_poll(ekv_engine *engine, ekv_result *results, size_t capacity);

int ekv_notices(ekv_engine *engine, ekv_notice *notices, size_t capacity);

typedef struct ekv_rail_counters {
    uint32_t struct_size;
    uint32_t in_flight;
    uint64_t operations_posted;
    uint64_t operations_settled;
    uint64_t operations_failed;
    uint64_t operations_resent;
    uint64_t bytes_written;
    uint64_t bytes_read;
    uint64_t again;
    uint64_t in_flight_peak;
    uint64_t failures;
    uint64_t notices_sent;
    uint64_t notices_received;
    uint64_t notices_dropped;
    uint64_t stray_completions;
    uint64_t progress_wakeups;
    uint64_t operations_near;
    uint64_t bytes_near;
    uint64_t near_refused_namespace;
    uint64_t near_refused_permission;
    uint64_t near_refused_identity;
    uint64_t near_refused_system;
    uint64_t near_refused_memory;
    uint64_t operations_staged;
    uint64_t bytes_staged;
    uint64_t turned_ns;
} ekv_rail_counters;

int ekv_counters(ekv_engine *engine, ekv_rail_counters *rails, size_t capacity, size_t *count);

typedef struct ekv_log_record {
    uint32_t struct_size;
    uint32_t level;
    uint64_t time_ns;
    uint64_t dropped;
    char text[384];
} ekv_log_record;

int ekv_log_read(ekv_engine *engine, ekv_log_record *records, size_t capacity);

typedef struct ekv_trace_record {
    uint32_t struct_size;
    uint32_t event;
    uint64_t time_ns;
    ekv_job_id job;
    uint64_t user_data;
    uint64_t bytes;
    uint32_t rail;
    int32_t status;
    uint64_t begun_ns;
    uint32_t operations;
    uint32_t reserved;
} ekv_trace_record;

int ekv_trace_read(ekv_engine *engine, ekv_trace_record *records, size_t capacity);
