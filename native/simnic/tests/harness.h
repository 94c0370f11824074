/* What the tests share: checks, one NIC with everything open on it, and pairs of processes. */
#ifndef SIMNIC_TESTS_HARNESS_H
#define SIMNIC_TESTS_HARNESS_H

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: pid %d: not true: %s\n", __FILE__, __LINE__, (int)getpid(),    \
                    #condition);                                                                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_EQUAL(actual, expected)                                                              \
    do {                                                                                           \
        long long actual_ = (long long)(actual), expected_ = (long long)(expected);                \
        if (actual_ != expected_) {                                                                \
            fprintf(stderr, "%s:%d: pid %d: %s is %lld, not %lld (%s)\n", __FILE__, __LINE__,      \
                    (int)getpid(), #actual, actual_, expected_, #expected);                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define PAIR_TIMEOUT_S 30

enum { ALL_ACCESS = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE };

struct rail_options {
    int nic;
    enum fi_threading threading; /* FI_THREAD_UNSPEC: FI_THREAD_DOMAIN */
    size_t queue_size;           /* of the completion queue; 0: 8192 */
    const char *fabric;          /* NULL: efa */
    size_t memory_bytes;         /* 0: 1 MiB */
};

/* One NIC: a registered piece of memory and an endpoint. */
struct rail {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_eq *events;
    struct fid_av *addresses;
    struct fid_cq *completions;
    struct fid_ep *endpoint;
    struct fid_mr *region;
    char *memory;
    size_t memory_bytes;
    void *descriptor;
};

/* The other side, as told over the socket. */
struct remote {
    char name[32];
    uint64_t memory;
    uint64_t key;
    fi_addr_t address;
};

struct fi_info *request_info(const struct rail_options *options);
void rail_open(struct rail *rail, struct rail_options options);
void endpoint_create(struct rail *rail);
void rail_close(struct rail *rail);

/* Tells the other side about the rail and puts its address into the vector. */
void exchange(const struct rail *rail, int socket, struct remote *remote);

/* Runs initiator here and target in a forked process; both get one end of a socket. The target must
 * exit with 0 unless the initiator reports its death with expect_target_killed. */
typedef void (*pair_function)(int socket, pid_t target);
void run_pair(pair_function initiator, pair_function target);
void expect_target_killed(void);

void send_word(int socket, uint64_t word);
uint64_t receive_word(int socket);

double now_s(void);

/* Each test program holds several cases and runs the one that its argument names, so that each has
 * a process, and an environment, of its own. */
struct test_case {
    const char *name;
    void (*run)(void);
};
int run_case(const struct test_case *cases, int case_count, int argument_count, char **arguments);

/* Reads one completion, good or bad, within the time; false when none came. */
bool next_completion(struct fid_cq *queue, struct fi_cq_data_entry *entry,
                     struct fi_cq_err_entry *error, double timeout_s);
/* Expects a good one. */
struct fi_cq_data_entry expect_completion(struct fid_cq *queue);
/* Expects an error entry with this provider code. */
struct fi_cq_err_entry expect_error(struct fid_cq *queue, int provider_error);
bool nothing_completes(struct fid_cq *queue, double for_s);

#endif
