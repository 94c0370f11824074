/* choice.h - which rail and which of the peer's NICs carry the next stripe; see
 * choice.c. */
#ifndef EKV_CHOICE_H
#define EKV_CHOICE_H

#include "engine.h"

enum choice {
    CHOICE_MADE,
    CHOICE_WAIT,      /* nothing is free now */
    CHOICE_ELSEWHERE, /* only rails of other groups will do */
    CHOICE_HOPELESS   /* there is no path */
};

/* What has to go: the first byte of a stripe, in which regions of both sides. */
struct errand {
    struct job *job;
    const struct region *region;
    const struct remote_region *remote;
    uint64_t remote_address;
};

/* For a stripe, over the rails of all groups: CHOICE_MADE names one of this group's.
 * Where another group's rail is next, that group is called.  With job->lock and, for
 * reading, the peer's lock held. */
enum choice choose_for_stripe(struct group *group, const struct errand *errand, uint64_t now_ns,
                              struct rail **rail, uint32_t *nic);

/* For a job's notice: over this group's rails, or in another group when all of these
 * have failed. With job->lock held. */
enum choice choose_for_message(struct group *group, struct job *job, uint64_t now_ns,
                               struct rail **rail, uint32_t *nic);

/* A rail of another group that is not known to be out for the peer. */
bool rail_elsewhere(const struct group *group, const struct peer *peer, uint32_t *rail);

#endif
