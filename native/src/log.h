/* log.h - bounded records that the caller pulls: log lines and trace events.
 *
 * Any thread writes under a short lock; when nobody reads, the oldest records give
 * way and the reader is told how many were lost. */
#ifndef EKV_LOG_H
#define EKV_LOG_H

#include <pthread.h>
#include <stdbool.h>

#include "efa_kv.h"

#define LOG_DEBUG 10u
#define LOG_INFO 20u
#define LOG_WARNING 30u
#define LOG_ERROR 40u

struct log {
    pthread_mutex_t lock;
    ekv_log_record *records;
    size_t capacity;
    size_t first;
    size_t count;
    uint64_t dropped;
};

bool log_open(struct log *log, size_t capacity);
void log_close(struct log *log);
void log_write(struct log *log, uint32_t level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int log_read(struct log *log, ekv_log_record *records, size_t capacity);

struct trace {
    pthread_mutex_t lock;
    ekv_trace_record *records;
    size_t capacity;
    size_t first;
    size_t count;
};

bool trace_open(struct trace *trace, size_t capacity);
void trace_close(struct trace *trace);
void trace_write(struct trace *trace, const ekv_trace_record *record);
int trace_read(struct trace *trace, ekv_trace_record *records, size_t capacity);

#endif
