/* Who may touch which memory, and from which thread. */
#include "harness.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

static ssize_t write_to(struct rail *rail, const struct remote *remote, uint64_t offset,
                        size_t size, uint64_t key)
{
    return fi_write(rail->endpoint, rail->memory, size, rail->descriptor, remote->address,
                    remote->memory + offset, key, NULL);
}

static void expect_write_error(struct rail *rail, const struct remote *remote, uint64_t offset,
                               size_t size, uint64_t key, int provider_error)
{
    CHECK_EQUAL(write_to(rail, remote, offset, size, key), 0);
    struct fi_cq_err_entry error = expect_error(rail->completions, provider_error);
    CHECK(strlen(fi_cq_strerror(rail->completions, error.prov_errno, NULL, NULL, 0)) > 0);
}

static void remote_keys_initiator(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    (void)target;
    rail_open(&rail, (struct rail_options){.nic = 0});
    exchange(&rail, socket, &remote);
    uint64_t read_only_key = receive_word(socket), other_nic_key = receive_word(socket);
    uint64_t closed_key = receive_word(socket);
    memset(rail.memory, 0x5a, 4096);
    expect_write_error(&rail, &remote, 0, 64, remote.key + 1, 7);
    expect_write_error(&rail, &remote, 0, 64, remote.key | 1ull << 32, 7);
    expect_write_error(&rail, &remote, rail.memory_bytes - 63, 64, remote.key, 7);
    expect_write_error(&rail, &remote, (uint64_t)-1, 64, remote.key, 7);
    expect_write_error(&rail, &remote, 0, 64, read_only_key, 7);
    expect_write_error(&rail, &remote, 0, 64, other_nic_key, 7);
    expect_write_error(&rail, &remote, 0, 64, closed_key, 7);
    CHECK_EQUAL(fi_read(rail.endpoint, rail.memory + 4096, 64, rail.descriptor, remote.address,
                        remote.memory, read_only_key, NULL),
                0);
    expect_completion(rail.completions);
    /* The good key works after all that. */
    CHECK_EQUAL(write_to(&rail, &remote, 4096, 64, remote.key), 0);
    expect_completion(rail.completions);
    send_word(socket, 0);
    rail_close(&rail);
}

static void remote_keys_target(int socket, pid_t self)
{
    struct rail rail, other;
    struct remote remote;
    struct fid_mr *read_only, *closed;
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 0});
    rail_open(&other, (struct rail_options){.nic = 1, .memory_bytes = 4096});
    exchange(&rail, socket, &remote);
    CHECK_EQUAL(
        fi_mr_reg(rail.domain, rail.memory, 4096, FI_REMOTE_READ, 0, 0, 0, &read_only, NULL), 0);
    send_word(socket, fi_mr_key(read_only));
    struct fid_mr *same_memory;
    CHECK_EQUAL(fi_mr_reg(other.domain, rail.memory, 4096, ALL_ACCESS, 0, 0, 0, &same_memory, NULL),
                0);
    send_word(socket, fi_mr_key(same_memory));
    CHECK_EQUAL(fi_mr_reg(rail.domain, rail.memory, 4096, ALL_ACCESS, 0, 0, 0, &closed, NULL), 0);
    uint64_t closed_key = fi_mr_key(closed);
    CHECK_EQUAL(fi_close(&closed->fid), 0);
    CHECK_EQUAL(fi_mr_reg(rail.domain, rail.memory, 4096, ALL_ACCESS, 0, 0, 0, &closed, NULL), 0);
    CHECK(fi_mr_key(closed) != closed_key);
    send_word(socket, closed_key);
    receive_word(socket);
    for (int i = 0; i < 4096; i++)
        CHECK_EQUAL(rail.memory[i], 0);
    CHECK_EQUAL(rail.memory[4096], 0x5a);
    CHECK_EQUAL(fi_close(&read_only->fid), 0);
    CHECK_EQUAL(fi_close(&closed->fid), 0);
    CHECK_EQUAL(fi_close(&same_memory->fid), 0);
    rail_close(&other);
    rail_close(&rail);
}

static void remote_keys(void)
{
    run_pair(remote_keys_initiator, remote_keys_target);
}

static fi_addr_t insert_self(struct rail *rail)
{
    char name[32];
    size_t size = sizeof name;
    fi_addr_t address;
    CHECK_EQUAL(fi_getname(&rail->endpoint->fid, name, &size), 0);
    CHECK_EQUAL(fi_av_insert(rail->addresses, name, 1, &address, 0, NULL), 1);
    return address;
}

static void local_descriptors(void)
{
    struct rail rail, other;
    struct fid_mr *narrow;
    rail_open(&rail, (struct rail_options){.nic = 0});
    rail_open(&other, (struct rail_options){.nic = 1});
    fi_addr_t self = insert_self(&rail);
    uint64_t there = (uintptr_t)rail.memory + 65536, key = fi_mr_key(rail.region);
    CHECK_EQUAL(fi_mr_reg(rail.domain, rail.memory, 4096, FI_READ, 0, 0, 0, &narrow, NULL), 0);
    struct fid_ep *endpoint = rail.endpoint;
    CHECK_EQUAL(fi_write(endpoint, rail.memory, 64, NULL, self, there, key, NULL), -FI_EINVAL);
    CHECK_EQUAL(fi_write(endpoint, rail.memory, 64, other.descriptor, self, there, key, NULL),
                -FI_EINVAL);
    CHECK_EQUAL(fi_write(endpoint, other.memory, 64, rail.descriptor, self, there, key, NULL),
                -FI_EINVAL);
    CHECK_EQUAL(fi_write(endpoint, rail.memory, 64, fi_mr_desc(narrow), self, there, key, NULL),
                -FI_EINVAL);
    CHECK_EQUAL(fi_read(endpoint, rail.memory, 4097, fi_mr_desc(narrow), self, there, key, NULL),
                -FI_EINVAL);
    CHECK_EQUAL(fi_read(endpoint, rail.memory, 4096, fi_mr_desc(narrow), self, there, key, NULL),
                0);
    expect_completion(rail.completions);
    CHECK_EQUAL(fi_send(endpoint, rail.memory, 8, NULL, self, NULL), -FI_EINVAL);
    CHECK_EQUAL(fi_recv(endpoint, rail.memory, 8, fi_mr_desc(narrow), self, NULL), -FI_EINVAL);
    CHECK_EQUAL(fi_write(endpoint, rail.memory, 64, rail.descriptor, self + 1, there, key, NULL),
                -FI_EINVAL);
    /* Closed between the post and the movement. */
    CHECK_EQUAL(fi_read(endpoint, rail.memory, 64, fi_mr_desc(narrow), self, there, key, NULL), 0);
    void *stale = fi_mr_desc(narrow);
    CHECK_EQUAL(fi_close(&narrow->fid), 0);
    expect_error(rail.completions, 5);
    CHECK_EQUAL(fi_read(endpoint, rail.memory, 64, stale, self, there, key, NULL), -FI_EINVAL);
    /* So is an address. */
    CHECK_EQUAL(fi_write(endpoint, rail.memory, 64, rail.descriptor, self, there, key, NULL), 0);
    CHECK_EQUAL(fi_av_remove(rail.addresses, &self, 1, 0), 0);
    expect_error(rail.completions, 4);
    CHECK_EQUAL(fi_write(endpoint, rail.memory, 64, rail.descriptor, self, there, key, NULL),
                -FI_EINVAL);
    CHECK_EQUAL(fi_mr_reg(rail.domain, (void *)4096, 4096, ALL_ACCESS, 0, 0, 0, &narrow, NULL),
                -FI_EFAULT);
    rail_close(&rail);
    rail_close(&other);
}

static void unknown_peers_initiator(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    char name[32];
    size_t size = sizeof name;
    (void)target;
    rail_open(&rail, (struct rail_options){.nic = 0});
    CHECK_EQUAL(recv(socket, &remote, sizeof remote, MSG_WAITALL), sizeof remote);
    CHECK_EQUAL(fi_av_insert(rail.addresses, remote.name, 1, &remote.address, 0, NULL), 1);
    expect_write_error(&rail, &remote, 0, 8, remote.key, 14);
    CHECK_EQUAL(fi_getname(&rail.endpoint->fid, name, &size), 0);
    CHECK_EQUAL(send(socket, name, size, 0), size);
    receive_word(socket);
    CHECK_EQUAL(write_to(&rail, &remote, 0, 8, remote.key), 0);
    expect_completion(rail.completions);
    send_word(socket, 0);
    receive_word(socket);
    expect_write_error(&rail, &remote, 0, 8, remote.key, 14);
    send_word(socket, 0);
    receive_word(socket);
    /* The endpoint itself is gone. */
    expect_write_error(&rail, &remote, 0, 8, remote.key, 9);
    send_word(socket, 0);
    rail_close(&rail);
}

static void unknown_peers_target(int socket, pid_t self)
{
    struct rail rail;
    struct remote own = {.address = 0};
    char name[32];
    size_t size = sizeof own.name;
    fi_addr_t initiator;
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 0});
    own.memory = (uintptr_t)rail.memory;
    own.key = fi_mr_key(rail.region);
    CHECK_EQUAL(fi_getname(&rail.endpoint->fid, own.name, &size), 0);
    CHECK_EQUAL(send(socket, &own, sizeof own, 0), sizeof own);
    CHECK_EQUAL(recv(socket, name, sizeof name, MSG_WAITALL), sizeof name);
    CHECK_EQUAL(fi_av_insert(rail.addresses, name, 1, &initiator, 0, NULL), 1);
    send_word(socket, 0);
    receive_word(socket);
    CHECK_EQUAL(fi_av_remove(rail.addresses, &initiator, 1, 0), 0);
    send_word(socket, 0);
    receive_word(socket);
    CHECK_EQUAL(fi_close(&rail.endpoint->fid), 0);
    rail.endpoint = NULL;
    send_word(socket, 0);
    receive_word(socket);
    rail_close(&rail);
}

static void unknown_peers(void)
{
    run_pair(unknown_peers_initiator, unknown_peers_target);
}

static struct rail threaded_rail;
static fi_addr_t threaded_self;
static atomic_long threaded_done;

enum { THREADS = 4, POSTS_PER_THREAD = 20000 };

static void post_one(void)
{
    for (;;) {
        ssize_t result =
            fi_write(threaded_rail.endpoint, threaded_rail.memory, 64, threaded_rail.descriptor,
                     threaded_self, (uintptr_t)threaded_rail.memory + 4096,
                     fi_mr_key(threaded_rail.region), NULL);
        if (result == 0)
            return;
        CHECK_EQUAL(result, -FI_EAGAIN);
        sched_yield();
    }
}

static void *post_many(void *argument)
{
    for (int i = 0; i < POSTS_PER_THREAD; i++)
        post_one();
    return argument;
}

static void *collect(void *argument)
{
    struct fi_cq_data_entry entries[32];
    while (atomic_load(&threaded_done) < (long)THREADS * POSTS_PER_THREAD) {
        ssize_t result = fi_cq_read(threaded_rail.completions, entries, 32);
        if (result > 0)
            atomic_fetch_add(&threaded_done, result);
        else
            sched_yield();
    }
    return argument;
}

static void run_threads(enum fi_threading threading)
{
    pthread_t posters[THREADS], collector;
    rail_open(&threaded_rail, (struct rail_options){.nic = 0, .threading = threading});
    threaded_self = insert_self(&threaded_rail);
    CHECK_EQUAL(pthread_create(&collector, NULL, collect, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_create(&posters[i], NULL, post_many, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(posters[i], NULL);
    pthread_join(collector, NULL);
    CHECK_EQUAL(atomic_load(&threaded_done), (long)THREADS * POSTS_PER_THREAD);
    rail_close(&threaded_rail);
}

static void expect_abort(enum fi_threading threading)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        for (int i = 0; i < 100; i++) {
            atomic_store(&threaded_done, 0);
            run_threads(threading);
        }
        exit(0);
    }
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void two_threads_abort(void)
{
    expect_abort(FI_THREAD_DOMAIN);
}

static void two_posters_abort(void)
{
    expect_abort(FI_THREAD_SAFE);
}

static void thread_safe_posts(void)
{
    run_threads(FI_THREAD_SAFE);
}

/* Environment: a latency of 100 ms */
static void closing_cancels(void)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    memset(rail.memory, 1, 64);
    for (int i = 0; i < 10; i++)
        CHECK_EQUAL(fi_write(rail.endpoint, rail.memory, 64, rail.descriptor, self,
                             (uintptr_t)rail.memory + 4096, fi_mr_key(rail.region), NULL),
                    0);
    CHECK(nothing_completes(rail.completions, 0.01));
    CHECK_EQUAL(fi_close(&rail.endpoint->fid), 0);
    endpoint_create(&rail);
    CHECK(nothing_completes(rail.completions, 0.2));
    CHECK_EQUAL(rail.memory[4096], 0);
    fi_addr_t again = insert_self(&rail);
    CHECK_EQUAL(fi_write(rail.endpoint, rail.memory, 64, rail.descriptor, again,
                         (uintptr_t)rail.memory + 4096, fi_mr_key(rail.region), NULL),
                0);
    expect_completion(rail.completions);
    CHECK_EQUAL(rail.memory[4096], 1);
    rail_close(&rail);
}

/* Environment: 64 KiB a region, 128 KiB a NIC */
static void registration_limits(void)
{
    struct rail rail;
    struct fid_mr *second, *third;
    char *memory = calloc(3, 65536);
    rail_open(&rail, (struct rail_options){.nic = 0, .memory_bytes = 65536});
    CHECK_EQUAL(fi_mr_reg(rail.domain, memory, 65537, ALL_ACCESS, 0, 0, 0, &second, NULL),
                -FI_ENOMEM);
    CHECK_EQUAL(fi_mr_reg(rail.domain, memory, 65536, ALL_ACCESS, 0, 0, 0, &second, NULL), 0);
    CHECK_EQUAL(fi_mr_reg(rail.domain, memory, 1, ALL_ACCESS, 0, 0, 0, &third, NULL), -FI_ENOMEM);
    CHECK_EQUAL(fi_close(&second->fid), 0);
    CHECK_EQUAL(fi_mr_reg(rail.domain, memory, 1, ALL_ACCESS, 0, 0, 0, &third, NULL), 0);
    CHECK_EQUAL(fi_close(&third->fid), 0);
    rail_close(&rail);
    free(memory);
}

/* Environment: EFA_KV_SIM_HMEM=1. Without it, device memory is refused. */
static void register_device_memory(int expected)
{
    struct rail rail;
    struct fid_mr *region;
    rail_open(&rail, (struct rail_options){.nic = 0});
    struct iovec segment = {rail.memory, 4096};
    struct fi_mr_attr attributes = {
        .mr_iov = &segment, .iov_count = 1, .access = FI_REMOTE_WRITE, .iface = FI_HMEM_CUDA};
    CHECK_EQUAL(fi_mr_regattr(rail.domain, &attributes, 0, &region), expected);
    if (expected == 0)
        CHECK_EQUAL(fi_close(&region->fid), 0);
    rail_close(&rail);
}

static void device_memory_refused(void)
{
    register_device_memory(-FI_EOPNOTSUPP);
}

static void device_memory_taken(void)
{
    register_device_memory(0);
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {
        {"remote_keys", remote_keys},
        {"local_descriptors", local_descriptors},
        {"unknown_peers", unknown_peers},
        {"two_threads_abort", two_threads_abort},
        {"two_posters_abort", two_posters_abort},
        {"thread_safe_posts", thread_safe_posts},
        {"closing_cancels", closing_cancels},
        {"registration_limits", registration_limits},
        {"device_memory_refused", device_memory_refused},
        {"device_memory_taken", device_memory_taken},
    };
    return run_case(cases, sizeof cases / sizeof cases[0], count, arguments);
}
