#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { START_TIME_FIELD = 22, FIRST_FIELD_AFTER_NAME = 3 };

/* Reads /proc/.../stat; the name in it may hold spaces and brackets, so fields count from the last
 * ')'. */
static bool read_stat(const char *path, char *state, uint64_t *start_time)
{
    char text[1024];
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0)
        return false;
    text[length] = '\0';
    char *field = strrchr(text, ')');
    if (!field || field[1] != ' ')
        return false;
    field += 2;
    *state = *field;
    for (int i = FIRST_FIELD_AFTER_NAME; i < START_TIME_FIELD; i++) {
        field = strchr(field, ' ');
        if (!field)
            return false;
        field++;
    }
    *start_time = strtoull(field, NULL, 10);
    return true;
}

static bool read_process_stat(uint32_t pid, char *state, uint64_t *start_time)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    return read_stat(path, state, start_time);
}

struct process_identity process_self(void)
{
    struct process_identity identity = {(uint32_t)getpid(), 0};
    char state;
    read_process_stat(identity.pid, &state, &identity.start_time);
    return identity;
}

bool process_is_alive(struct process_identity identity)
{
    char state;
    uint64_t start_time;
    if (!read_process_stat(identity.pid, &state, &start_time))
        return false;
    return start_time == identity.start_time && state != 'Z' && state != 'X';
}

int process_open_handle(struct process_identity identity)
{
    int handle = (int)syscall(SYS_pidfd_open, identity.pid, 0);
    /* The handle was taken first, so a process found alive now is the one it refers to. */
    if (handle >= 0 && !process_is_alive(identity)) {
        close(handle);
        return -1;
    }
    return handle;
}

bool process_handle_has_exited(int handle)
{
    struct pollfd poll_entry = {handle, POLLIN, 0};
    return poll(&poll_entry, 1, 0) > 0;
}

bool process_thread_is_stopped(uint32_t pid, uint32_t thread)
{
    char path[64], state;
    uint64_t start_time;
    snprintf(path, sizeof path, "/proc/%u/task/%u/stat", pid, thread);
    return read_stat(path, &state, &start_time) && (state == 'T' || state == 't');
}

uint32_t process_thread_self(void)
{
    static _Thread_local uint32_t thread;
    static _Thread_local pid_t pid;
    if (pid != getpid()) {
        pid = getpid();
        thread = (uint32_t)syscall(SYS_gettid);
    }
    return thread;
}

uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
