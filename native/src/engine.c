/* engine.c - opening and closing an engine, and what all its parts share; see
 * engine.h. */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "clock.h"
#include "device.h"
#include "engine.h"
#include "error.h"

#define ENGINE_JOBS 4096u
#define ENGINE_PEERS 1024u
#define ENGINE_REGIONS 4096u
#define ENGINE_STRIPE_BYTES (UINT64_C(1) << 20)
#define ENGINE_SPIN_US 200u
#define ENGINE_LOG_RECORDS 512u
#define ENGINE_TRACE_RECORDS 4096u
#define ENGINE_NOTICES 16384u
/* One thread hands over some 1.5 million descriptors a second, that is what about eight
 * rails of 100 Gbit/s carry at 64 KiB, and two GPUs' rails of a p5: a region's rails lie
 * in one group or two.  Threads spin while they have work, so they take no more than a
 * quarter of the processors; the server's own need the rest. */
#define ENGINE_RAILS_PER_GROUP 8u
#define ENGINE_PROCESSORS_PER_GROUP 4u

int engine_enter(struct ekv_engine *engine, ekv_error *error)
{
    if (!engine)
        return error_set(error, EKV_EINVAL, 0, "engine", "the engine is NULL");
    if (engine->process != getpid())
        return error_set(error, EKV_EFORK, 0, "engine",
                         "the engine was opened before a fork; its NICs cannot be shared with "
                         "a child. Open one in the child, or start children with spawn");
    atomic_fetch_add(&engine->entered, 1);
    if (atomic_load(&engine->closing)) {
        atomic_fetch_sub(&engine->entered, 1);
        return error_set(error, EKV_ECLOSED, 0, "engine", "the engine is closing");
    }
    return EKV_OK;
}

void engine_leave(struct ekv_engine *engine)
{
    atomic_fetch_sub(&engine->entered, 1);
}

void engine_signal(struct ekv_engine *engine)
{
    const uint64_t one = 1;

    pthread_mutex_lock(&engine->event_lock);
    if (!engine->event_set) {
        engine->event_set = true;
        while (write(engine->event_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
    }
    pthread_mutex_unlock(&engine->event_lock);
}

void engine_unsignal(struct ekv_engine *engine)
{
    uint64_t count;

    pthread_mutex_lock(&engine->event_lock);
    /* Whatever is added after this look will signal again. */
    if (engine->event_set && jobs_nothing_to_report(&engine->jobs) &&
        notice_table_is_empty(&engine->notices) &&
        atomic_load(&engine->resets) == atomic_load(&engine->resets_seen)) {
        engine->event_set = false;
        while (read(engine->event_fd, &count, sizeof count) < 0 && errno == EINTR)
            ;
    }
    pthread_mutex_unlock(&engine->event_lock);
}

void engine_receive_notice(struct ekv_engine *engine, struct rail *rail, const ekv_notice *notice)
{
    counter_add(&rail->counters.notices_received, 1);
    if (notice_table_put(&engine->notices, notice)) {
        engine_signal(engine);
        return;
    }
    counter_add(&rail->counters.notices_dropped, 1);
}

struct group *rail_group(struct ekv_engine *engine, uint32_t rail)
{
    struct group *group = engine->groups;

    while (rail >= group->rail_first + group->rail_count)
        group++;
    return group;
}

void engine_release_job(struct ekv_engine *engine, struct job *job)
{
    for (uint32_t i = 0; i < job->region_count; i++)
        atomic_fetch_sub(&engine->memory.regions[job->regions[i]].jobs, 1);
    job->region_count = 0;
    atomic_fetch_sub(&job->peer->jobs, 1);
}

static uint32_t or_default(uint32_t value, uint32_t standard)
{
    return value ? value : standard;
}

static int options_check(const ekv_options *options, ekv_error *error)
{
    if (!options->protocol || !options->protocol[0])
        return error_set(error, EKV_EINVAL, 0, "ekv_engine_open", "protocol is missing");
    if (options->incarnation == 0)
        return error_set(error, EKV_EINVAL, 0, "ekv_engine_open", "incarnation must not be 0");
    if (options->max_jobs > (1u << 20) || options->max_peers > (1u << 20) ||
        options->max_regions > (1u << 20))
        return error_set(error, EKV_EINVAL, 0, "ekv_engine_open",
                         "max_jobs, max_peers and max_regions are at most 1048576");
    if (options->stripe_bytes && options->stripe_bytes < 4096)
        return error_set(error, EKV_EINVAL, 0, "ekv_engine_open",
                         "stripe_bytes must be at least 4096, not %llu",
                         (unsigned long long)options->stripe_bytes);
    return EKV_OK;
}

static uint8_t tag_of(uint64_t incarnation)
{
    return (uint8_t)((incarnation * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
}

/* Offers host memory to processes of this host that the kernel lets at it. */
static void engine_open_gate(struct ekv_engine *engine, bool consent)
{
    if (!engine->near)
        return;
    if (!gate_open(&engine->gate, engine->incarnation, engine->memory.capacity))
        log_write(&engine->log, LOG_INFO, "no short way from other processes to this one: %s",
                  strerror(errno));
    /* The kernel keeps one name only, or everybody; without Yama it knows no such call. */
    else if (consent && prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) != 0)
        log_write(&engine->log, LOG_DEBUG, "PR_SET_PTRACER: %s", strerror(errno));
}

static int engine_allocate(struct ekv_engine *engine, const ekv_options *options,
                           uint32_t rail_count, ekv_error *error)
{
    engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->event_fd < 0)
        return error_set(error, EKV_ESYSTEM, errno, "eventfd", "%s", strerror(errno));
    engine->rails = calloc(rail_count, sizeof *engine->rails);
    if (!engine->rails ||
        !trace_open(&engine->trace, or_default(options->trace_capacity, ENGINE_TRACE_RECORDS)) ||
        !memory_open(&engine->memory, or_default(options->max_regions, ENGINE_REGIONS), rail_count,
                     options->incarnation ^ clock_now_ns()) ||
        !peer_table_open(&engine->peers, or_default(options->max_peers, ENGINE_PEERS)) ||
        !jobs_open(&engine->jobs, or_default(options->max_jobs, ENGINE_JOBS)) ||
        !notice_table_open(&engine->notices, or_default(options->max_notices, ENGINE_NOTICES)))
        return error_set(error, EKV_ENOMEM, 0, "ekv_engine_open", "out of memory");
    engine->memory.cuda = &engine->cuda;
    engine_open_gate(engine, options->near == EKV_NEAR_CONSENT);
    return EKV_OK;
}

/* What a group's thread does first. */
struct open_rails {
    struct command command; /* must stay first */
    struct device_list *devices;
    uint32_t max_in_flight;
};

static void group_open_rails(struct group *group, struct command *command)
{
    struct open_rails *open = (struct open_rails *)command;
    struct ekv_engine *engine = group->engine;

    command->code = EKV_OK;
    for (uint32_t i = group->rail_first; i < group->rail_first + group->rail_count; i++) {
        struct rail_options options = {.index = i, .max_in_flight = open->max_in_flight};
        bool stages = cuda_is_there(&engine->cuda) && rail_stages(&engine->rails[i]);
        struct fi_info *info = open->devices->infos[i];

        open->devices->infos[i] = NULL; /* the rail owns it now */
        options.cuda = stages ? &engine->cuda : NULL;
        command->code = rail_open(&engine->rails[i], &engine->fabric, &engine->log, info, &options,
                                  &command->error);
        if (command->code != EKV_OK)
            return;
    }
}

static uint32_t groups_by_default(uint32_t rail_count)
{
    uint32_t groups = (rail_count + ENGINE_RAILS_PER_GROUP - 1) / ENGINE_RAILS_PER_GROUP;
    cpu_set_t usable;
    uint32_t most = 1;

    if (sched_getaffinity(0, sizeof usable, &usable) == 0)
        most = (uint32_t)CPU_COUNT(&usable) / ENGINE_PROCESSORS_PER_GROUP;
    if (groups > most)
        groups = most;
    return groups ? groups : 1;
}

/* Opens every group's rails, all groups at the same time. */
static int engine_open_rails(struct ekv_engine *engine, const ekv_options *options,
                             struct device_list *devices, ekv_error *error)
{
    struct open_rails opens[GROUPS_MAX];
    int code = EKV_OK;

    for (uint32_t i = 0; i < engine->group_count; i++) {
        opens[i] = (struct open_rails){.command = {.run = group_open_rails},
                                       .devices = devices,
                                       .max_in_flight = options->max_in_flight};
        group_send(&engine->groups[i], &opens[i].command);
    }
    for (uint32_t i = 0; i < engine->group_count; i++) {
        int answer = group_await(&engine->groups[i], &opens[i].command);

        if (answer == EKV_OK || code != EKV_OK)
            continue;
        code = answer;
        if (error)
            struct_export(error, &opens[i].command.error, sizeof opens[i].command.error);
    }
    return code;
}

static int engine_start_groups(struct ekv_engine *engine, const ekv_options *options,
                               struct device_list *devices, ekv_error *error)
{
    uint32_t wanted = options->progress_threads;
    uint32_t next = 0;

    if (wanted == 0)
        wanted = groups_by_default(devices->count);
    if (wanted > devices->count)
        wanted = devices->count;
    if (wanted > GROUPS_MAX)
        wanted = GROUPS_MAX;
    engine->group_count = wanted;
    for (uint32_t i = 0; i < wanted; i++) {
        struct group *group = &engine->groups[i];

        group->engine = engine;
        group->index = i;
        group->rail_first = next;
        group->rail_count = devices->count / wanted + (i < devices->count % wanted);
        next += group->rail_count;
    }
    for (uint32_t i = 0; i < wanted; i++) {
        int code = group_start(&engine->groups[i], error);

        if (code != EKV_OK)
            return code;
    }
    return engine_open_rails(engine, options, devices, error);
}

/* Stops the threads and frees everything; rails must be closed or never opened. */
static void engine_free(struct ekv_engine *engine)
{
    mender_stop(engine);
    for (uint32_t i = 0; i < engine->group_count; i++)
        group_stop(&engine->groups[i]);
    for (uint32_t i = 0; engine->rails && i < engine->rail_count; i++)
        if (engine->rails[i].library)
            rail_close(&engine->rails[i]);
    notice_table_close(&engine->notices);
    jobs_close(&engine->jobs);
    peer_table_close(&engine->peers, engine->rail_count);
    memory_close(&engine->memory);
    gate_close(&engine->gate, 0);
    trace_close(&engine->trace);
    log_close(&engine->log);
    if (engine->event_fd >= 0)
        close(engine->event_fd);
    pthread_mutex_destroy(&engine->event_lock);
    pthread_mutex_destroy(&engine->nic_lock);
    free(engine->rails);
    cuda_close(&engine->cuda);
    free(engine->sysfs_root);
    free(engine);
}

static struct ekv_engine *engine_make(const ekv_options *options)
{
    struct ekv_engine *engine = aligned_alloc(64, (sizeof *engine + 63) & ~(size_t)63);

    if (!engine)
        return NULL;
    memset(engine, 0, sizeof *engine);
    engine->process = getpid();
    engine->tag = tag_of(options->incarnation);
    engine->incarnation = options->incarnation;
    engine->near = options->near != 0;
    engine->stripe_bytes = options->stripe_bytes ? options->stripe_bytes : ENGINE_STRIPE_BYTES;
    engine->region_chunk_bytes = options->region_chunk_bytes;
    engine->register_everywhere = options->register_everywhere != 0;
    if (options->sysfs_root && options->sysfs_root[0])
        engine->sysfs_root = strdup(options->sysfs_root);
    engine->spin_ns = or_default(options->spin_us, ENGINE_SPIN_US) * NS_PER_US;
    engine->event_fd = -1;
    engine->gate.fd = -1;
    pthread_mutex_init(&engine->event_lock, NULL);
    pthread_mutex_init(&engine->nic_lock, NULL);
    if (!log_open(&engine->log, ENGINE_LOG_RECORDS)) {
        log_close(&engine->log);
        free(engine->sysfs_root);
        free(engine);
        return NULL;
    }
    return engine;
}

static void engine_describe_rail(const struct ekv_engine *engine, const ekv_options *options,
                                 const struct fi_info *info, struct rail *rail)
{
    device_describe(info, engine->sysfs_root, &rail->nic, &rail->place);
    rail->budget.bytes_max = options->device_bytes_max;
    rail->budget.entries_max = options->device_entries_max;
}

/* A driver that was named has to be there; otherwise it is used where there is one. */
static int engine_open_cuda(struct ekv_engine *engine, const ekv_options *options, ekv_error *error)
{
    char why[256];

    if (cuda_open(&engine->cuda, options->cuda_path, why, sizeof why))
        return EKV_OK;
    if (options->cuda_path && options->cuda_path[0])
        return error_set(error, EKV_EINVAL, 0, "ekv_engine_open",
                         "the CUDA driver at cuda_path cannot be used: %s", why);
    log_write(&engine->log, LOG_DEBUG, "no CUDA driver: %s", why);
    return EKV_OK;
}

static int engine_open_parts(struct ekv_engine *engine, const ekv_options *options,
                             ekv_error *error)
{
    struct device_list devices;
    int code = fabric_open(&engine->fabric, options->libfabric_path, error);

    if (code != EKV_OK)
        return code;
    code = engine_open_cuda(engine, options, error);
    if (code != EKV_OK)
        return code;
    code =
        device_list_open(&devices, &engine->fabric, options, cuda_is_there(&engine->cuda), error);
    if (code != EKV_OK)
        return code;
    engine->rail_count = devices.count;
    log_write(&engine->log, LOG_INFO, "libfabric %u.%u from %s, interface version %u.%u asked for",
              FI_MAJOR(engine->fabric.running_version), FI_MINOR(engine->fabric.running_version),
              engine->fabric.path, FI_MAJOR(engine->fabric.api_version),
              FI_MINOR(engine->fabric.api_version));
    code = engine_allocate(engine, options, devices.count, error);
    if (code == EKV_OK) {
        for (uint32_t i = 0; i < devices.count; i++)
            engine_describe_rail(engine, options, devices.infos[i], &engine->rails[i]);
        code = engine_start_groups(engine, options, &devices, error);
    }
    if (code == EKV_OK)
        code = mender_start(engine, error);
    device_list_close(&devices, &engine->fabric);
    return code;
}

int ekv_engine_open(const ekv_options *given, struct ekv_engine **engine, ekv_error *error)
{
    ekv_options options;
    int code;

    if (!engine || struct_import(&options, sizeof options, given) != EKV_OK)
        return error_set(error, EKV_EINVAL, 0, "ekv_engine_open",
                         "options or its struct_size is missing");
    *engine = NULL;
    code = options_check(&options, error);
    if (code != EKV_OK)
        return code;
    *engine = engine_make(&options);
    if (!*engine)
        return error_set(error, EKV_ENOMEM, 0, "ekv_engine_open", "out of memory");
    code = engine_open_parts(*engine, &options, error);
    if (code != EKV_OK) {
        engine_free(*engine);
        *engine = NULL;
        return code;
    }
    registry_add(*engine);
    return EKV_OK;
}

/* Takes what was submitted meanwhile and cancels everything that lives. */
static void group_cancel_all(struct group *group, struct command *command)
{
    struct ekv_engine *engine = group->engine;
    uint64_t value;

    while (ring_pop(&group->submissions, &value))
        if (value & SUBMISSION_JOB)
            group_accept_job(group, &engine->jobs.slots[(uint32_t)value]);
    for (uint32_t i = group->live_count; i-- > 0;) {
        struct job *job = group->live[i];
        bool over;

        pthread_mutex_lock(&job->lock);
        if (job->stage == JOB_NOTIFYING)
            job->notice_over = true;
        else
            job_fail(job, EKV_ECANCELED, 0, "the engine closed");
        over = job_advance(group, job);
        pthread_mutex_unlock(&job->lock);
        if (over)
            job_conclude(group, job);
    }
    command->code = (int)group->live_count;
}

static void group_close_rails(struct group *group, struct command *command)
{
    struct ekv_engine *engine = group->engine;

    command->code = (int)group->live_count;
    for (uint32_t i = 0; i < group->rail_count; i++)
        rail_close_endpoint(&engine->rails[group->rail_first + i]);
    for (uint32_t i = 0; i < group->rail_count; i++)
        rail_abort(group, &engine->rails[group->rail_first + i], EKV_ECANCELED, "the engine closed",
                   false);
    while (group->warm_count > 0)
        warm_settle(group->warms[--group->warm_count].warm, EKV_ECLOSED);
    for (uint32_t i = 0; i < engine->memory.used; i++)
        for (uint32_t r = 0; engine->memory.regions[i].rails && r < group->rail_count; r++)
            region_rail_close(&engine->memory.regions[i].rails[group->rail_first + r]);
    for (uint32_t i = 0; i < group->rail_count; i++)
        rail_close(&engine->rails[group->rail_first + i]);
}

static int engine_call_all(struct ekv_engine *engine, void (*run)(struct group *, struct command *))
{
    int sum = 0;

    for (uint32_t i = 0; i < engine->group_count; i++) {
        struct command command = {.run = run};

        sum += group_call(&engine->groups[i], &command);
    }
    return sum;
}

static void engine_nap(void)
{
    const struct timespec nap = {.tv_nsec = (long)NS_PER_MS / 2};

    nanosleep(&nap, NULL);
}

int ekv_engine_close(struct ekv_engine *engine, double timeout_s)
{
    uint64_t until_ns;
    int unsettled;

    if (!engine)
        return EKV_EINVAL;
    if (engine->process != getpid())
        return EKV_EFORK;
    if (atomic_exchange(&engine->closing, true))
        return EKV_ECLOSED;
    mender_stop(engine);
    registry_remove(engine);
    until_ns = clock_after_ns(timeout_s);
    while (engine_call_all(engine, group_cancel_all) > 0 && clock_now_ns() < until_ns)
        engine_nap();
    /* Requests of ours that other engines of this process have not looked at yet would
     * lead them into memory that goes away with the endpoint. */
    if (rail_is_guarded(&engine->rails[0]))
        registry_flush();
    unsettled = engine_call_all(engine, group_close_rails);
    /* Calls that were inside when closing began see their jobs end and leave. */
    while (atomic_load(&engine->entered) > 0) {
        engine_call_all(engine, group_cancel_all);
        engine_nap();
    }
    /* Last, since nothing but time can prove that a neighbour has finished. */
    if (!gate_close(&engine->gate, until_ns))
        unsettled++;
    engine_free(engine);
    return unsettled;
}
