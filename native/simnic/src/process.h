/* Which process is meant, and whether it still runs. */
#ifndef SIMNIC_PROCESS_H
#define SIMNIC_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* The start time tells a process from a later one with the same number. */
struct process_identity {
    uint32_t pid;
    uint64_t start_time; /* clock ticks since boot */
};

struct process_identity process_self(void);
bool process_is_alive(struct process_identity identity);

/* A descriptor that becomes readable when the process exits; -1 when it is not running. */
int process_open_handle(struct process_identity identity);
bool process_handle_has_exited(int handle);

/* True while a thread is held by SIGSTOP or a debugger. */
bool process_thread_is_stopped(uint32_t pid, uint32_t thread);
uint32_t process_thread_self(void);

uint64_t clock_ns(void);

#endif
