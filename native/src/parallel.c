/* parallel.c - see parallel.h. */
#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#define PARALLEL_THREADS_MAX 15u

struct share {
    void (*run)(void *context, uint32_t index);
    void *context;
    uint32_t count;
    _Atomic uint32_t next;
};

static void *share_work(void *argument)
{
    struct share *share = argument;
    uint32_t index;

    while ((index = atomic_fetch_add(&share->next, 1)) < share->count)
        share->run(share->context, index);
    return NULL;
}

void parallel_each(uint32_t count, void (*run)(void *context, uint32_t index), void *context)
{
    struct share share = {.run = run, .context = context, .count = count};
    pthread_t threads[PARALLEL_THREADS_MAX];
    uint32_t started = 0;
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started + 1 < count && started < PARALLEL_THREADS_MAX &&
           pthread_create(&threads[started], NULL, share_work, &share) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    share_work(&share);
    while (started > 0)
        pthread_join(threads[--started], NULL);
}
