/* error.c - the texts of the error codes, and ekv_error.  Stateless. */
#include "error.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct code_row {
    int number;
    int class_;
    const char *name;
    const char *text;
};

static const struct code_row code_rows[] = {
#define CODE_ROW(name, number, class_, text) {number, class_, #name, text},
    EKV_CODE_LIST(CODE_ROW)
#undef CODE_ROW
};

static const struct code_row *code_find(int code)
{
    for (size_t i = 0; i < sizeof code_rows / sizeof code_rows[0]; i++)
        if (code_rows[i].number == code)
            return &code_rows[i];
    return NULL;
}

uint32_t ekv_abi_version(void)
{
    return EKV_ABI_VERSION;
}

const char *ekv_code_name(int code)
{
    const struct code_row *row = code_find(code);

    return row ? row->name : "EKV_UNKNOWN";
}

const char *ekv_code_text(int code)
{
    const struct code_row *row = code_find(code);

    return row ? row->text : "not a code of this library";
}

int ekv_code_class(int code)
{
    const struct code_row *row = code_find(code);

    return row ? row->class_ : EKV_CLASS_LOCAL;
}

int(error_set)(ekv_error *error, int code, int provider_code, const char *where, const char *format,
               ...)
{
    ekv_error filled = {.code = code, .provider_code = provider_code};
    va_list arguments;

    if (!error)
        return code;
    snprintf(filled.where, sizeof filled.where, "%s", where);
    va_start(arguments, format);
    vsnprintf(filled.text, sizeof filled.text, format, arguments);
    va_end(arguments);
    struct_export(error, &filled, sizeof filled);
    return code;
}

/* Every public struct begins with this field. */
static uint32_t struct_size_of(const void *record)
{
    uint32_t size;

    memcpy(&size, record, sizeof size);
    return size;
}

void struct_export(void *to, const void *from, size_t from_bytes)
{
    const size_t head = sizeof(uint32_t);
    size_t size = struct_size_of(to);

    if (size > from_bytes)
        size = from_bytes;
    if (size > head)
        memcpy((char *)to + head, (const char *)from + head, size - head);
}

int struct_import(void *to, size_t to_bytes, const void *from)
{
    size_t size;

    if (!from)
        return EKV_EINVAL;
    size = struct_size_of(from);
    if (size < sizeof(uint32_t) || size > 65536)
        return EKV_EINVAL;
    memset(to, 0, to_bytes);
    memcpy(to, from, size < to_bytes ? size : to_bytes);
    return EKV_OK;
}

size_t struct_stride(const void *first)
{
    return first ? struct_size_of(first) : 0;
}
