#include "harness.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static bool target_is_killed;

double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

struct fi_info *request_info(const struct rail_options *options)
{
    struct fi_info *hints = fi_allocinfo(), *list = NULL;
    CHECK(hints);
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = options->threading ? options->threading : FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = strdup("efa");
    hints->fabric_attr->name = strdup(options->fabric ? options->fabric : "efa");
    CHECK_EQUAL(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &list), 0);
    fi_freeinfo(hints);
    return list;
}

void endpoint_create(struct rail *rail)
{
    CHECK_EQUAL(fi_endpoint(rail->domain, rail->info, &rail->endpoint, NULL), 0);
    CHECK_EQUAL(fi_ep_bind(rail->endpoint, &rail->events->fid, 0), 0);
    CHECK_EQUAL(fi_ep_bind(rail->endpoint, &rail->addresses->fid, 0), 0);
    CHECK_EQUAL(fi_ep_bind(rail->endpoint, &rail->completions->fid, FI_TRANSMIT | FI_RECV), 0);
    CHECK_EQUAL(fi_enable(rail->endpoint), 0);
}

void rail_open(struct rail *rail, struct rail_options options)
{
    struct fi_eq_attr event_attributes = {0};
    struct fi_av_attr address_attributes = {.type = FI_AV_TABLE};
    struct fi_cq_attr queue_attributes = {.format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
    struct fi_info *list = request_info(&options), *chosen = list;
    memset(rail, 0, sizeof *rail);
    for (int i = 0; i < options.nic; i++)
        chosen = chosen->next;
    CHECK(chosen);
    rail->info = fi_dupinfo(chosen);
    fi_freeinfo(list);
    CHECK_EQUAL(fi_fabric(rail->info->fabric_attr, &rail->fabric, NULL), 0);
    CHECK_EQUAL(fi_domain(rail->fabric, rail->info, &rail->domain, NULL), 0);
    CHECK_EQUAL(fi_eq_open(rail->fabric, &event_attributes, &rail->events, NULL), 0);
    CHECK_EQUAL(fi_av_open(rail->domain, &address_attributes, &rail->addresses, NULL), 0);
    queue_attributes.size = options.queue_size ? options.queue_size : 8192;
    CHECK_EQUAL(fi_cq_open(rail->domain, &queue_attributes, &rail->completions, NULL), 0);
    endpoint_create(rail);
    rail->memory_bytes = options.memory_bytes ? options.memory_bytes : 1 << 20;
    rail->memory = calloc(1, rail->memory_bytes);
    CHECK_EQUAL(fi_mr_reg(rail->domain, rail->memory, rail->memory_bytes, ALL_ACCESS, 0, 0, 0,
                          &rail->region, NULL),
                0);
    rail->descriptor = fi_mr_desc(rail->region);
}

void rail_close(struct rail *rail)
{
    if (rail->endpoint)
        CHECK_EQUAL(fi_close(&rail->endpoint->fid), 0);
    if (rail->region)
        CHECK_EQUAL(fi_close(&rail->region->fid), 0);
    CHECK_EQUAL(fi_close(&rail->completions->fid), 0);
    CHECK_EQUAL(fi_close(&rail->addresses->fid), 0);
    CHECK_EQUAL(fi_close(&rail->domain->fid), 0);
    CHECK_EQUAL(fi_close(&rail->events->fid), 0);
    CHECK_EQUAL(fi_close(&rail->fabric->fid), 0);
    fi_freeinfo(rail->info);
    free(rail->memory);
}

static void send_all(int socket, const void *bytes, size_t size)
{
    CHECK_EQUAL(send(socket, bytes, size, MSG_NOSIGNAL), size);
}

static void receive_all(int socket, void *bytes, size_t size)
{
    ssize_t received;
    do /* a process that was stopped finds its call interrupted */
        received = recv(socket, bytes, size, MSG_WAITALL);
    while (received < 0 && errno == EINTR);
    CHECK_EQUAL(received, size);
}

void send_word(int socket, uint64_t word)
{
    send_all(socket, &word, sizeof word);
}

uint64_t receive_word(int socket)
{
    uint64_t word;
    receive_all(socket, &word, sizeof word);
    return word;
}

void exchange(const struct rail *rail, int socket, struct remote *remote)
{
    struct remote own = {.memory = (uintptr_t)rail->memory, .key = fi_mr_key(rail->region)};
    size_t size = sizeof own.name;
    CHECK_EQUAL(fi_getname(&rail->endpoint->fid, own.name, &size), 0);
    CHECK_EQUAL(size, 32);
    send_all(socket, &own, sizeof own);
    receive_all(socket, remote, sizeof *remote);
    CHECK_EQUAL(fi_av_insert(rail->addresses, remote->name, 1, &remote->address, 0, NULL), 1);
    /* Both sides know each other before anyone goes on. */
    send_word(socket, 0);
    receive_word(socket);
}

void expect_target_killed(void)
{
    target_is_killed = true;
}

void run_pair(pair_function initiator, pair_function target)
{
    int sockets[2], status;
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    struct timeval timeout = {PAIR_TIMEOUT_S, 0};
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(setsockopt(sockets[i], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(sockets[0]);
        target(sockets[1], 0);
        exit(0);
    }
    close(sockets[1]);
    initiator(sockets[0], child);
    close(sockets[0]);
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    if (target_is_killed)
        CHECK(WIFSIGNALED(status));
    else
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

bool next_completion(struct fid_cq *queue, struct fi_cq_data_entry *entry,
                     struct fi_cq_err_entry *error, double timeout_s)
{
    double deadline = now_s() + timeout_s;
    do {
        ssize_t result = fi_cq_read(queue, entry, 1);
        if (result == 1) {
            error->err = 0;
            return true;
        }
        if (result == -FI_EAVAIL) {
            memset(error, 0, sizeof *error);
            CHECK_EQUAL(fi_cq_readerr(queue, error, 0), 1);
            return true;
        }
        CHECK_EQUAL(result, -FI_EAGAIN);
        sched_yield();
    } while (now_s() < deadline);
    return false;
}

struct fi_cq_data_entry expect_completion(struct fid_cq *queue)
{
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error;
    CHECK(next_completion(queue, &entry, &error, PAIR_TIMEOUT_S));
    CHECK_EQUAL(error.err ? error.prov_errno : 0, 0);
    return entry;
}

struct fi_cq_err_entry expect_error(struct fid_cq *queue, int provider_error)
{
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error;
    CHECK(next_completion(queue, &entry, &error, PAIR_TIMEOUT_S));
    CHECK(error.err != 0);
    CHECK_EQUAL(error.prov_errno, provider_error);
    return error;
}

bool nothing_completes(struct fid_cq *queue, double for_s)
{
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error;
    return !next_completion(queue, &entry, &error, for_s);
}

int run_case(const struct test_case *cases, int case_count, int argument_count, char **arguments)
{
    for (int i = 0; i < case_count; i++) {
        if (argument_count != 2 || strcmp(arguments[1], cases[i].name) != 0)
            continue;
        cases[i].run();
        printf("%s: ok\n", cases[i].name);
        return 0;
    }
    fprintf(stderr, "give one of these names:\n");
    for (int i = 0; i < case_count; i++)
        fprintf(stderr, "  %s\n", cases[i].name);
    return 2;
}
