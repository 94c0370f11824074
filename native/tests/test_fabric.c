/* test_fabric.c - finding libfabric and devices, and saying clearly what is wrong. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/wait.h>

#include "pair.h"

static void test_library(void)
{
    ekv_error error = {.struct_size = sizeof error};
    char text[300];

    CHECK_OK(ekv_fabric_library(NULL, text, sizeof text, &error));
    printf("  %s\n", text);
    CHECK(strchr(text, '/'));
    /* A path that is not there gives way to the others. */
    CHECK_OK(ekv_fabric_library("/nowhere/libfabric.so.1", text, sizeof text, &error));
}

static void test_list(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_options options = {.struct_size = sizeof options, .protocol = "tcp"};
    ekv_nic nics[16] = {{.struct_size = sizeof nics[0]}};
    size_t count;

    CHECK_OK(ekv_fabric_list(&options, nics, 16, &count, &error));
    CHECK_INT(count, 1); /* the one that has 127.0.0.1 */
    CHECK(nics[0].provider_queue_depth > 0);
    CHECK_OK(ekv_fabric_list(&options, NULL, 0, &count, &error));
    CHECK_INT(count, 1);
    options.devices = nics[0].name;
    CHECK_OK(ekv_fabric_list(&options, nics, 16, &count, &error));
    CHECK_INT(count, 1);
    options.devices = "nothing*,none";
    CHECK_INT(ekv_fabric_list(&options, nics, 16, &count, &error), EKV_ENODEVICE);
    CHECK(strstr(error.text, "nothing*"));
    options.devices = NULL;
    options.protocol = "semaphore-flags";
    CHECK_INT(ekv_fabric_list(&options, nics, 16, &count, &error), EKV_ENODEVICE);
    CHECK(strstr(error.text, "semaphore-flags"));
}

static void test_bad_options(void)
{
    ekv_error error = {.struct_size = sizeof error};
    ekv_options options = {.struct_size = sizeof options, .protocol = "tcp"};
    ekv_engine *engine;

    CHECK_INT(ekv_engine_open(&options, &engine, &error), EKV_EINVAL); /* no incarnation */
    options.incarnation = 1;
    options.stripe_bytes = 1;
    CHECK_INT(ekv_engine_open(&options, &engine, &error), EKV_EINVAL);
    options.stripe_bytes = 0;
    options.host = "203.0.113.77"; /* not an address of this host */
    CHECK(ekv_engine_open(&options, &engine, &error) < 0);
    CHECK(!engine && error.text[0]);
    printf("  %s: %s\n", error.where, error.text);
    CHECK_INT(ekv_engine_open(NULL, &engine, &error), EKV_EINVAL);
}

/* A wheel that bundles its own libfabric, beside the system's. */
static void test_two_copies(void)
{
    int status;
    pid_t child = fork();

    if (child == 0) {
        ekv_error error = {.struct_size = sizeof error};
        char name[] = "/tmp/libfabric-bundled-XXXXXX.so.1", command[600];
        char text[300];
        int found;

        CHECK_OK(ekv_fabric_library(NULL, text, sizeof text, &error));
        CHECK(mkstemps(name, 5) >= 0);
        snprintf(command, sizeof command, "cp '%s' '%s'", strchr(text, '/'), name);
        CHECK(system(command) == 0);
        found = dlopen(name, RTLD_NOW | RTLD_LOCAL) != NULL;
        unlink(name);
        CHECK(found);
        CHECK_INT(ekv_fabric_library(NULL, text, sizeof text, &error), EKV_ENOFABRIC);
        CHECK(strstr(error.text, "two copies"));
        fflush(stdout);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_INT(status, 0);
}

int main(void)
{
    RUN(test_two_copies);
    RUN(test_library);
    RUN(test_list);
    RUN(test_bad_options);
    return 0;
}
