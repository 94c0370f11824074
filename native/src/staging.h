/* staging.h - GPU memory that no NIC reaches: it travels in messages, through host memory.
 *
 * A PUT carries bytes, and the target's progress thread copies them where they belong and
 * answers; a GET asks for bytes, which come with the answer.  So a completion means landed
 * here too, and no NIC ever writes anything but receives that their owner has posted.  Who
 * may copy is asked when it is done: a message names the region's staging key, which
 * changes with the others, and a late one finds it gone.
 *
 * All of it belongs to the rail's progress thread. */
#ifndef EKV_STAGING_H
#define EKV_STAGING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "efa_kv.h"

struct cuda;
struct fid_mr;
struct group;
struct operation;
struct rail;
struct region;

/* Most bytes of one message; requests of a rail and answers with bytes on their way at once.
 *
 * Both sides may ask at the same time, so nobody may fill all receives of the other: half of
 * them are kept free for answers, and who asks beyond that is told to come again. */
#define STAGE_BYTES (UINT64_C(32) << 10)
#define STAGE_REQUESTS 32u
#define STAGE_ANSWERS 64u

enum staged_kind { STAGED_PUT = 1, STAGED_GET, STAGED_DONE, STAGED_DATA };

/* Little-endian on the wire; STAGED_PUT and STAGED_DATA have `length` bytes behind it. */
struct staged_message {
    uint32_t magic;
    uint16_t version;
    uint16_t kind;
    uint64_t sender; /* incarnation */
    uint64_t cookie; /* the sender's, or of what is answered */
    uint64_t key;
    uint64_t address;
    uint64_t length;
    int32_t status;
    uint32_t reserved;
    uint64_t reserved2;
};

_Static_assert(sizeof(struct staged_message) == 64, "the wire format is 64 bytes");

/* What a rail keeps for it. */
struct stage {
    struct cuda *cuda;
    uint8_t *room; /* slabs: one per receive, then for requests, then for answers */
    struct fid_mr *mr;
    void *descriptor;
    bool pinned;
    bool announced;
    uint32_t receive_count;
    uint32_t free_requests[STAGE_REQUESTS]; /* slabs */
    uint32_t free_request_count;
    uint32_t free_answers[STAGE_ANSWERS];
    uint32_t free_answer_count;
    struct operation **deferred; /* receives that could not be answered yet, oldest first */
    uint32_t deferred_count;
    uint64_t cookies;
    uint32_t waiting; /* operations whose message has gone and was not answered */
};

/* With the rail's slots there and its receives not posted yet. */
int stage_open(struct rail *rail, struct cuda *cuda, ekv_error *error);
void stage_close(struct rail *rail);
/* The endpoint is another one: what it had received is gone. */
void stage_reset(struct rail *rail);

/* A received message.  False: it is none of these. */
bool stage_receive(struct group *group, struct rail *rail, struct operation *receive, size_t length,
                   uint64_t now_ns);
/* Answers what could not be answered before. True: something was. */
bool stage_answer_deferred(struct group *group, uint64_t now_ns);
/* The provider has taken an operation's message over. */
void stage_sent(struct group *group, struct rail *rail, struct operation *operation,
                uint64_t now_ns);
/* Before an operation settles, however it ended. */
void stage_settle(struct rail *rail, struct operation *operation);
/* Ends operations that nobody will hear the answer of: of failed jobs and removed peers. */
void stage_check(struct group *group, struct rail *rail, uint64_t now_ns);

/* A fresh key for a region, which names its slot. */
uint64_t stage_key_draw(uint32_t slot);

#endif
