/* log.c - see log.h. */
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "error.h"

bool log_open(struct log *log, size_t capacity)
{
    memset(log, 0, sizeof *log);
    log->records = calloc(capacity, sizeof *log->records);
    log->capacity = capacity;
    return log->records && pthread_mutex_init(&log->lock, NULL) == 0;
}

void log_close(struct log *log)
{
    if (!log->records)
        return;
    pthread_mutex_destroy(&log->lock);
    free(log->records);
    log->records = NULL;
}

void log_write(struct log *log, uint32_t level, const char *format, ...)
{
    ekv_log_record record = {.level = level, .time_ns = clock_read_ns(CLOCK_REALTIME)};
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(record.text, sizeof record.text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&log->lock);
    if (log->count == log->capacity) {
        log->first = (log->first + 1) % log->capacity;
        log->count--;
        log->dropped++;
    }
    log->records[(log->first + log->count) % log->capacity] = record;
    log->count++;
    pthread_mutex_unlock(&log->lock);
}

int log_read(struct log *log, ekv_log_record *records, size_t capacity)
{
    size_t stride = capacity ? struct_stride(records) : 0;
    size_t taken = 0;

    pthread_mutex_lock(&log->lock);
    while (taken < capacity && log->count > 0) {
        ekv_log_record *record = &log->records[log->first];

        record->dropped = log->dropped;
        log->dropped = 0;
        ((ekv_log_record *)((char *)records + taken * stride))->struct_size = (uint32_t)stride;
        struct_export((char *)records + taken * stride, record, sizeof *record);
        log->first = (log->first + 1) % log->capacity;
        log->count--;
        taken++;
    }
    pthread_mutex_unlock(&log->lock);
    return (int)taken;
}

bool trace_open(struct trace *trace, size_t capacity)
{
    memset(trace, 0, sizeof *trace);
    trace->records = calloc(capacity, sizeof *trace->records);
    trace->capacity = capacity;
    return trace->records && pthread_mutex_init(&trace->lock, NULL) == 0;
}

void trace_close(struct trace *trace)
{
    if (!trace->records)
        return;
    pthread_mutex_destroy(&trace->lock);
    free(trace->records);
    trace->records = NULL;
}

void trace_write(struct trace *trace, const ekv_trace_record *record)
{
    ekv_trace_record *slot;

    pthread_mutex_lock(&trace->lock);
    if (trace->count == trace->capacity) {
        trace->first = (trace->first + 1) % trace->capacity;
        trace->count--;
    }
    slot = &trace->records[(trace->first + trace->count) % trace->capacity];
    *slot = *record;
    if (slot->time_ns == 0)
        slot->time_ns = clock_now_ns();
    trace->count++;
    pthread_mutex_unlock(&trace->lock);
}

int trace_read(struct trace *trace, ekv_trace_record *records, size_t capacity)
{
    size_t stride = capacity ? struct_stride(records) : 0;
    size_t taken = 0;

    pthread_mutex_lock(&trace->lock);
    while (taken < capacity && trace->count > 0) {
        ekv_trace_record *to = (ekv_trace_record *)((char *)records + taken * stride);

        to->struct_size = (uint32_t)stride;
        struct_export(to, &trace->records[trace->first], sizeof *to);
        trace->first = (trace->first + 1) % trace->capacity;
        trace->count--;
        taken++;
    }
    pthread_mutex_unlock(&trace->lock);
    return (int)taken;
}
