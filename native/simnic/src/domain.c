#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int unsupported_bind(struct fid *fid, struct fid *other, uint64_t flags)
{
    (void)fid;
    (void)other;
    (void)flags;
    return -FI_ENOSYS;
}

int unsupported_control(struct fid *fid, int command, void *argument)
{
    (void)fid;
    (void)command;
    (void)argument;
    return -FI_ENOSYS;
}

int unsupported_ops_open(struct fid *fid, const char *name, uint64_t flags, void **ops,
                         void *context)
{
    (void)fid;
    (void)name;
    (void)flags;
    (void)ops;
    (void)context;
    return -FI_ENOSYS;
}

void domain_enter_contended(struct domain *domain)
{
    fprintf(stderr, "simnic: two threads use %s at once although FI_THREAD_DOMAIN was agreed\n",
            domain->settings->device_names[domain->nic_index]);
    abort();
}

static int counter_open(struct fid_domain *fid, struct fi_cntr_attr *attributes,
                        struct fid_cntr **counter, void *context)
{
    (void)fid;
    (void)attributes;
    (void)counter;
    (void)context;
    return -FI_ENOSYS;
}

static struct fi_ops_domain domain_ops = {
    .size = sizeof domain_ops,
    .av_open = address_vector_open,
    .cq_open = completion_queue_open,
    .endpoint = endpoint_open,
    .cntr_open = counter_open,
};

static int close_domain(struct fid *fid)
{
    struct domain *domain = (struct domain *)(void *)fid;
    domain_enter(domain);
    bool is_used = domain->users > 0;
    domain_leave(domain);
    if (is_used)
        return -FI_EBUSY;
    if (domain->settings->statistics)
        fprintf(stderr, "simnic: pid %d %s: %llu operations, %llu failed, %llu bytes\n",
                (int)getpid(), domain->settings->device_names[domain->nic_index],
                (unsigned long long)domain->operations_done,
                (unsigned long long)domain->operations_failed,
                (unsigned long long)domain->bytes_done);
    due_queue_free(&domain->due);
    free(domain->ready);
    pthread_mutex_destroy(&domain->mutex);
    free(domain);
    return 0;
}

static int bind(struct fid *fid, struct fid *other, uint64_t flags)
{
    (void)fid;
    (void)flags;
    return other->fclass == FI_CLASS_EQ ? 0 : -FI_EINVAL;
}

static struct fi_ops domain_fid_ops = {
    sizeof domain_fid_ops, close_domain, bind, unsupported_control,
    unsupported_ops_open,  NULL,         NULL};

static int nic_by_domain_name(const struct settings *settings, const char *name)
{
    for (int nic = 0; nic < settings->nic_count; nic++) {
        size_t length = strlen(settings->device_names[nic]);
        if (strncmp(name, settings->device_names[nic], length) == 0 &&
            strcmp(name + length, "-rdm") == 0)
            return nic;
    }
    return -1;
}

static void set_thread_rules(struct domain *domain, enum fi_threading threading)
{
    enum thread_check wanted = domain->settings->thread_check;
    domain->is_locked = threading != FI_THREAD_DOMAIN;
    domain->checks_threads = !domain->is_locked && wanted != THREAD_CHECK_OFF;
    domain->checks_posters = domain->is_locked && wanted == THREAD_CHECK_ON;
}

/* A different stream for each domain, the same ones in every run. */
static uint64_t random_start(uint64_t seed, int nic, uint32_t number)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15u + (uint64_t)nic * 0xbf58476d1ce4e5b9u +
                 number * 0x94d049bb133111ebu;
    x ^= x >> 31;
    return x ? x : 1;
}

int domain_open(struct fid_fabric *fid, struct fi_info *info, struct fid_domain **result,
                void *context)
{
    static _Atomic uint32_t next_number = 1;
    const struct settings *settings = settings_get();
    if (!settings || !info->domain_attr || !info->domain_attr->name)
        return -FI_EINVAL;
    int nic = nic_by_domain_name(settings, info->domain_attr->name);
    if (nic < 0)
        return -FI_ENODEV;
    struct domain *domain = calloc(1, sizeof *domain);
    if (!domain || !registry_self()) {
        free(domain);
        return -FI_ENOMEM;
    }
    domain->settings = settings;
    domain->faults = &settings->faults[nic];
    domain->self = registry_self();
    domain->nic = &registry_self_nics()[nic];
    domain->nic_index = nic;
    domain->number = atomic_fetch_add(&next_number, 1);
    domain->is_direct = ((struct fabric *)(void *)fid)->is_direct;
    domain->counts_operations = faults_count_operations(domain->faults);
    domain->random_state = random_start(settings->seed, nic, domain->number);
    pthread_mutex_init(&domain->mutex, NULL);
    set_thread_rules(domain, info->domain_attr->threading);
    nic_open(domain->nic, settings, nic);
    domain->fid.fid.fclass = FI_CLASS_DOMAIN;
    domain->fid.fid.context = context;
    domain->fid.fid.ops = &domain_fid_ops;
    domain->fid.ops = &domain_ops;
    domain->fid.mr = &memory_region_ops;
    *result = &domain->fid;
    return 0;
}
