/* Writes, reads, writes with data and messages between two processes. */
#include "harness.h"

#include <sched.h>
#include <string.h>
#include <sys/socket.h>

enum { MEMORY_BYTES = 16 << 20 };

static void fill(char *memory, size_t size, uint32_t seed)
{
    for (size_t i = 0; i < size; i++) {
        seed = seed * 1664525u + 1013904223u;
        memory[i] = (char)(seed >> 24);
    }
}

static bool is_filled(const char *memory, size_t size, uint32_t seed)
{
    for (size_t i = 0; i < size; i++) {
        seed = seed * 1664525u + 1013904223u;
        if (memory[i] != (char)(seed >> 24))
            return false;
    }
    return true;
}

/* A rail that talks to itself. */
static fi_addr_t insert_self(struct rail *rail)
{
    char name[32];
    size_t size = sizeof name;
    fi_addr_t first, second;
    CHECK_EQUAL(fi_getname(&rail->endpoint->fid, name, &size), 0);
    CHECK_EQUAL(fi_av_insert(rail->addresses, name, 1, &first, 0, NULL), 1);
    CHECK_EQUAL(fi_av_insert(rail->addresses, name, 1, &second, 0, NULL), 1);
    CHECK_EQUAL(first, second); /* one entry per address */
    return first;
}

static const size_t SIZES[] = {0, 1, 7, 4096, 65536, 1 << 20, 6 << 20};
enum { SIZE_COUNT = sizeof SIZES / sizeof SIZES[0] };

static void write_and_read_initiator(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    (void)target;
    rail_open(&rail, (struct rail_options){.nic = 0, .memory_bytes = MEMORY_BYTES});
    exchange(&rail, socket, &remote);
    for (uint32_t i = 0; i < SIZE_COUNT; i++) {
        char *back = rail.memory + MEMORY_BYTES / 2;
        fill(rail.memory, SIZES[i], i + 1);
        CHECK_EQUAL(fi_write(rail.endpoint, rail.memory, SIZES[i], rail.descriptor, remote.address,
                             remote.memory + i, remote.key, &rail),
                    0);
        struct fi_cq_data_entry entry = expect_completion(rail.completions);
        CHECK(entry.op_context == &rail);
        CHECK_EQUAL(entry.flags, FI_RMA | FI_WRITE);
        send_word(socket, i);
        receive_word(socket); /* the target has looked at its memory */
        CHECK_EQUAL(fi_read(rail.endpoint, back, SIZES[i], rail.descriptor, remote.address,
                            remote.memory + i, remote.key, NULL),
                    0);
        entry = expect_completion(rail.completions);
        CHECK_EQUAL(entry.flags, FI_RMA | FI_READ);
        CHECK(is_filled(back, SIZES[i], i + 1));
    }
    send_word(socket, SIZE_COUNT);
    rail_close(&rail);
}

/* Never calls into libfabric while the operations run: a NIC needs no help. */
static void write_and_read_target(int socket, pid_t self)
{
    struct rail rail;
    struct remote remote;
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 0, .memory_bytes = MEMORY_BYTES});
    exchange(&rail, socket, &remote);
    for (uint64_t i; (i = receive_word(socket)) < SIZE_COUNT;) {
        CHECK(is_filled(rail.memory + i, SIZES[i], (uint32_t)i + 1));
        send_word(socket, 0);
    }
    rail_close(&rail);
}

static void write_and_read(void)
{
    run_pair(write_and_read_initiator, write_and_read_target);
}

enum { SCATTERED = 20000, PIECE_BYTES = 512 };

/* Many more operations than the queue holds, mixed sizes, each byte checked. */
static void scattered_initiator(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    static struct fi_context2 contexts[SCATTERED];
    struct fi_cq_data_entry entries[32];
    int posted = 0, done = 0;
    (void)target;
    rail_open(&rail,
              (struct rail_options){.nic = 0, .memory_bytes = MEMORY_BYTES, .queue_size = 64});
    exchange(&rail, socket, &remote);
    fill(rail.memory, SCATTERED * PIECE_BYTES, 5);
    while (done < SCATTERED) {
        while (posted < SCATTERED) {
            int place = (int)((unsigned)posted * 7919u % SCATTERED);
            size_t offset = (size_t)place * PIECE_BYTES;
            ssize_t result =
                fi_write(rail.endpoint, rail.memory + offset, PIECE_BYTES, rail.descriptor,
                         remote.address, remote.memory + offset, remote.key, &contexts[posted]);
            if (result == -FI_EAGAIN)
                break;
            CHECK_EQUAL(result, 0);
            posted++;
        }
        ssize_t result = fi_cq_read(rail.completions, entries, 32);
        if (result > 0)
            done += (int)result;
        else
            CHECK_EQUAL(result, -FI_EAGAIN);
    }
    CHECK(nothing_completes(rail.completions, 0.01));
    send_word(socket, 0);
    rail_close(&rail);
}

static void scattered_target(int socket, pid_t self)
{
    struct rail rail;
    struct remote remote;
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 0, .memory_bytes = MEMORY_BYTES});
    exchange(&rail, socket, &remote);
    receive_word(socket);
    CHECK(is_filled(rail.memory, SCATTERED * PIECE_BYTES, 5));
    rail_close(&rail);
}

/* Environment: FI_EFA_TX_SIZE=8 */
static void scattered_writes(void)
{
    run_pair(scattered_initiator, scattered_target);
}

enum { UNREAD = 1000 };

/* Far more completions than the queue holds, none of them lost. */
static void small_completion_queue(void)
{
    struct rail rail;
    static bool seen[UNREAD];
    static char contexts[UNREAD];
    rail_open(&rail, (struct rail_options){.nic = 0, .queue_size = 64});
    fi_addr_t self = insert_self(&rail);
    for (int i = 0; i < UNREAD; i++)
        CHECK_EQUAL(fi_write(rail.endpoint, rail.memory, 8, rail.descriptor, self,
                             (uintptr_t)rail.memory + 64, fi_mr_key(rail.region), &contexts[i]),
                    0);
    for (int i = 0; i < 10; i++)
        CHECK_EQUAL(fi_cq_read(rail.completions, NULL, 0), -FI_EAVAIL);
    for (int i = 0; i < UNREAD; i++) {
        ptrdiff_t position = (char *)expect_completion(rail.completions).op_context - contexts;
        CHECK(position >= 0 && position < UNREAD && !seen[position]);
        seen[position] = true;
    }
    CHECK(nothing_completes(rail.completions, 0.01));
    rail_close(&rail);
}

enum { NOTICES = 500 };

static void write_data_initiator(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    (void)target;
    rail_open(&rail, (struct rail_options){.nic = 1});
    exchange(&rail, socket, &remote);
    for (uint64_t i = 0; i < NOTICES; i++) {
        rail.memory[i] = (char)i;
        CHECK_EQUAL(fi_writedata(rail.endpoint, rail.memory + i, 1, rail.descriptor,
                                 0xff00000000ull | i, remote.address, remote.memory + i, remote.key,
                                 NULL),
                    0);
    }
    for (int i = 0; i < NOTICES; i++)
        CHECK_EQUAL(expect_completion(rail.completions).flags, FI_RMA | FI_WRITE);
    receive_word(socket);
    rail_close(&rail);
}

static void write_data_target(int socket, pid_t self)
{
    struct rail rail;
    struct remote remote;
    static bool seen[NOTICES];
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 1});
    exchange(&rail, socket, &remote);
    for (int i = 0; i < NOTICES; i++) {
        struct fi_cq_data_entry entry = expect_completion(rail.completions);
        CHECK_EQUAL(entry.flags, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA);
        CHECK(entry.data < NOTICES); /* four bytes travel */
        CHECK(!seen[entry.data]);
        seen[entry.data] = true;
        /* The notice comes after its byte. */
        CHECK_EQUAL(rail.memory[entry.data], (char)entry.data);
    }
    send_word(socket, 0);
    rail_close(&rail);
}

static void write_with_data(void)
{
    run_pair(write_data_initiator, write_data_target);
}

static const size_t MESSAGE_SIZES[] = {0, 1, 32, 100, 8192};
enum { MESSAGE_COUNT = sizeof MESSAGE_SIZES / sizeof MESSAGE_SIZES[0] };

static void messages_initiator(int socket, pid_t target)
{
    struct rail rail;
    struct remote remote;
    (void)target;
    rail_open(&rail, (struct rail_options){.nic = 0});
    exchange(&rail, socket, &remote);
    for (uint32_t i = 0; i < MESSAGE_COUNT; i++) {
        fill(rail.memory, MESSAGE_SIZES[i], i + 1);
        CHECK_EQUAL(fi_senddata(rail.endpoint, rail.memory, MESSAGE_SIZES[i], rail.descriptor, i,
                                remote.address, NULL),
                    0);
        /* Nobody has posted a receive yet. */
        CHECK(nothing_completes(rail.completions, 0.02));
        send_word(socket, i);
        CHECK_EQUAL(expect_completion(rail.completions).flags, FI_MSG | FI_SEND);
        receive_word(socket);
    }
    CHECK_EQUAL(fi_send(rail.endpoint, rail.memory, 8193, rail.descriptor, remote.address, NULL),
                -FI_EMSGSIZE);
    /* Inlined, unregistered, and without a completion of its own. */
    char note[16] = "on the stack";
    CHECK_EQUAL(fi_inject(rail.endpoint, note, sizeof note, remote.address), 0);
    memset(note, 0, sizeof note);
    CHECK(nothing_completes(rail.completions, 0.02));
    send_word(socket, 0);
    while (fi_cq_read(rail.completions, NULL, 0) == -FI_EAGAIN &&
           recv(socket, note, 8, MSG_DONTWAIT) != 8)
        sched_yield();
    /* Too long for the receive that waits for it. */
    CHECK_EQUAL(fi_send(rail.endpoint, rail.memory, 100, rail.descriptor, remote.address, NULL), 0);
    expect_completion(rail.completions);
    receive_word(socket);
    rail_close(&rail);
}

static void messages_target(int socket, pid_t self)
{
    struct rail rail;
    struct remote remote;
    struct fi_cq_data_entry entry;
    fi_addr_t source;
    (void)self;
    rail_open(&rail, (struct rail_options){.nic = 0});
    exchange(&rail, socket, &remote);
    for (uint32_t i = 0; i < MESSAGE_COUNT; i++) {
        receive_word(socket);
        CHECK_EQUAL(
            fi_recv(rail.endpoint, rail.memory, 8192, rail.descriptor, FI_ADDR_UNSPEC, &rail), 0);
        while (fi_cq_readfrom(rail.completions, &entry, 1, &source) != 1)
            sched_yield();
        CHECK(entry.op_context == &rail);
        CHECK_EQUAL(entry.flags, FI_MSG | FI_RECV | FI_REMOTE_CQ_DATA);
        CHECK_EQUAL(entry.len, MESSAGE_SIZES[i]);
        CHECK_EQUAL(entry.data, i);
        CHECK_EQUAL(source, remote.address);
        CHECK(is_filled(rail.memory, MESSAGE_SIZES[i], i + 1));
        send_word(socket, 0);
    }
    receive_word(socket);
    CHECK_EQUAL(fi_recv(rail.endpoint, rail.memory, 8192, rail.descriptor, FI_ADDR_UNSPEC, NULL),
                0);
    CHECK_EQUAL(expect_completion(rail.completions).len, 16);
    CHECK_EQUAL(strcmp(rail.memory, "on the stack"), 0);
    send_word(socket, 0);
    CHECK_EQUAL(fi_recv(rail.endpoint, rail.memory, 10, rail.descriptor, FI_ADDR_UNSPEC, NULL), 0);
    CHECK_EQUAL(expect_error(rail.completions, 11).err, FI_ETRUNC);
    CHECK_EQUAL(fi_recv(rail.endpoint, rail.memory, 10, rail.descriptor, FI_ADDR_UNSPEC, &entry),
                0);
    CHECK_EQUAL(fi_cancel(&rail.endpoint->fid, &entry), 0);
    struct fi_cq_err_entry error = expect_error(rail.completions, 1);
    CHECK_EQUAL(error.err, FI_ECANCELED);
    CHECK(error.op_context == &entry);
    CHECK_EQUAL(fi_cancel(&rail.endpoint->fid, &entry), -FI_ENOENT);
    send_word(socket, 0);
    rail_close(&rail);
}

static void messages(void)
{
    run_pair(messages_initiator, messages_target);
}

static void loop_back(void)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0});
    fi_addr_t self = insert_self(&rail);
    uint64_t there = (uintptr_t)rail.memory + 65536, key = fi_mr_key(rail.region);
    fill(rail.memory, 65536, 3);
    CHECK_EQUAL(
        fi_write(rail.endpoint, rail.memory, 65536, rail.descriptor, self, there, key, NULL), 0);
    expect_completion(rail.completions);
    CHECK(is_filled(rail.memory + 65536, 65536, 3));
    char note[32] = "inlined";
    CHECK_EQUAL(fi_inject_write(rail.endpoint, note, sizeof note, self, there, key), 0);
    CHECK(nothing_completes(rail.completions, 0.01));
    CHECK_EQUAL(strcmp(rail.memory + 65536, "inlined"), 0);
    rail_close(&rail);
}

/* A delivery-complete write through fi_writemsg on the direct fabric, which takes the context. */
static void direct_fabric(void)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0, .fabric = "efa-direct"});
    fi_addr_t self = insert_self(&rail);
    struct fi_context2 context, untouched;
    memset(&context, 0, sizeof context);
    memset(&untouched, 0, sizeof untouched);
    struct iovec local = {rail.memory, 100};
    struct fi_rma_iov there = {(uintptr_t)rail.memory + 4096, 100, fi_mr_key(rail.region)};
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &rail.descriptor,
                                 .iov_count = 1,
                                 .addr = self,
                                 .rma_iov = &there,
                                 .rma_iov_count = 1,
                                 .context = &context};
    fill(rail.memory, 100, 9);
    CHECK_EQUAL(fi_writemsg(rail.endpoint, &message, FI_DELIVERY_COMPLETE | FI_COMPLETION), 0);
    CHECK(memcmp(&context, &untouched, sizeof context) != 0);
    CHECK(expect_completion(rail.completions).op_context == &context);
    CHECK(is_filled(rail.memory + 4096, 100, 9));
    message.iov_count = 2;
    CHECK_EQUAL(fi_writemsg(rail.endpoint, &message, 0), -FI_EINVAL);
    message.iov_count = 1;
    CHECK_EQUAL(fi_writemsg(rail.endpoint, &message, FI_FENCE), -FI_EOPNOTSUPP);
    rail_close(&rail);
}

enum { ENDPOINTS = 200 };

/* Many engines in one process, each with an endpoint of its own. */
static void many_endpoints(void)
{
    static struct rail rails[ENDPOINTS];
    for (int i = 0; i < ENDPOINTS; i++)
        rail_open(&rails[i], (struct rail_options){.nic = i % 4, .memory_bytes = 4096});
    for (int i = 0; i < ENDPOINTS; i++) {
        struct rail *from = &rails[i], *to = &rails[(i + 4) % ENDPOINTS];
        char name[32];
        size_t size = sizeof name;
        fi_addr_t address, back;
        CHECK_EQUAL(fi_getname(&to->endpoint->fid, name, &size), 0);
        CHECK_EQUAL(fi_av_insert(from->addresses, name, 1, &address, 0, NULL), 1);
        CHECK_EQUAL(fi_getname(&from->endpoint->fid, name, &size), 0);
        CHECK_EQUAL(fi_av_insert(to->addresses, name, 1, &back, 0, NULL), 1);
        from->memory[0] = (char)i;
        CHECK_EQUAL(fi_write(from->endpoint, from->memory, 1, from->descriptor, address,
                             (uintptr_t)to->memory + 1, fi_mr_key(to->region), NULL),
                    0);
        expect_completion(from->completions);
        CHECK_EQUAL(to->memory[1], (char)i);
    }
    for (int i = 0; i < ENDPOINTS; i++)
        rail_close(&rails[i]);
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {
        {"write_and_read", write_and_read},
        {"scattered_writes", scattered_writes},
        {"write_with_data", write_with_data},
        {"messages", messages},
        {"loop_back", loop_back},
        {"direct_fabric", direct_fabric},
        {"many_endpoints", many_endpoints},
        {"small_completion_queue", small_completion_queue},
    };
    return run_case(cases, sizeof cases / sizeof cases[0], count, arguments);
}
