/* job.h - jobs: what is left to move, what is under way, and what came of it.
 *
 * Two locks, always taken in this order:
 *   job->lock   the progress of one job: its plan, its stage, what is unsettled;
 *   jobs->lock  the table, and what callers see of every job: done, fenced, result.
 * A slot is reused when it was released and nobody holds it any more. */
#ifndef EKV_JOB_H
#define EKV_JOB_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "efa_kv.h"
#include "plan.h"

struct peer;

enum job_stage {
    JOB_MOVING = 0, /* stripes are posted and settle */
    JOB_FLUSHING,   /* one-byte reads follow the writes, where completions prove too little */
    JOB_NOTIFYING,  /* the notice is on its way */
    JOB_SETTLED     /* nothing of it is in flight and nothing will be posted */
};

/* A stripe that failed on one rail and waits for another. */
struct retry {
    struct piece piece;
    uint32_t attempts;
};

/* Where a flush has to go: the last byte written over one path. */
struct flush {
    uint32_t rail;
    uint32_t nic;
    uint64_t remote;
    bool posted;
};

/* What one rail carried of a job, for the trace. */
struct job_rail {
    uint64_t begun_ns;
    uint64_t ended_ns; /* its last completion so far */
    uint64_t bytes;
    uint32_t operations;
};

struct job {
    /* Fixed from submission until the slot is reused. */
    uint32_t index;
    uint32_t generation;
    ekv_job_id id;
    uint32_t operation;
    uint32_t flags;
    bool near; /* the peer is in this process */
    struct peer *peer;
    uint64_t user_data;
    uint64_t deadline_ns;
    uint64_t submitted_ns;
    uint64_t region_tells; /* the peer's at submission: newer keys are not for this job */
    ekv_notice notice;
    uint32_t *regions; /* indices of the local regions it may touch */
    uint32_t region_count;

    /* Guarded by lock. */
    pthread_mutex_t lock;
    enum job_stage stage;
    bool neighbour; /* the peer is in another process, and the kernel copies */
    struct plan plan;
    bool plan_over;
    struct retry *retries;
    uint32_t retry_count;
    uint32_t retry_capacity;
    struct flush *flushes;
    uint32_t flush_count;
    uint32_t flush_capacity;
    uint32_t unsettled; /* operations in flight */
    int status;         /* first failure, or EKV_OK */
    int provider_code;
    int notice_status;
    bool notice_over;     /* sent, or given up */
    uint32_t region_last; /* the region used last, of those in regions */
    bool first_posted;
    bool stray;             /* a write failed where that proves nothing */
    uint64_t rests_ns;      /* nothing of it is posted before: the peer does not know us yet */
    uint32_t called_groups; /* one bit per group in whose ring it lies */
    struct job_rail *rails; /* by index; kept for the slot's next job; NULL: not counted */
    char text[160];

    /* Written under lock, read by anybody. */
    _Atomic uint64_t failed_ns; /* when status was set, else 0 */
    _Atomic bool overdue;       /* it failed long ago, and something of it is in flight */
    _Atomic uint64_t bytes;
    _Atomic uint64_t descriptors;

    /* Owned by the home group's thread. */
    uint32_t live_index;
    bool live;
    bool expired;

    /* One bit per group that has it in its list of jobs with something to post. */
    _Atomic uint32_t active_groups;

    /* Guarded by jobs->lock. */
    pthread_cond_t changed;
    uint32_t holders;
    bool taken;
    bool released;
    bool done;
    bool fenced;
    bool reporting;
    struct job *report_next;
    struct job *report_previous;
    struct job *free_next;
    ekv_result result;
};

struct jobs {
    pthread_mutex_t lock;
    struct job *slots;
    uint32_t capacity;
    uint32_t taken;
    struct job *free_first;
    struct job *report_first;
    struct job *report_last;
};

bool jobs_open(struct jobs *jobs, uint32_t capacity);
void jobs_close(struct jobs *jobs);

/* A fresh job with one holder, or NULL when the table is full. */
struct job *jobs_take(struct jobs *jobs, uint8_t tag);
/* Gives back a job that was never shown to anybody. */
void jobs_abandon(struct jobs *jobs, struct job *job);

/* Looks a job up and holds it; NULL: stale. */
struct job *jobs_hold(struct jobs *jobs, uint8_t tag, ekv_job_id id);
void job_hold(struct jobs *jobs, struct job *job);
void job_drop(struct jobs *jobs, struct job *job);

/* Shows the job's outcome to callers; with job->lock held. True: a report was queued. */
bool jobs_publish(struct jobs *jobs, struct job *job, bool fenced);

int jobs_result(struct jobs *jobs, uint8_t tag, ekv_job_id id, ekv_result *result);
int jobs_wait(struct jobs *jobs, uint8_t tag, ekv_job_id id, uint64_t until_ns, bool until_fenced,
              ekv_result *result);
int jobs_release(struct jobs *jobs, uint8_t tag, ekv_job_id id);
int jobs_poll(struct jobs *jobs, ekv_result *results, size_t capacity);
bool jobs_nothing_to_report(struct jobs *jobs);

/* Frees what only a job in progress needs. */
void job_empty(struct job *job);

/* Records the first failure; later ones are consequences.  With job->lock held. */
void job_fail(struct job *job, int status, int provider_code, const char *text);

/* With job->lock held; false: out of memory. */
bool job_retry_put(struct job *job, const struct piece *piece, uint32_t attempts);
bool job_flush_note(struct job *job, uint32_t rail, uint32_t nic, uint64_t remote);

#endif
