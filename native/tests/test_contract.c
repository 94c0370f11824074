/* test_contract.c - the cffi declarations agree with the header: every struct, every
 * prototype, every error code and every constant, compared as text. */
#include <ctype.h>

#include "check.h"
#include "efa_kv.h"

static char *file_read(const char *name)
{
    char path[512];
    char *text;
    long bytes;
    FILE *file;

    snprintf(path, sizeof path, "%s/%s", EFA_KV_SOURCE_DIR, name);
    file = fopen(path, "r");
    CHECK(file);
    fseek(file, 0, SEEK_END);
    bytes = ftell(file);
    rewind(file);
    text = calloc(1, (size_t)bytes + 1);
    CHECK(text && fread(text, 1, (size_t)bytes, file) == (size_t)bytes);
    fclose(file);
    return text;
}

/* Takes out comments and preprocessor lines, squeezes white space, in place. */
static void text_normalize(char *text)
{
    char *to = text;
    int line_start = 1;

    for (const char *from = text; *from;) {
        if (from[0] == '/' && from[1] == '*') {
            from = strstr(from, "*/") + 2;
        } else if (line_start && *from == '#') {
            while (*from && *from != '\n') {
                if (from[0] == '\\' && from[1] == '\n')
                    from++;
                from++;
            }
        } else if (isspace((unsigned char)*from)) {
            line_start |= *from == '\n';
            if (to > text && to[-1] != ' ')
                *to++ = ' ';
            from++;
        } else {
            line_start = 0;
            *to++ = *from++;
        }
    }
    *to = '\0';
}

static void text_replace(char *text, const char *from, const char *to)
{
    size_t from_bytes = strlen(from), to_bytes = strlen(to);
    char *at;

    CHECK(to_bytes <= from_bytes);
    while ((at = strstr(text, from))) {
        memcpy(at, to, to_bytes);
        memmove(at + to_bytes, at + from_bytes, strlen(at + from_bytes) + 1);
    }
}

/* The next declaration: up to a semicolon outside braces. */
static int declaration_next(const char **text, char *declaration, size_t bytes)
{
    size_t used = 0;
    int depth = 0;

    while (**text == ' ')
        (*text)++;
    while (**text && (depth > 0 || **text != ';')) {
        depth += (**text == '{') - (**text == '}');
        CHECK(used + 1 < bytes);
        declaration[used++] = *(*text)++;
    }
    declaration[used] = '\0';
    if (**text == ';')
        (*text)++;
    return used > 0 && **text;
}

static int is_skipped(const char *declaration)
{
    /* Written as a macro list there and as numbers here; compared by value below. */
    return strstr(declaration, "typedef enum ekv_code ") == declaration ||
           strchr(declaration, '}') == declaration;
}

static size_t all_are_in(const char *name, const char *text, const char *other)
{
    char declaration[8192];
    size_t count = 0;

    while (declaration_next(&text, declaration, sizeof declaration)) {
        if (is_skipped(declaration))
            continue;
        if (!strstr(other, declaration)) {
            fprintf(stderr, "only in %s: %s\n", name, declaration);
            exit(1);
        }
        count++;
    }
    return count;
}

static void test_declarations(void)
{
    char *header = file_read("include/efa_kv.h"), *cdef = file_read("efa_kv.cdef.h");
    char *body;

    text_normalize(header);
    text_normalize(cdef);
    text_replace(header, "EKV_API ", "");
    text_replace(header, "[EKV_NAME_BYTES]", "[64]");
    text_replace(header, "[EKV_ADDRESS_BYTES]", "[128]");
    body = strstr(header, "extern \"C\" {");
    CHECK(body);
    body += strlen("extern \"C\" {");
    CHECK(EKV_NAME_BYTES == 64 && EKV_ADDRESS_BYTES == 128);
    CHECK(all_are_in("efa_kv.h", body, cdef) > 40);
    CHECK(all_are_in("efa_kv.cdef.h", cdef, body) > 40);
    free(header);
    free(cdef);
}

static void test_codes(void)
{
    char *cdef = file_read("efa_kv.cdef.h");
    char line[64];

#define CODE_CHECK(name, number, class_, text)                                                     \
    snprintf(line, sizeof line, "%s = %d", #name, (number));                                       \
    CHECK(strstr(cdef, line));                                                                     \
    CHECK(strcmp(ekv_code_name(number), #name) == 0);                                              \
    CHECK(ekv_code_class(number) == (int)(class_));                                                \
    CHECK(strcmp(ekv_code_text(number), text) == 0);
    EKV_CODE_LIST(CODE_CHECK)
#undef CODE_CHECK
    free(cdef);
}

/* Every plain constant of the header is declared. */
static void test_constants(void)
{
    char *header = file_read("include/efa_kv.h"), *cdef = file_read("efa_kv.cdef.h");
    size_t count = 0;

    for (char *at = header; (at = strstr(at, "\n#define EKV_"));) {
        char name[64], line[96];

        at += strlen("\n#define ");
        CHECK(sscanf(at, "%63[A-Z_0-9]", name) == 1);
        if (at[strlen(name)] != ' ' || strcmp(name, "EKV_API") == 0)
            continue; /* macros with arguments, the include guard */
        snprintf(line, sizeof line, "#define %s ...\n", name);
        if (!strstr(cdef, line)) {
            fprintf(stderr, "%s is missing in efa_kv.cdef.h\n", name);
            exit(1);
        }
        count++;
    }
    CHECK(count > 20);
    free(header);
    free(cdef);
}

int main(void)
{
    RUN(test_declarations);
    RUN(test_codes);
    RUN(test_constants);
    return 0;
}
