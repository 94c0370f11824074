/* engine.h - what an engine consists of, and who owns which part of it.
 *
 * Callers' threads and progress threads meet in four places only: the submission ring
 * of a group, its command list, the job table and the notice table. */
#ifndef EKV_ENGINE_H
#define EKV_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "cuda.h"
#include "efa_kv.h"
#include "fabric.h"
#include "gate.h"
#include "job.h"
#include "log.h"
#include "memory.h"
#include "notice.h"
#include "peer.h"
#include "rail.h"
#include "ring.h"
#include "stripe.h"

#define RAILS_MAX 64u
#define GROUPS_MAX 32u

struct group;

/* Something a caller asks a progress thread to do, and waits for. */
struct command {
    void (*run)(struct group *group, struct command *command);
    int code;
    ekv_error error;
    bool done;
    struct command *next;
    struct region *region; /* arguments, as the command needs them */
    struct peer *peer;
    struct warm *warm;
    struct rail *rail;
    const char *reason;
};

/* A warm-up under way, shared by the caller and the groups. */
struct warm {
    _Atomic uint32_t users;     /* frees itself with the last one */
    _Atomic uint32_t remaining; /* messages not yet settled */
    _Atomic int code;
    struct peer *peer;
};

/* A message of a warm-up that is not posted yet. */
struct warm_item {
    struct warm *warm;
    uint32_t rail;
    uint32_t nic;
};

/* How the rails of a group stood for one region of the peer in this turn; see choice.c. */
struct survey {
    uint64_t turn; /* 0: of no use any more */
    const struct region *region;
    const struct remote_region *remote;
    uint32_t chosen; /* last, so that it has changed since */
    bool level;      /* all rails are equally near */
    struct stripe_rail choices[RAILS_MAX];
    int nics[RAILS_MAX];
};

/* One progress thread and what only it touches. */
struct group {
    struct ekv_engine *engine;
    uint32_t index;
    pthread_t thread;
    bool made; /* its locks exist */
    bool started;
    uint32_t rail_first;
    uint32_t rail_count;

    struct ring submissions; /* see SUBMISSION_* */
    pthread_mutex_t command_lock;
    pthread_cond_t command_done;
    struct command *command_first;
    struct command *command_last;
    _Atomic bool commands_waiting;
    _Atomic bool stop;
    _Atomic bool sleeping;
    _Atomic uint64_t turned_ns; /* when it last looked around; at least twice a second */
    _Atomic uint64_t called_ns; /* since when another group waits for it; 0: none does */
    int wake_fd;

    struct job **active; /* jobs with something to post here */
    uint32_t active_count;
    uint32_t active_next;
    struct job **live; /* jobs whose deadline this group watches */
    uint32_t live_count;
    struct peer **removing;
    uint32_t removing_count;
    struct warm_item *warms;
    uint32_t warm_count;
    uint32_t warm_capacity;
    uint64_t round;
    uint64_t turn; /* of a job, from 1 */
    struct survey survey;
    uint64_t active_ns;  /* when something last happened */
    uint64_t checked_ns; /* when deadlines were last looked at */
    uint64_t idle_ns;    /* the present sleep, while there is nothing to wake us */
    uint64_t woken_ns;   /* the last wake-up, see wait.c for this and what follows */
    uint64_t stuck_sleep_ns;
    uint32_t futile_wakes;
    uint32_t futile_streaks;
    bool drained;      /* every completion queue was empty in this round */
    uint64_t stuck_ns; /* when it last looked for operations that do not end */
};

/* What resets rails when a progress thread asks for it; see reset.c. */
struct mender {
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    bool started;
    bool stop;
    struct {
        const char *reason;  /* NULL: this rail needs nothing */
        uint64_t due_ns;     /* not before */
        uint64_t backoff_ns; /* after the next failure */
    } rails[RAILS_MAX];
};

/* Values in a submission ring: what in the upper half, index in the lower. */
#define SUBMISSION_JOB (UINT64_C(1) << 32)
#define SUBMISSION_PEER_REMOVED (UINT64_C(2) << 32)

struct ekv_engine {
    pid_t process;
    uint8_t tag;
    uint64_t incarnation;
    bool near;
    uint64_t stripe_bytes;
    uint64_t region_chunk_bytes;
    bool register_everywhere;
    char *sysfs_root; /* owned, NULL: /sys */
    uint64_t spin_ns;
    _Atomic bool closing;
    _Atomic uint32_t entered; /* calls inside, so that close can wait for them */

    struct fabric fabric;
    struct cuda cuda;
    struct log log;
    struct trace trace;
    struct memory memory;
    struct gate gate;
    struct peer_table peers;
    struct jobs jobs;
    struct notice_table notices;

    struct rail *rails;
    uint32_t rail_count;
    struct group groups[GROUPS_MAX];
    uint32_t group_count;

    struct mender mender;
    pthread_mutex_t nic_lock; /* of the rails' addresses and resets */
    _Atomic uint64_t resets;
    _Atomic uint64_t resets_seen; /* by ekv_engine_resets */
    _Atomic uint32_t overdue;     /* jobs that failed and do not settle */
    _Atomic uint64_t moved_ns;    /* when a peer's address changed last, or 0 */

    pthread_mutex_t event_lock;
    int event_fd;
    bool event_set;

    struct ekv_engine *registry_next; /* see near.c */
};

/* group.c: the progress thread. */
int group_start(struct group *group, ekv_error *error);
void group_stop(struct group *group);
void group_wake(struct group *group);
/* Runs a command in the group's thread and waits for it; or in two steps, so that
 * several groups work at the same time. */
int group_call(struct group *group, struct command *command);
void group_send(struct group *group, struct command *command);
int group_await(struct group *group, struct command *command);
/* The group's own thread: takes a job (back) into the list of those to post. */
void group_activate(struct group *group, struct job *job);
/* The group's own thread: takes a job out of its submission ring. */
void group_accept_job(struct group *group, struct job *job);
void group_unlist_live(struct group *group, struct job *job);
struct group *job_home(struct ekv_engine *engine, const struct job *job);

/* wait.c: what the progress thread does when there is nothing to do. */
void group_wait(struct group *group, bool worked);

/* post.c: from jobs to operations. True: something was posted or copied. */
bool group_post(struct group *group, uint64_t now_ns);
/* The address of a peer's NIC on a rail, inserted when first used; with the peer's lock
 * held for reading. */
bool group_path(struct peer *peer, struct rail *rail, uint32_t nic, fi_addr_t *address);
/* peers.c: where the provider serves only those it knows, makes all of a peer's NICs
 * known to a rail; in the rail's thread, with the peer's lock held for reading. */
void rail_meet(struct rail *rail, struct peer *peer);
void operation_begin(struct rail *rail, struct operation *operation);

/* settle.c: from completions to job outcomes. */
bool group_drain(struct group *group, uint64_t now_ns);
void group_check_deadlines(struct group *group, uint64_t now_ns);
/* With job->lock held: moves the job to its next stage when nothing is unsettled.
 * True: it is over and held once more, and the caller must call job_conclude without
 * the lock. */
bool job_advance(struct group *group, struct job *job);
void job_conclude(struct group *group, struct job *job);
/* Is there a path to the job's peer that has not failed lately? */
bool job_has_detour(struct group *group, const struct job *job, uint64_t now_ns);
/* How an operation ended: all zero for success. */
struct outcome {
    int code; /* ekv_code */
    int error;
    int provider_error;
    bool blameless; /* the path is as good as before */
    char text[160];
};
/* In the rail's thread, without the job's lock. */
void operation_settle(struct group *group, struct rail *rail, struct operation *operation,
                      const struct outcome *outcome, uint64_t now_ns);
/* Settles all that was in flight on an endpoint that is closed; blame: its paths rest. */
void rail_abort(struct group *group, struct rail *rail, int code, const char *text, bool blame);
void trace_job(struct ekv_engine *engine, uint32_t event, const struct job *job, uint32_t rail);

/* outage.c: a rail's device failed, fell silent, or carried something to its end; probe:
 * the operation was begun while the rail was out. */
void rail_note_failure(struct ekv_engine *engine, struct rail *rail, bool probe, const char *reason,
                       uint64_t now_ns);
void rail_note_silence(struct ekv_engine *engine, struct rail *rail, const char *reason,
                       uint64_t now_ns);
void rail_note_success(struct ekv_engine *engine, struct rail *rail, bool probe, uint64_t now_ns);

/* reset.c: giving a rail a new endpoint. */
int mender_start(struct ekv_engine *engine, ekv_error *error);
void mender_stop(struct ekv_engine *engine);
/* Has the rail reset soon; reason is a constant, and goes into the log behind "because". */
void mender_ask(struct ekv_engine *engine, const struct rail *rail, const char *reason);
/* Asks for resets of rails on which nothing ends. */
void group_check_stuck(struct group *group, uint64_t now_ns);

/* warm.c */
void warm_drop(struct warm *warm);
void warm_settle(struct warm *warm, int code);
bool group_post_warms(struct group *group, uint64_t now_ns);
void warm_run(struct group *group, struct command *command);

/* near.c: engines of this process, found by incarnation. */
void registry_add(struct ekv_engine *engine);
void registry_remove(struct ekv_engine *engine);
/* Waits until every other engine has served what is in its queues. */
void registry_flush(void);
int near_copy(struct ekv_engine *engine, const struct job *job, const struct piece *piece);
int near_notify(const struct job *job, const ekv_notice *notice);

/* engine.c */
struct group *rail_group(struct ekv_engine *engine, uint32_t rail);
void engine_signal(struct ekv_engine *engine);
void engine_unsignal(struct ekv_engine *engine);
void engine_receive_notice(struct ekv_engine *engine, struct rail *rail, const ekv_notice *notice);
void engine_release_job(struct ekv_engine *engine, struct job *job);

/* Every exported call: enter, work, leave. */
int engine_enter(struct ekv_engine *engine, ekv_error *error);
void engine_leave(struct ekv_engine *engine);

#endif
