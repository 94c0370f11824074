/* notice.c - see notice.h. */
#include "notice.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

void notice_encode(struct notice_message *message, uint16_t kind, const ekv_notice *notice)
{
    memset(message, 0, sizeof *message);
    message->magic = NOTICE_MAGIC;
    message->version = NOTICE_VERSION;
    message->kind = kind;
    message->status = notice->status;
    message->transfer[0] = notice->transfer[0];
    message->transfer[1] = notice->transfer[1];
    message->generation = notice->generation;
    message->bytes = notice->bytes;
    message->sender = notice->sender;
}

uint16_t notice_decode(const struct notice_message *message, size_t length, ekv_notice *notice)
{
    if (length != sizeof *message || message->magic != NOTICE_MAGIC ||
        message->version != NOTICE_VERSION ||
        (message->kind != NOTICE_KIND_JOB && message->kind != NOTICE_KIND_EMPTY))
        return 0;
    memset(notice, 0, sizeof *notice);
    notice->status = message->status;
    notice->transfer[0] = message->transfer[0];
    notice->transfer[1] = message->transfer[1];
    notice->generation = message->generation;
    notice->bytes = message->bytes;
    notice->sender = message->sender;
    return message->kind;
}

bool notice_table_open(struct notice_table *table, size_t capacity)
{
    memset(table, 0, sizeof *table);
    table->items = calloc(capacity, sizeof *table->items);
    table->capacity = capacity;
    return table->items && pthread_mutex_init(&table->lock, NULL) == 0;
}

void notice_table_close(struct notice_table *table)
{
    if (!table->items)
        return;
    pthread_mutex_destroy(&table->lock);
    free(table->items);
    table->items = NULL;
}

bool notice_table_put(struct notice_table *table, const ekv_notice *notice)
{
    bool room;

    pthread_mutex_lock(&table->lock);
    room = table->count < table->capacity;
    if (room) {
        table->items[(table->first + table->count) % table->capacity] = *notice;
        table->count++;
    }
    pthread_mutex_unlock(&table->lock);
    return room;
}

int notice_table_take(struct notice_table *table, ekv_notice *notices, size_t capacity)
{
    size_t stride = capacity ? struct_stride(notices) : 0;
    size_t taken = 0;

    pthread_mutex_lock(&table->lock);
    while (taken < capacity && table->count > 0) {
        ekv_notice *to = (ekv_notice *)((char *)notices + taken * stride);

        to->struct_size = (uint32_t)stride;
        struct_export(to, &table->items[table->first], sizeof *to);
        table->first = (table->first + 1) % table->capacity;
        table->count--;
        taken++;
    }
    pthread_mutex_unlock(&table->lock);
    return (int)taken;
}

bool notice_table_is_empty(struct notice_table *table)
{
    bool empty;

    pthread_mutex_lock(&table->lock);
    empty = table->count == 0;
    pthread_mutex_unlock(&table->lock);
    return empty;
}
