/* job.c - the job table; see job.h. */
#include "job.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "error.h"
#include "identifier.h"

bool jobs_open(struct jobs *jobs, uint32_t capacity)
{
    pthread_condattr_t attributes;

    memset(jobs, 0, sizeof *jobs);
    jobs->slots = calloc(capacity, sizeof *jobs->slots);
    if (!jobs->slots || pthread_mutex_init(&jobs->lock, NULL) != 0) {
        free(jobs->slots);
        jobs->slots = NULL;
        return false;
    }
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    for (uint32_t i = capacity; i-- > 0;) {
        struct job *job = &jobs->slots[i];

        job->index = i;
        pthread_mutex_init(&job->lock, NULL);
        pthread_cond_init(&job->changed, &attributes);
        job->free_next = jobs->free_first;
        jobs->free_first = job;
    }
    pthread_condattr_destroy(&attributes);
    jobs->capacity = capacity;
    return true;
}

void jobs_close(struct jobs *jobs)
{
    if (!jobs->slots)
        return;
    for (uint32_t i = 0; i < jobs->capacity; i++) {
        job_empty(&jobs->slots[i]);
        free(jobs->slots[i].rails);
        pthread_mutex_destroy(&jobs->slots[i].lock);
        pthread_cond_destroy(&jobs->slots[i].changed);
    }
    pthread_mutex_destroy(&jobs->lock);
    free(jobs->slots);
    jobs->slots = NULL;
}

static void job_reset(struct job *job)
{
    job->stage = JOB_MOVING;
    job->rests_ns = 0;
    job->plan_over = false;
    job->retry_count = 0;
    job->flush_count = 0;
    job->unsettled = 0;
    job->status = EKV_OK;
    job->provider_code = 0;
    job->notice_status = EKV_EBUSY;
    job->first_posted = false;
    job->stray = false;
    job->called_groups = 0;
    job->text[0] = '\0';
    atomic_store(&job->bytes, 0);
    atomic_store(&job->descriptors, 0);
    atomic_store(&job->active_groups, 0);
    atomic_store(&job->failed_ns, 0);
    atomic_store(&job->overdue, false);
    job->live = job->expired = false;
    job->notice_over = false;
    job->region_last = 0;
    job->near = false;
    job->released = job->done = job->fenced = job->reporting = false;
    memset(&job->result, 0, sizeof job->result);
}

struct job *jobs_take(struct jobs *jobs, uint8_t tag)
{
    struct job *job;

    pthread_mutex_lock(&jobs->lock);
    job = jobs->free_first;
    if (job) {
        jobs->free_first = job->free_next;
        jobs->taken++;
        job->free_next = NULL;
        job->generation = (job->generation + 1) & IDENTIFIER_GENERATION_MASK;
        job->taken = true;
        job->holders = 1;
        job_reset(job);
        job->id = identifier_make(IDENTIFIER_JOB, tag, job->generation, job->index);
    }
    pthread_mutex_unlock(&jobs->lock);
    return job;
}

/* With jobs->lock held. */
static void jobs_give(struct jobs *jobs, struct job *job)
{
    job->taken = false;
    jobs->taken--;
    job->free_next = jobs->free_first;
    jobs->free_first = job;
}

void jobs_abandon(struct jobs *jobs, struct job *job)
{
    job_empty(job);
    pthread_mutex_lock(&jobs->lock);
    jobs_give(jobs, job);
    pthread_mutex_unlock(&jobs->lock);
}

/* With jobs->lock held. */
static struct job *jobs_find(struct jobs *jobs, uint8_t tag, ekv_job_id id)
{
    struct job *job;

    if (!identifier_is(id, IDENTIFIER_JOB, tag) || identifier_index(id) >= jobs->capacity)
        return NULL;
    job = &jobs->slots[identifier_index(id)];
    if (!job->taken || job->released || job->generation != identifier_generation(id))
        return NULL;
    return job;
}

struct job *jobs_hold(struct jobs *jobs, uint8_t tag, ekv_job_id id)
{
    struct job *job;

    pthread_mutex_lock(&jobs->lock);
    job = jobs_find(jobs, tag, id);
    if (job)
        job->holders++;
    pthread_mutex_unlock(&jobs->lock);
    return job;
}

void job_hold(struct jobs *jobs, struct job *job)
{
    pthread_mutex_lock(&jobs->lock);
    assert(job->holders > 0);
    job->holders++;
    pthread_mutex_unlock(&jobs->lock);
}

void job_drop(struct jobs *jobs, struct job *job)
{
    pthread_mutex_lock(&jobs->lock);
    assert(job->holders > 0);
    if (--job->holders == 0 && job->released)
        jobs_give(jobs, job);
    pthread_mutex_unlock(&jobs->lock);
}

/* With jobs->lock held. */
static void jobs_report(struct jobs *jobs, struct job *job)
{
    if (job->reporting)
        return; /* the one report will say what is true when it is read */
    job->reporting = true;
    job->report_next = NULL;
    job->report_previous = jobs->report_last;
    if (jobs->report_last)
        jobs->report_last->report_next = job;
    else
        jobs->report_first = job;
    jobs->report_last = job;
}

/* With jobs->lock held. */
static void jobs_unreport(struct jobs *jobs, struct job *job)
{
    if (!job->reporting)
        return;
    if (job->report_previous)
        job->report_previous->report_next = job->report_next;
    else
        jobs->report_first = job->report_next;
    if (job->report_next)
        job->report_next->report_previous = job->report_previous;
    else
        jobs->report_last = job->report_previous;
    job->reporting = false;
}

bool jobs_publish(struct jobs *jobs, struct job *job, bool fenced)
{
    bool report;

    pthread_mutex_lock(&jobs->lock);
    if (!job->done) {
        job->result.status = job->status;
        job->result.provider_code = job->provider_code;
        job->result.notice_status = job->notice_status;
        snprintf(job->result.text, sizeof job->result.text, "%s", job->text);
    }
    job->result.stray = job->stray;
    job->done = true;
    job->fenced = fenced;
    report = (job->flags & EKV_JOB_POLLED) && !job->released;
    if (report)
        jobs_report(jobs, job);
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&jobs->lock);
    return report;
}

/* With jobs->lock held. */
static void job_export(const struct job *job, ekv_result *result)
{
    ekv_result now = job->result;

    now.job = job->id;
    now.user_data = job->user_data;
    now.bytes = atomic_load(&job->bytes);
    now.descriptors = atomic_load(&job->descriptors);
    now.done = job->done;
    now.fenced = job->fenced;
    if (!job->done)
        now.notice_status = EKV_EBUSY;
    struct_export(result, &now, sizeof now);
}

int jobs_result(struct jobs *jobs, uint8_t tag, ekv_job_id id, ekv_result *result)
{
    struct job *job;

    pthread_mutex_lock(&jobs->lock);
    job = jobs_find(jobs, tag, id);
    if (job)
        job_export(job, result);
    pthread_mutex_unlock(&jobs->lock);
    return job ? EKV_OK : EKV_ESTALE;
}

int jobs_wait(struct jobs *jobs, uint8_t tag, ekv_job_id id, uint64_t until_ns, bool until_fenced,
              ekv_result *result)
{
    struct timespec until = clock_timespec(until_ns);
    struct job *job;
    int code = EKV_ESTALE;

    pthread_mutex_lock(&jobs->lock);
    job = jobs_find(jobs, tag, id);
    if (job) {
        int answer = 0;

        job->holders++;
        while (!(until_fenced ? job->fenced : job->done) && answer != ETIMEDOUT)
            answer = pthread_cond_timedwait(&job->changed, &jobs->lock, &until);
        code = (until_fenced ? job->fenced : job->done) ? EKV_OK : EKV_EDEADLINE;
        if (result)
            job_export(job, result);
        if (--job->holders == 0 && job->released)
            jobs_give(jobs, job);
    }
    pthread_mutex_unlock(&jobs->lock);
    return code;
}

int jobs_release(struct jobs *jobs, uint8_t tag, ekv_job_id id)
{
    struct job *job;

    pthread_mutex_lock(&jobs->lock);
    job = jobs_find(jobs, tag, id);
    if (job) {
        jobs_unreport(jobs, job);
        job->released = true;
        if (job->holders == 0)
            jobs_give(jobs, job);
    }
    pthread_mutex_unlock(&jobs->lock);
    return job ? EKV_OK : EKV_ESTALE;
}

int jobs_poll(struct jobs *jobs, ekv_result *results, size_t capacity)
{
    size_t stride = capacity ? struct_stride(results) : 0;
    size_t taken = 0;

    pthread_mutex_lock(&jobs->lock);
    while (taken < capacity && jobs->report_first) {
        struct job *job = jobs->report_first;
        ekv_result *to = (ekv_result *)((char *)results + taken * stride);

        to->struct_size = (uint32_t)stride;
        job_export(job, to);
        jobs_unreport(jobs, job);
        taken++;
    }
    pthread_mutex_unlock(&jobs->lock);
    return (int)taken;
}

bool jobs_nothing_to_report(struct jobs *jobs)
{
    bool nothing;

    pthread_mutex_lock(&jobs->lock);
    nothing = jobs->report_first == NULL;
    pthread_mutex_unlock(&jobs->lock);
    return nothing;
}

void job_empty(struct job *job)
{
    plan_close(&job->plan);
    free(job->retries);
    free(job->flushes);
    free(job->regions);
    job->retries = NULL;
    job->retry_count = job->retry_capacity = 0;
    job->flushes = NULL;
    job->flush_count = job->flush_capacity = 0;
    job->regions = NULL;
    job->region_count = 0;
}

void job_fail(struct job *job, int status, int provider_code, const char *text)
{
    if (job->status != EKV_OK)
        return;
    job->status = status;
    atomic_store(&job->failed_ns, clock_now_ns());
    job->provider_code = provider_code;
    snprintf(job->text, sizeof job->text, "%s", text);
}

bool job_retry_put(struct job *job, const struct piece *piece, uint32_t attempts)
{
    if (job->retry_count == job->retry_capacity) {
        uint32_t capacity = job->retry_capacity ? job->retry_capacity * 2 : 16;
        struct retry *grown = realloc(job->retries, capacity * sizeof *grown);

        if (!grown)
            return false;
        job->retries = grown;
        job->retry_capacity = capacity;
    }
    job->retries[job->retry_count++] = (struct retry){.piece = *piece, .attempts = attempts};
    return true;
}

bool job_flush_note(struct job *job, uint32_t rail, uint32_t nic, uint64_t remote)
{
    for (uint32_t i = 0; i < job->flush_count; i++)
        if (job->flushes[i].rail == rail && job->flushes[i].nic == nic) {
            job->flushes[i].remote = remote;
            return true;
        }
    if (job->flush_count == job->flush_capacity) {
        uint32_t capacity = job->flush_capacity ? job->flush_capacity * 2 : 4;
        struct flush *grown = realloc(job->flushes, capacity * sizeof *grown);

        if (!grown)
            return false;
        job->flushes = grown;
        job->flush_capacity = capacity;
    }
    job->flushes[job->flush_count++] = (struct flush){.rail = rail, .nic = nic, .remote = remote};
    return true;
}
