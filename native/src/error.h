/* error.h - filling the caller-owned ekv_error and copying structs whose size the
 * caller told us.  Stateless. */
#ifndef EKV_ERROR_H
#define EKV_ERROR_H

#include "efa_kv.h"

/* Fills *error (when not NULL) and returns code, so that callers can write
 * "return error_set(...)". */
int error_set(ekv_error *error, int code, int provider_code, const char *where, const char *format,
              ...) __attribute__((format(printf, 5, 6)));

/* clang-tidy's analyzer reads one file at a time; without this it takes a failure that was
 * filled in here for a success, and what follows a success for uninitialized. */
#ifdef __clang_analyzer__
#define error_set(error, code, ...)                                                                \
    ({                                                                                             \
        int returned = (code);                                                                     \
        (error_set)(error, returned, __VA_ARGS__);                                                 \
        returned;                                                                                  \
    })
#endif

/* Copies the fields both sides know; *to keeps the struct_size its owner set. */
void struct_export(void *to, const void *from, size_t from_bytes);

/* Reads a caller's struct: fields the caller was not compiled with become zero.
 * Returns EKV_EINVAL for a size that cannot be right. */
int struct_import(void *to, size_t to_bytes, const void *from);

/* Distance between two elements of a caller's array of structs. */
size_t struct_stride(const void *first);

#endif
