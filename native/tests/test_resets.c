/* test_resets.c - a new endpoint is a fence: what was on its way lands nowhere, memory
 * that was lent to operations comes back, and transfers go on at the new address. */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BYTES (64u << 20)
#include "duo.h"

/* More than sockets take at once, so that a writer is mostly stopped within one. */
#define PIECE_BYTES (BYTES / 2)
#define PIECES 2

static double now_s(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void reset_all(ekv_engine *engine)
{
    ekv_error error = {.struct_size = sizeof error};
    size_t count;

    CHECK_INT(ekv_engine_rails(engine, NULL, 0, &count), EKV_OK);
    for (uint32_t i = 0; i < count; i++)
        CHECK_OK(ekv_rail_reset(engine, i, &error));
}

static bool is_readable(int fd)
{
    struct pollfd look = {.fd = fd, .events = POLLIN};

    return poll(&look, 1, 0) == 1;
}

static void expect_transfer(struct duo *duo)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_id job;
    ekv_result result;

    memset(target, 0, BYTES);
    CHECK_OK(submit_at(duo, 0, 0, BYTES, 10, &job, &error));
    result = pair_finish(duo->left, job, 10);
    CHECK_INT(result.status, EKV_OK);
    CHECK_INT(result.stray, 0);
    CHECK(memcmp(source, target, BYTES) == 0);
}

static void test_life_goes_on_at_the_new_address(void)
{
    ekv_error error = {.struct_size = sizeof error};
    struct duo duo;
    struct card card;
    uint64_t resets = 99;
    ekv_nic before[16];

    duo_open(&duo);
    expect_transfer(&duo);
    memcpy(before, duo.card.nics, sizeof before);
    CHECK(!is_readable(ekv_engine_event_fd(duo.right)));
    reset_all(duo.right);
    CHECK(is_readable(ekv_engine_event_fd(duo.right)));
    CHECK_INT(ekv_engine_resets(duo.right, &resets), EKV_OK);
    CHECK_INT(resets, duo.card.nic_count);
    CHECK(!is_readable(ekv_engine_event_fd(duo.right)));
    pair_card(duo.right, 0xbbbb, duo.right_region, target, BYTES, &card);
    CHECK(memcmp(card.nics[0].address, before[0].address, before[0].address_length) != 0);
    CHECK_INT(card.nics[0].resets, 1);
    CHECK(card.keys[0].key == duo.card.keys[0].key); /* memory keeps its keys */
    CHECK_INT(ekv_peer_nics(duo.left, duo.peer, card.nics, card.nic_count - 1, &error), EKV_EINVAL);
    CHECK_OK(ekv_peer_nics(duo.left, duo.peer, card.nics, card.nic_count, &error));
    expect_transfer(&duo);
    reset_all(duo.left);
    introduce(&duo, 0xaaaa);
    expect_transfer(&duo);
    CHECK_INT(ekv_rail_reset(duo.left, 99, &error), EKV_EINVAL);
    duo_close(&duo);
}

/* ---- a writer that is stopped in the middle ------------------------------- */

struct report {
    ekv_result result;
    double seconds; /* until the job was fenced */
};

static void writer_submit(ekv_engine *engine, ekv_peer_id peer, const struct card *card,
                          ekv_job_id *job)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options = pair_job(peer, EKV_WRITE, 4);
    uint64_t local[PIECES], remote[PIECES], lengths[PIECES];

    for (size_t i = 0; i < PIECES; i++) {
        local[i] = (uint64_t)(uintptr_t)source + i * PIECE_BYTES;
        remote[i] = card->address + i * PIECE_BYTES;
        lengths[i] = PIECE_BYTES;
    }
    CHECK_OK(ekv_submit(engine, &options, local, remote, lengths, PIECES, job, &error));
}

/* Writes over and over until a job fails; then once more to where it is told. */
static void writer_main(int socket)
{
    ekv_options options = pair_options(protocol, 0xaaaa);
    ekv_error error = {.struct_size = sizeof error};
    ekv_engine *engine;
    struct report report = {.result = {.struct_size = sizeof report.result}};
    ekv_peer_id peer;
    struct card own, other, again;
    ekv_job_id job;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    options.stripe_bytes = PIECE_BYTES;
    engine = pair_open(&options);
    memset(source, 0x55, BYTES);
    pair_card(engine, 0xaaaa, pair_register(engine, source, BYTES), source, BYTES, &own);
    CHECK(write(socket, &own, sizeof own) == sizeof own);
    CHECK(recv(socket, &other, sizeof other, MSG_WAITALL) == sizeof other);
    peer = pair_connect(engine, &other, 0);
    do {
        writer_submit(engine, peer, &other, &job);
        CHECK_INT(ekv_job_wait(engine, job, 30, 0, &report.result), EKV_OK);
        if (report.result.status == EKV_OK)
            CHECK_INT(ekv_job_release(engine, job), EKV_OK);
    } while (report.result.status == EKV_OK);
    report.seconds = now_s();
    CHECK_INT(ekv_job_wait(engine, job, 30, 1, &report.result), EKV_OK);
    report.seconds = now_s() - report.seconds;
    CHECK(write(socket, &report, sizeof report) == sizeof report);
    CHECK(recv(socket, &again, sizeof again, MSG_WAITALL) == sizeof again);
    CHECK_OK(ekv_peer_nics(engine, peer, again.nics, again.nic_count, &error));
    CHECK_OK(ekv_peer_region_add(engine, peer, again.region, again.address, again.length,
                                 again.keys, again.key_count, &error));
    writer_submit(engine, peer, &again, &job);
    report.result = pair_finish(engine, job, 20);
    CHECK(write(socket, &report, sizeof report) == sizeof report);
    CHECK(recv(socket, &again, 1, MSG_WAITALL) == 0);
    ekv_engine_close(engine, 0.5);
    _exit(0);
}

static void expect_all(const uint8_t *memory, uint8_t value)
{
    size_t wrong = 0;

    for (size_t i = 0; i < BYTES; i++)
        wrong += memory[i] != value;
    CHECK_INT(wrong, 0);
}

static void test_a_stopped_writer_comes_too_late(void)
{
    ekv_options options = pair_options(protocol, 0xbbbb);
    ekv_engine *engine;
    ekv_region_id region;
    ekv_error error = {.struct_size = sizeof error};
    struct card card, writer;
    struct report report;
    int sockets[2];
    pid_t process;

    memset(target, 0, BYTES);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    fflush(stdout);
    process = fork();
    CHECK(process >= 0);
    if (process == 0) {
        close(sockets[0]);
        writer_main(sockets[1]);
    }
    close(sockets[1]);
    engine = pair_open(&options);
    region = pair_register(engine, target, BYTES);
    pair_card(engine, 0xbbbb, region, target, BYTES, &card);
    CHECK(recv(sockets[0], &writer, sizeof writer, MSG_WAITALL) == sizeof writer);
    pair_connect(engine, &writer, 0);
    CHECK(write(sockets[0], &card, sizeof card) == sizeof card);
    while (__atomic_load_n(&target[BYTES - 1], __ATOMIC_RELAXED) != 0x55)
        usleep(100);
    usleep(20000 + (useconds_t)(now_s() * 1e6) % 5000);
    CHECK(kill(process, SIGSTOP) == 0);
    usleep(50000);
    CHECK_OK(ekv_region_rotate(engine, region, 2, &error));
    reset_all(engine);
    memset(target, 0xAB, BYTES); /* it has another owner now */
    CHECK(kill(process, SIGCONT) == 0);
    CHECK(recv(sockets[0], &report, sizeof report, MSG_WAITALL) == sizeof report);
    printf("  late: %s \"%s\", stray %u, fenced after %.2f s\n",
           ekv_code_name(report.result.status), report.result.text, report.result.stray,
           report.seconds);
    CHECK_INT(report.result.fenced, 1);
    usleep(200000);
    expect_all(target, 0xAB);
    pair_card(engine, 0xbbbb, region, target, BYTES, &card);
    CHECK(write(sockets[0], &card, sizeof card) == sizeof card);
    CHECK(recv(sockets[0], &report, sizeof report, MSG_WAITALL) == sizeof report);
    printf("  again: %s \"%s\"\n", ekv_code_name(report.result.status), report.result.text);
    CHECK_INT(report.result.status, EKV_OK);
    expect_all(target, 0x55);
    close(sockets[0]);
    CHECK(waitpid(process, NULL, 0) == process);
    CHECK_INT(ekv_engine_close(engine, 1), 0);
}

int main(int count, char **arguments)
{
    const char *protocols[] = {"tcp", "shm"};

    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    duo_memory();
    for (int i = 0; i < (count > 1 ? 1 : 2); i++) {
        protocol = count > 1 ? arguments[1] : protocols[i];
        printf("protocol %s\n", protocol);
        RUN(test_life_goes_on_at_the_new_address);
        RUN(test_a_stopped_writer_comes_too_late);
    }
    return 0;
}
