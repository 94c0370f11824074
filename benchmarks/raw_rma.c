/* raw_rma.c - the limit: a bare loop of one-sided writes or reads over a libfabric provider.
 *
 * Two processes, one endpoint per device, nothing between the loop and the provider: no jobs, no
 * checks, no threads.  What another engine loses against this loop over the same provider is its
 * own cost.  Prints one line of JSON.
 *
 *   raw_rma [--provider net] [--operation write|read] [--size 65536] [--batch 128]
 *           [--in-flight 1] [--pattern scattered|contiguous] [--nics 1] [--buffer 268435456]
 *           [--seconds 2] [--landed 1]
 *
 * --landed 1 asks that a completion means "placed at the target", which is what a KV cache needs;
 * 0 takes the provider's default, which over TCP only means "taken by the kernel".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { NICS_MAX = 32, COMPLETIONS = 64, NAME_BYTES = 128 };

struct options {
    const char *provider;
    bool is_read;
    bool is_scattered;
    bool landed;
    size_t size_bytes;
    size_t batch;
    size_t in_flight;
    size_t buffer_bytes;
    int nics;
    double seconds;
};

struct rail {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *addresses;
    struct fid_cq *completions;
    struct fid_ep *endpoint;
    struct fid_mr *region;
    void *descriptor;
    fi_addr_t to;
    uint64_t remote_base;
    uint64_t remote_key;
    size_t depth;
    size_t in_flight;
    struct fi_context2 *contexts;
    struct fi_context2 **spare;
    size_t spare_count;
};

struct greeting {
    uint8_t name[NAME_BYTES];
    uint64_t name_bytes;
    uint64_t base;
    uint64_t key;
};

static struct options options = {"net", false, true, true, 65536, 128, 1, 256u << 20, 1, 2.0};
static struct rail rails[NICS_MAX];
static int rail_count;
static char *memory;

static void fail(const char *what, long code)
{
    fprintf(stderr, "raw_rma: %s: %s\n", what,
            code < 0 ? fi_strerror((int)-code) : strerror(errno));
    exit(2);
}

static void check(const char *what, long code)
{
    if (code < 0)
        fail(what, code);
}

static double clock_s(clockid_t clock)
{
    struct timespec now;

    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- opening ------------------------------------------------------------------------ */

static struct fi_info *find_devices(uint64_t op_flags)
{
    bool is_ip = strncmp(options.provider, "efa", 3) != 0 && strcmp(options.provider, "shm") != 0;
    struct fi_info *hints = fi_allocinfo(), *found = NULL;
    uint32_t version = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);

    if (version > fi_version())
        version = fi_version();
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->tx_attr->op_flags = op_flags;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->fabric_attr->prov_name = strdup(options.provider);
    long code =
        fi_getinfo(version, is_ip ? "127.0.0.1" : NULL, NULL, is_ip ? FI_SOURCE : 0, hints, &found);
    fi_freeinfo(hints);
    if (code != 0 && op_flags == 0)
        fail(options.provider, code);
    return code == 0 ? found : NULL;
}

static void open_endpoint(struct rail *rail)
{
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = 16};
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_NONE};

    rail->depth = rail->info->tx_attr->size;
    cq.size = rail->depth + rail->info->rx_attr->size + 64;
    check("fi_fabric", fi_fabric(rail->info->fabric_attr, &rail->fabric, NULL));
    check("fi_domain", fi_domain(rail->fabric, rail->info, &rail->domain, NULL));
    check("fi_av_open", fi_av_open(rail->domain, &av, &rail->addresses, NULL));
    check("fi_cq_open", fi_cq_open(rail->domain, &cq, &rail->completions, NULL));
    check("fi_endpoint", fi_endpoint(rail->domain, rail->info, &rail->endpoint, NULL));
    check("fi_ep_bind", fi_ep_bind(rail->endpoint, &rail->addresses->fid, 0));
    check("fi_ep_bind", fi_ep_bind(rail->endpoint, &rail->completions->fid, FI_TRANSMIT | FI_RECV));
    check("fi_enable", fi_enable(rail->endpoint));
    rail->contexts = calloc(rail->depth, sizeof *rail->contexts);
    rail->spare = calloc(rail->depth, sizeof *rail->spare);
    for (size_t i = 0; i < rail->depth; i++)
        rail->spare[rail->spare_count++] = &rail->contexts[i];
}

static void register_memory(struct rail *rail, int number)
{
    int mode = rail->info->domain_attr->mr_mode;
    uint64_t access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    uint64_t key = mode & FI_MR_PROV_KEY ? 0 : (uint64_t)number + 17;

    check("fi_mr_reg", fi_mr_reg(rail->domain, memory, options.buffer_bytes, access, 0, key, 0,
                                 &rail->region, NULL));
    if (mode & FI_MR_ENDPOINT) {
        check("fi_mr_bind", fi_mr_bind(rail->region, &rail->endpoint->fid, 0));
        check("fi_mr_enable", fi_mr_enable(rail->region));
    }
    rail->descriptor = fi_mr_desc(rail->region);
}

static void open_rails(void)
{
    struct fi_info *found = options.landed ? find_devices(FI_DELIVERY_COMPLETE) : NULL;

    if (!found) {
        options.landed = false;
        found = find_devices(0);
    }
    memory = mmap(NULL, options.buffer_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                  -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap", 0);
    memset(memory, 0x5a, options.buffer_bytes);
    for (struct fi_info *info = found; info && rail_count < options.nics; info = info->next) {
        struct rail *rail = &rails[rail_count];

        if (rail_count &&
            strcmp(info->domain_attr->name, rails[rail_count - 1].info->domain_attr->name) == 0)
            continue;
        rail->info = info;
        open_endpoint(rail);
        register_memory(rail, rail_count);
        rail_count++;
    }
    if (rail_count < options.nics) {
        fprintf(stderr, "raw_rma: found %d devices, expected %d\n", rail_count, options.nics);
        exit(2);
    }
}

static void greet(int socket)
{
    char ready = 'r';

    for (int i = 0; i < rail_count; i++) {
        struct greeting ours = {.name_bytes = NAME_BYTES}, theirs;
        bool is_virtual = rails[i].info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;

        check("fi_getname", fi_getname(&rails[i].endpoint->fid, ours.name, &ours.name_bytes));
        ours.base = is_virtual ? (uint64_t)(uintptr_t)memory : 0;
        ours.key = fi_mr_key(rails[i].region);
        if (write(socket, &ours, sizeof ours) != sizeof ours ||
            recv(socket, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs)
            fail("greeting", 0);
        if (fi_av_insert(rails[i].addresses, theirs.name, 1, &rails[i].to, 0, NULL) != 1)
            fail("fi_av_insert", -FI_EINVAL);
        rails[i].remote_base = theirs.base;
        rails[i].remote_key = theirs.key;
    }
    /* An EFA device refuses what comes from an address its owner has not inserted yet. */
    if (write(socket, &ready, 1) != 1 || recv(socket, &ready, 1, MSG_WAITALL) != 1)
        fail("greeting", 0);
}

/* ---- the target --------------------------------------------------------------------- */

/* Some providers only work inside calls; yielding leaves the core to the initiator. */
static void serve(int socket)
{
    struct fi_cq_msg_entry entries[COMPLETIONS];
    char word;

    for (;;) {
        bool idle = true;

        for (int i = 0; i < rail_count; i++)
            idle &= fi_cq_read(rails[i].completions, entries, COMPLETIONS) <= 0;
        if (idle) {
            ssize_t got = recv(socket, &word, 1, MSG_DONTWAIT);

            if (got == 0 || got == 1)
                return;
            sched_yield();
        }
    }
}

/* ---- the loop ----------------------------------------------------------------------- */

static size_t *local_places, *remote_places;
static size_t place_count;

static void shuffle(size_t *places, size_t count, uint64_t seed)
{
    for (size_t i = count - 1; i > 0; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        size_t j = (seed >> 33) % (i + 1);
        size_t swapped = places[i];

        places[i] = places[j];
        places[j] = swapped;
    }
}

/* As efa-kv bench lays its blocks out: scattered ones keep a block's distance and are in random
 * order within each batch. */
static void lay_out(void)
{
    size_t stride = options.size_bytes * (options.is_scattered ? 2 : 1);
    size_t batches = options.buffer_bytes / (stride * options.batch);

    batches = batches > 64 ? 64 : batches;
    if (batches < options.in_flight)
        fail("the buffer is too small for the load", -FI_ENOMEM);
    place_count = batches * options.batch;
    local_places = calloc(place_count, sizeof *local_places);
    remote_places = calloc(place_count, sizeof *remote_places);
    for (size_t i = 0; i < place_count; i++)
        local_places[i] = remote_places[i] = i * stride;
    for (size_t batch = 0; options.is_scattered && batch < batches; batch++) {
        shuffle(local_places + batch * options.batch, options.batch, 2 * batch + 1);
        shuffle(remote_places + batch * options.batch, options.batch, 2 * batch + 2);
    }
}

static bool post(struct rail *rail, size_t number)
{
    size_t place = number % place_count;
    struct iovec local = {memory + local_places[place], options.size_bytes};
    struct fi_rma_iov remote = {rail->remote_base + remote_places[place], options.size_bytes,
                                rail->remote_key};
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &rail->descriptor,
                                 .iov_count = 1,
                                 .addr = rail->to,
                                 .rma_iov = &remote,
                                 .rma_iov_count = 1};
    ssize_t code;

    if (rail->spare_count == 0)
        return false;
    message.context = rail->spare[rail->spare_count - 1];
    code = options.is_read
               ? fi_readmsg(rail->endpoint, &message, FI_COMPLETION)
               : fi_writemsg(rail->endpoint, &message,
                             FI_COMPLETION | (options.landed ? FI_DELIVERY_COMPLETE : 0));
    if (code == -FI_EAGAIN)
        return false;
    check("post", code);
    rail->spare_count--;
    return true;
}

static size_t reap(struct rail *rail)
{
    struct fi_cq_msg_entry entries[COMPLETIONS];
    ssize_t count = fi_cq_read(rail->completions, entries, COMPLETIONS);

    if (count == -FI_EAGAIN)
        return 0;
    if (count == -FI_EAVAIL) {
        struct fi_cq_err_entry error = {0};

        fi_cq_readerr(rail->completions, &error, 0);
        fail("completion", -error.err);
    }
    check("fi_cq_read", count);
    for (ssize_t i = 0; i < count; i++)
        rail->spare[rail->spare_count++] = entries[i].op_context;
    return (size_t)count;
}

/* Posts until the time is up, then collects what is left; the number of operations done. */
static size_t run(double seconds)
{
    size_t window = options.batch * options.in_flight, posted = 0, done = 0;
    double end = clock_s(CLOCK_MONOTONIC) + seconds;
    bool going = true;
    int turn = 0;

    while (going || done < posted) {
        size_t reaped = 0;
        bool is_stuck = false;

        while (going && posted - done < window && !is_stuck) {
            is_stuck = !post(&rails[turn], posted);
            posted += !is_stuck;
            turn = (turn + 1) % rail_count;
        }
        for (int i = 0; i < rail_count; i++)
            reaped += reap(&rails[i]);
        done += reaped;
        if (reaped == 0)
            sched_yield();
        going = going && clock_s(CLOCK_MONOTONIC) < end;
    }
    return done;
}

static long peak_memory_bytes(int who)
{
    struct rusage usage;

    getrusage(who, &usage);
    return usage.ru_maxrss * 1024;
}

static void measure(pid_t target)
{
    clockid_t target_clock = CLOCK_PROCESS_CPUTIME_ID;
    double cpu, target_cpu, start, wall;
    size_t done;

    lay_out();
    if (clock_getcpuclockid(target, &target_clock) != 0)
        fail("clock_getcpuclockid", 0);
    run(options.seconds / 5);
    cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID);
    target_cpu = clock_s(target_clock);
    start = clock_s(CLOCK_MONOTONIC);
    done = run(options.seconds);
    wall = clock_s(CLOCK_MONOTONIC) - start;
    cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    target_cpu = clock_s(target_clock) - target_cpu;
    printf("{\"operation\": \"%s\", \"block_size_bytes\": %zu, \"batch_size\": %zu, \"in_flight\": "
           "%zu, "
           "\"pattern\": \"%s\", \"bytes_per_second\": %.1f, \"descriptors_per_second\": %.1f, "
           "\"wall_seconds\": %.6f, \"cpu_seconds\": %.6f, \"target_cpu_seconds\": %.6f, "
           "\"bytes\": %zu, \"descriptors\": %zu, \"operations\": %zu, \"memory_bytes\": %ld, "
           "\"provider\": \"%s\", \"landed\": %s, \"nics\": %d, \"queue_depth\": %zu, "
           "\"libfabric\": \"%u.%u\"}\n",
           options.is_read ? "read" : "write", options.size_bytes, options.batch, options.in_flight,
           options.is_scattered ? "scattered" : "contiguous",
           (double)done * (double)options.size_bytes / wall, (double)done / wall, wall, cpu,
           target_cpu, done * options.size_bytes, done, done, peak_memory_bytes(RUSAGE_SELF),
           rails[0].info->fabric_attr->prov_name, options.landed ? "true" : "false", rail_count,
           rails[0].depth, FI_MAJOR(fi_version()), FI_MINOR(fi_version()));
}

/* ---- the command line --------------------------------------------------------------- */

static void read_option(const char *name, const char *value)
{
    if (strcmp(name, "--provider") == 0)
        options.provider = value;
    else if (strcmp(name, "--operation") == 0)
        options.is_read = strcmp(value, "read") == 0;
    else if (strcmp(name, "--pattern") == 0)
        options.is_scattered = strcmp(value, "scattered") == 0;
    else if (strcmp(name, "--landed") == 0)
        options.landed = atoi(value) != 0;
    else if (strcmp(name, "--size") == 0)
        options.size_bytes = strtoul(value, NULL, 0);
    else if (strcmp(name, "--batch") == 0)
        options.batch = strtoul(value, NULL, 0);
    else if (strcmp(name, "--in-flight") == 0)
        options.in_flight = strtoul(value, NULL, 0);
    else if (strcmp(name, "--buffer") == 0)
        options.buffer_bytes = strtoul(value, NULL, 0);
    else if (strcmp(name, "--nics") == 0)
        options.nics = atoi(value);
    else if (strcmp(name, "--seconds") == 0)
        options.seconds = atof(value);
    else {
        fprintf(stderr, "raw_rma: unknown option %s\n", name);
        exit(2);
    }
}

int main(int count, char **arguments)
{
    int sockets[2];
    pid_t target;

    for (int i = 1; i + 1 < count; i += 2)
        read_option(arguments[i], arguments[i + 1]);
    if (options.size_bytes == 0 || options.batch == 0 || options.in_flight == 0 ||
        options.nics < 1 || options.nics > NICS_MAX || !(options.seconds > 0)) {
        fprintf(stderr, "raw_rma: an option is out of range\n");
        return 2;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0)
        fail("socketpair", 0);
    target = fork();
    if (target < 0)
        fail("fork", 0);
    close(sockets[target == 0 ? 0 : 1]);
    open_rails();
    greet(sockets[target == 0 ? 1 : 0]);
    if (target == 0) {
        serve(sockets[1]);
        _exit(0);
    }
    measure(target);
    close(sockets[0]);
    /* The target never blocks, so it sees the end; one that does not is ended. */
    for (int i = 0; i < 200 && waitpid(target, NULL, WNOHANG) == 0; i++)
        usleep(10000);
    kill(target, SIGKILL);
    return 0;
}
