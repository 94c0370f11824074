/* How many operations per second the provider itself allows: one process posts writes (or reads) to
 * another one and collects the completions. Run it with EFA_KV_SIM_NO_COPY=1 to time software
 * alone.
 *
 *   bench_ops [bytes [operations [window [nics [read]]]]]
 */
#include "harness.h"

#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { COMPLETION_BATCH = 64, MAX_NICS = 32 };

static size_t bytes = 4096;
static long operations = 10000000;
static long window = 1024;
static int nic_count = 1;
static bool is_read;

static double cpu_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static size_t memory_bytes(void)
{
    return bytes > (1 << 20) ? bytes * 8 : 8 << 20;
}

struct progress {
    long posted;
    long done;
};

static void post_up_to(struct rail *rail, const struct remote *remote, struct progress *progress,
                       long limit, struct fi_context2 *contexts)
{
    size_t places = rail->memory_bytes / bytes;
    while (progress->posted < limit && progress->posted - progress->done < window) {
        /* A large odd step scatters the places over the region. */
        size_t offset = ((size_t)progress->posted * 7919 % places) * bytes;
        void *context = &contexts[progress->posted % window];
        ssize_t result =
            is_read ? fi_read(rail->endpoint, rail->memory + offset, bytes, rail->descriptor,
                              remote->address, remote->memory + offset, remote->key, context)
                    : fi_write(rail->endpoint, rail->memory + offset, bytes, rail->descriptor,
                               remote->address, remote->memory + offset, remote->key, context);
        if (result == -FI_EAGAIN)
            return;
        CHECK_EQUAL(result, 0);
        progress->posted++;
    }
}

static void initiator(int socket, pid_t target)
{
    static struct rail rails[MAX_NICS];
    static struct remote remotes[MAX_NICS];
    static struct progress progress[MAX_NICS];
    struct fi_cq_data_entry entries[COMPLETION_BATCH];
    struct fi_context2 *contexts = calloc((size_t)window, sizeof *contexts);
    long done = 0, per_nic = operations / nic_count;
    (void)target;
    CHECK(contexts);
    for (int nic = 0; nic < nic_count; nic++) {
        rail_open(&rails[nic], (struct rail_options){.nic = nic, .memory_bytes = memory_bytes()});
        exchange(&rails[nic], socket, &remotes[nic]);
    }
    double start = now_s(), cpu_start = cpu_s();
    while (done < per_nic * nic_count) {
        for (int nic = 0; nic < nic_count; nic++) {
            post_up_to(&rails[nic], &remotes[nic], &progress[nic], per_nic, contexts);
            ssize_t result = fi_cq_read(rails[nic].completions, entries, COMPLETION_BATCH);
            if (result == -FI_EAGAIN)
                continue;
            CHECK(result > 0);
            progress[nic].done += result;
            done += result;
        }
    }
    double elapsed = now_s() - start, cpu = cpu_s() - cpu_start;
    printf(
        "%s %zu bytes, %d NIC%s, window %ld: %.2f Mops/s, %.0f ns CPU per operation, %.2f GB/s%s\n",
        is_read ? "read" : "write", bytes, nic_count, nic_count > 1 ? "s" : "", window,
        (double)done / elapsed / 1e6, cpu / (double)done * 1e9,
        (double)done * (double)bytes / elapsed / 1e9,
        getenv("EFA_KV_SIM_NO_COPY") ? " (not copied)" : "");
    send_word(socket, 0);
    for (int nic = 0; nic < nic_count; nic++)
        rail_close(&rails[nic]);
    free(contexts);
}

static void target(int socket, pid_t self)
{
    static struct rail rails[MAX_NICS];
    struct remote remote;
    (void)self;
    for (int nic = 0; nic < nic_count; nic++) {
        rail_open(&rails[nic], (struct rail_options){.nic = nic, .memory_bytes = memory_bytes()});
        exchange(&rails[nic], socket, &remote);
    }
    struct timeval forever = {0, 0};
    CHECK_EQUAL(setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof forever), 0);
    receive_word(socket);
    for (int nic = 0; nic < nic_count; nic++)
        rail_close(&rails[nic]);
}

int main(int count, char **arguments)
{
    if (count > 1)
        bytes = strtoul(arguments[1], NULL, 0);
    if (count > 2)
        operations = strtol(arguments[2], NULL, 0);
    if (count > 3)
        window = strtol(arguments[3], NULL, 0);
    if (count > 4)
        nic_count = (int)strtol(arguments[4], NULL, 0);
    is_read = count > 5 && strcmp(arguments[5], "read") == 0;
    if (bytes == 0 || operations < nic_count || window < 1 || nic_count < 1 ||
        nic_count > MAX_NICS) {
        fprintf(stderr, "usage: bench_ops [bytes [operations [window [nics [read]]]]]\n");
        return 2;
    }
    run_pair(initiator, target);
    return 0;
}
