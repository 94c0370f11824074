/* move.c - two engines of one process move a buffer over a provider, and it is compared.
 *
 *     cc move.c $(pkg-config --cflags --libs efa_kv) -o move && ./move tcp
 *
 * Between two hosts nothing changes but the way by which the NICs, the incarnation and
 * the region's keys get from one side to the other: that is the application's own. */
#include <efa_kv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES (4u << 20)
#define NICS_MAX 32
#define KEYS_MAX 64

static ekv_error error = {.struct_size = sizeof error};

/* Ends the program with what the library says is wrong. */
static void need(int code, const char *what)
{
    if (code >= 0)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, ekv_code_name(code),
            error.code == code ? error.text : ekv_code_text(code));
    exit(1);
}

static ekv_engine *open_engine(const char *protocol, uint64_t incarnation)
{
    /* near = EKV_NEAR_NEVER: within one process a copy of memory would do. */
    ekv_options options = {
        .struct_size = sizeof options, .protocol = protocol, .incarnation = incarnation};
    ekv_engine *engine;

    need(ekv_engine_open(&options, &engine, &error), "ekv_engine_open");
    return engine;
}

static ekv_region_id offer(ekv_engine *engine, void *memory)
{
    ekv_memory description = {.struct_size = sizeof description,
                              .kind = EKV_MEMORY_HOST,
                              .address = (uintptr_t)memory,
                              .length_bytes = BYTES,
                              .device = -1,
                              .access = EKV_ACCESS_REMOTE_WRITE};
    ekv_region_id region;

    need(ekv_region_add(engine, &description, &region, &error), "ekv_region_add");
    return region;
}

/* Tells one engine where the other and its memory are. */
static ekv_peer_id introduce(ekv_engine *engine, ekv_engine *other, uint64_t incarnation,
                             ekv_region_id region, const void *memory)
{
    ekv_nic nics[NICS_MAX] = {{.struct_size = sizeof *nics}};
    ekv_region_key keys[KEYS_MAX] = {{.struct_size = sizeof *keys}};
    ekv_remote_key told[KEYS_MAX];
    ekv_peer_options options = {.struct_size = sizeof options, .incarnation = incarnation};
    size_t nic_count, key_count;
    ekv_peer_id peer;

    need(ekv_engine_rails(other, nics, NICS_MAX, &nic_count), "ekv_engine_rails");
    need(ekv_region_keys(other, region, keys, KEYS_MAX, &key_count), "ekv_region_keys");
    if (nic_count > NICS_MAX || key_count > KEYS_MAX) {
        fprintf(stderr, "%zu NICs and %zu keys are more than this example has room for\n",
                nic_count, key_count);
        exit(1);
    }
    for (size_t i = 0; i < key_count; i++)
        told[i] = (ekv_remote_key){.struct_size = sizeof told[i],
                                   .nic = keys[i].rail,
                                   .key = keys[i].key,
                                   .base = keys[i].base,
                                   .offset_bytes = keys[i].offset_bytes,
                                   .length_bytes = keys[i].length_bytes};
    need(ekv_peer_add(engine, &options, nics, nic_count, &peer, &error), "ekv_peer_add");
    need(ekv_peer_region_add(engine, peer, region, (uintptr_t)memory, BYTES, told, key_count,
                             &error),
         "ekv_peer_region_add");
    return peer;
}

int main(int count, char **arguments)
{
    const char *protocol = count > 1 ? arguments[1] : "tcp";
    unsigned char *source = malloc(BYTES);
    unsigned char *target = calloc(1, BYTES);
    ekv_engine *left = open_engine(protocol, 1);
    ekv_engine *right = open_engine(protocol, 2);
    ekv_job_options options = {.struct_size = sizeof options, .operation = EKV_WRITE};
    ekv_result result = {.struct_size = sizeof result};
    uint64_t from = (uintptr_t)source, to = (uintptr_t)target, length = BYTES;
    ekv_region_id source_region, target_region;
    ekv_job_id job;

    if (!source || !target)
        return 1;
    for (size_t i = 0; i < BYTES; i++)
        source[i] = (unsigned char)(i * 7 + (i >> 12));
    source_region = offer(left, source);
    target_region = offer(right, target);
    introduce(right, left, 1, source_region, source); /* some providers serve only whom they know */
    options.peer = introduce(left, right, 2, target_region, target);
    options.deadline_s = 20;
    need(ekv_submit(left, &options, &from, &to, &length, 1, &job, &error), "ekv_submit");
    need(ekv_job_wait(left, job, 30, 1, &result), "ekv_job_wait");
    need(result.status, result.text);
    need(ekv_job_release(left, job), "ekv_job_release");
    need(ekv_engine_close(left, 1), "ekv_engine_close");
    need(ekv_engine_close(right, 1), "ekv_engine_close");
    if (memcmp(source, target, BYTES) != 0) {
        fprintf(stderr, "the bytes that arrived are not those that were sent\n");
        return 1;
    }
    printf("%llu bytes moved over %s and compared, in %llu operations\n",
           (unsigned long long)result.bytes, protocol, (unsigned long long)result.descriptors);
    free(source);
    free(target);
    return 0;
}
