/* GPU memory that NICs reach themselves, on simulated ones: registered with the NICs of its
 * switch, by pointer or by dmabuf, and nothing is staged.
 *
 * The fake driver's memory can be touched here, since a simulated NIC is a processor.  Driver
 * and simulation read their settings once, so each scenario has a process of its own. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu.h"

#define BYTES (4u << 20)

static char tree[64];

static ekv_options options_of(uint64_t incarnation)
{
    ekv_options options = pair_options("efa", incarnation);

    options.cuda_path = FAKE_CUDA;
    options.sysfs_root = tree;
    options.stripe_bytes = 64 << 10;
    return options;
}

static void scenario_moves(void)
{
    ekv_options left = options_of(0x11), right = options_of(0x22);
    ekv_engine *source = pair_open(&left), *target = pair_open(&right);
    uint64_t from = gpu_allocate(0, BYTES), to = gpu_allocate(1, BYTES), length = BYTES;
    uint8_t *filled = malloc(BYTES), *found = malloc(BYTES);
    ekv_rail_counters counters[16] = {{.struct_size = sizeof counters[0]}};
    ekv_error error = {.struct_size = sizeof error};
    ekv_job_options options;
    struct card card, back;
    uint64_t rails = 0, moved = 0;
    ekv_job_id job;
    size_t count;

    CHECK(filled && found);
    for (size_t i = 0; i < BYTES; i++)
        filled[i] = (uint8_t)(i * 7 + (i >> 12));
    gpu_copy(from, (uint64_t)(uintptr_t)filled, BYTES);
    pair_card(source, 0x11, gpu_register(source, from, BYTES, 0), (void *)(uintptr_t)from, BYTES,
              &back);
    pair_card(target, 0x22, gpu_register(target, to, BYTES, -1), (void *)(uintptr_t)to, BYTES,
              &card);
    CHECK(card.nics[0].flags & EKV_NIC_DEVICE_MEMORY);
    for (size_t i = 0; i < back.key_count; i++) {
        CHECK(back.keys[i].nic < back.nic_count); /* no staging, no short way */
        rails |= UINT64_C(1) << back.keys[i].nic;
    }
    CHECK(rails != 0 && rails != 0xffff); /* the driver has told its place */
    pair_connect(target, &back, 0);
    options = pair_job(pair_connect(source, &card, 0), EKV_WRITE, 20);
    CHECK_OK(ekv_submit(source, &options, &from, &to, &length, 1, &job, &error));
    CHECK_INT(pair_finish(source, job, 30).status, EKV_OK);
    gpu_copy((uint64_t)(uintptr_t)found, to, BYTES);
    CHECK(memcmp(filled, found, BYTES) == 0);
    CHECK_INT(ekv_counters(source, counters, 16, &count), EKV_OK);
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(counters[i].bytes_staged, 0);
        CHECK(counters[i].bytes_written == 0 || rails >> i & 1);
        moved += counters[i].bytes_written;
    }
    CHECK_INT(moved, BYTES);
    CHECK_INT(ekv_engine_close(source, 5), 0);
    CHECK_INT(ekv_engine_close(target, 5), 0);
    free(filled);
    free(found);
}

/* An EFA software that offers no way to GPU memory is named, and nothing is staged over it. */
static void scenario_offers_none(void)
{
    ekv_options options = options_of(0x11);
    ekv_engine *engine = pair_open(&options);
    ekv_error error = {.struct_size = sizeof error};
    ekv_memory memory = gpu_memory(gpu_allocate(0, BYTES), BYTES, 0);
    ekv_region_id region;

    CHECK_INT(ekv_region_add(engine, &memory, &region, &error), EKV_EREGISTER);
    CHECK(strstr(error.text, "FI_HMEM"));
    CHECK_INT(ekv_engine_close(engine, 1), 0);
}

static void in_a_process(const char *name, void (*scenario)(void), bool reaches, bool exports)
{
    pid_t child = fork();
    int status = 0;

    CHECK(child >= 0);
    if (child == 0) {
        setenv("EFA_KV_SIM_HMEM", reaches ? "1" : "0", 1);
        setenv("FAKE_CUDA_DMABUF", exports ? "1" : "0", 1);
        setenv("FAKE_CUDA_PLAIN", "1", 1);
        setenv("EFA_KV_SIM_INSTANCE", "p5en.48xlarge", 1);
        setenv("EFA_KV_SIM_SYSFS", tree, 1);
        gpu_open();
        scenario();
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    printf("%s: %s\n", name, status == 0 ? "ok" : "FAILED");
    CHECK_INT(status, 0);
}

int main(void)
{
    char command[96];

    setvbuf(stdout, NULL, _IOLBF, 0);
    strcpy(tree, "/tmp/efa-kv-gpu.XXXXXX");
    CHECK(mkdtemp(tree) != NULL);
    in_a_process("by pointer", scenario_moves, true, false);
    in_a_process("by dmabuf", scenario_moves, true, true);
    in_a_process("no access", scenario_offers_none, false, false);
    snprintf(command, sizeof command, "rm -rf %s", tree);
    CHECK_INT(system(command), 0);
    return 0;
}
