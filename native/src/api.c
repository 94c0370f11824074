/* api.c - the remaining exported calls: what is there, how jobs stand, what happened.
 * They only read tables and atomics. */
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "device.h"
#include "engine.h"
#include "error.h"

int ekv_fabric_library(const char *libfabric_path, char *text, size_t text_bytes, ekv_error *error)
{
    struct fabric fabric;
    int code = fabric_open(&fabric, libfabric_path, error);

    if (code == EKV_OK && text && text_bytes > 0)
        snprintf(text, text_bytes, "%u.%u %s", FI_MAJOR(fabric.running_version),
                 FI_MINOR(fabric.running_version), fabric.path);
    return code;
}

static void *element(void *array, size_t stride, size_t index)
{
    void *at = (char *)array + index * stride;
    uint32_t size = (uint32_t)stride;

    memcpy(at, &size, sizeof size);
    return at;
}

int ekv_fabric_list(const ekv_options *given, ekv_nic *nics, size_t capacity, size_t *count,
                    ekv_error *error)
{
    size_t stride = capacity && nics ? struct_stride(nics) : 0;
    ekv_options options;
    struct fabric fabric;
    struct device_list devices;
    int code;

    if (!count || (capacity && !nics) || struct_import(&options, sizeof options, given) != EKV_OK ||
        !options.protocol)
        return error_set(error, EKV_EINVAL, 0, "ekv_fabric_list", "an argument is missing");
    *count = 0;
    code = fabric_open(&fabric, options.libfabric_path, error);
    if (code == EKV_OK)
        code = device_list_open(&devices, &fabric, &options, false, error);
    if (code != EKV_OK)
        return code;
    for (uint32_t i = 0; i < devices.count && i < capacity; i++) {
        struct place place;
        ekv_nic nic;

        device_describe(devices.infos[i], options.sysfs_root, &nic, &place);
        nic.queue_depth = nic.provider_queue_depth;
        struct_export(element(nics, stride, i), &nic, sizeof nic);
    }
    *count = devices.count;
    device_list_close(&devices, &fabric);
    return EKV_OK;
}

int ekv_engine_event_fd(struct ekv_engine *engine)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    code = engine->event_fd;
    engine_leave(engine);
    return code;
}

int ekv_engine_rails(struct ekv_engine *engine, ekv_nic *nics, size_t capacity, size_t *count)
{
    size_t stride = capacity && nics ? struct_stride(nics) : 0;
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    if (!count || (capacity && !nics)) {
        code = EKV_EINVAL;
    } else {
        for (uint32_t i = 0; i < engine->rail_count && i < capacity; i++) {
            ekv_nic nic;

            pthread_mutex_lock(&engine->nic_lock);
            nic = engine->rails[i].nic;
            pthread_mutex_unlock(&engine->nic_lock);
            nic.flags = atomic_load(&engine->rails[i].flags);
            struct_export(element(nics, stride, i), &nic, sizeof nic);
        }
        *count = engine->rail_count;
    }
    engine_leave(engine);
    return code;
}

int ekv_engine_gate(struct ekv_engine *engine, ekv_gate *gate)
{
    int code = engine_enter(engine, NULL);
    ekv_gate found = {.process = 0};

    if (code != EKV_OK)
        return code;
    found.gate = engine->gate.fd;
    found.process = (uint64_t)engine->process;
    found.start_ticks = engine->gate.start_ticks;
    if (gate)
        struct_export(gate, &found, sizeof found);
    else
        code = EKV_EINVAL;
    if (code == EKV_OK && found.gate < 0)
        code = EKV_ENOTSUP;
    engine_leave(engine);
    return code;
}

int ekv_job_result(struct ekv_engine *engine, ekv_job_id job, ekv_result *result)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    code = result ? jobs_result(&engine->jobs, engine->tag, job, result) : EKV_EINVAL;
    engine_leave(engine);
    return code;
}

int ekv_job_wait(struct ekv_engine *engine, ekv_job_id job, double timeout_s, int until_fenced,
                 ekv_result *result)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    code = jobs_wait(&engine->jobs, engine->tag, job, clock_after_ns(timeout_s), until_fenced != 0,
                     result);
    engine_leave(engine);
    return code;
}

static void job_cancel(struct ekv_engine *engine, struct job *job)
{
    struct group *home = job_home(engine, job);

    pthread_mutex_lock(&job->lock);
    /* Once the bytes have landed there is nothing to cancel but the news of it. */
    if (job->stage == JOB_MOVING || job->stage == JOB_FLUSHING)
        job_fail(job, EKV_ECANCELED, 0, "cancelled");
    pthread_mutex_unlock(&job->lock);
    if (ring_push(&home->submissions, SUBMISSION_JOB | job->index))
        group_wake(home); /* the hold goes with it */
    else
        job_drop(&engine->jobs, job); /* the home group notices by itself, a little later */
}

int ekv_job_cancel(struct ekv_engine *engine, ekv_job_id id)
{
    struct job *job;
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    job = jobs_hold(&engine->jobs, engine->tag, id);
    if (job)
        job_cancel(engine, job);
    engine_leave(engine);
    return job ? EKV_OK : EKV_ESTALE;
}

int ekv_job_release(struct ekv_engine *engine, ekv_job_id job)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    code = jobs_release(&engine->jobs, engine->tag, job);
    engine_unsignal(engine);
    engine_leave(engine);
    return code;
}

int ekv_poll(struct ekv_engine *engine, ekv_result *results, size_t capacity)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    code = results || !capacity ? jobs_poll(&engine->jobs, results, capacity) : EKV_EINVAL;
    engine_unsignal(engine);
    engine_leave(engine);
    return code;
}

int ekv_notices(struct ekv_engine *engine, ekv_notice *notices, size_t capacity)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    code =
        notices || !capacity ? notice_table_take(&engine->notices, notices, capacity) : EKV_EINVAL;
    engine_unsignal(engine);
    engine_leave(engine);
    return code;
}

static uint64_t counter_read(const counter *value)
{
    return atomic_load_explicit(value, memory_order_relaxed);
}

static ekv_rail_counters counters_read(const struct rail_counters *from)
{
    return (ekv_rail_counters){
        .in_flight = (uint32_t)counter_read(&from->in_flight),
        .operations_posted = counter_read(&from->operations_posted),
        .operations_settled = counter_read(&from->operations_settled),
        .operations_failed = counter_read(&from->operations_failed),
        .operations_resent = counter_read(&from->operations_resent),
        .bytes_written = counter_read(&from->bytes_written),
        .bytes_read = counter_read(&from->bytes_read),
        .again = counter_read(&from->again),
        .in_flight_peak = counter_read(&from->in_flight_peak),
        .failures = counter_read(&from->failures),
        .notices_sent = counter_read(&from->notices_sent),
        .notices_received = counter_read(&from->notices_received),
        .notices_dropped = counter_read(&from->notices_dropped),
        .stray_completions = counter_read(&from->stray_completions),
        .progress_wakeups = counter_read(&from->progress_wakeups),
        .operations_near = counter_read(&from->operations_near),
        .bytes_near = counter_read(&from->bytes_near),
        .near_refused_namespace = counter_read(&from->near_refused[NEAR_NAMESPACE]),
        .near_refused_permission = counter_read(&from->near_refused[NEAR_PERMISSION]),
        .near_refused_identity = counter_read(&from->near_refused[NEAR_IDENTITY]),
        .near_refused_system = counter_read(&from->near_refused[NEAR_SYSTEM]),
        .near_refused_memory = counter_read(&from->near_refused[NEAR_MEMORY]),
        .operations_staged = counter_read(&from->operations_staged),
        .bytes_staged = counter_read(&from->bytes_staged),
    };
}

int ekv_counters(struct ekv_engine *engine, ekv_rail_counters *rails, size_t capacity,
                 size_t *count)
{
    size_t stride = capacity && rails ? struct_stride(rails) : 0;
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    if (!count || (capacity && !rails)) {
        code = EKV_EINVAL;
    } else {
        for (uint32_t i = 0; i < engine->rail_count && i < capacity; i++) {
            ekv_rail_counters now = counters_read(&engine->rails[i].counters);

            now.turned_ns = atomic_load(&rail_group(engine, i)->turned_ns);
            struct_export(element(rails, stride, i), &now, sizeof now);
        }
        *count = engine->rail_count;
    }
    engine_leave(engine);
    return code;
}

int ekv_log_read(struct ekv_engine *engine, ekv_log_record *records, size_t capacity)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    code = records || !capacity ? log_read(&engine->log, records, capacity) : EKV_EINVAL;
    engine_leave(engine);
    return code;
}

int ekv_trace_read(struct ekv_engine *engine, ekv_trace_record *records, size_t capacity)
{
    int code = engine_enter(engine, NULL);

    if (code != EKV_OK)
        return code;
    code = records || !capacity ? trace_read(&engine->trace, records, capacity) : EKV_EINVAL;
    engine_leave(engine);
    return code;
}
