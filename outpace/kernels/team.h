/* A list of tasks, one after another, over the threads that torch computes with.

   A task is cut into pieces, which threads take as they come: the leader from the front, others from the
   back. So two threads mostly find in their own caches what they wrote. A piece does the same
   whoever takes it, so results do not depend on the number of threads. Who ends the last piece of
   a task does by itself all tasks of one piece that follow, and then opens the next one. Nobody
   waits for a thread that holds no piece, so one that the system does not let run costs nothing
   unless it was stopped in the middle of a piece.

   Threads are borrowed from torch's OpenMP, once for the whole list, through its entry point
   `GOMP_parallel`: threads of our own would share the cores with those, which spin for milliseconds
   after every parallel operation of torch. The team keeps its own time inside.

   Another process may take a core. Then a piece that takes 20 us takes a time slice, 3 ms or more,
   while everybody waits. Whoever leads a list notices waits that are long beside the pieces that he
   did himself, sends away as many threads as were late, and later tries one more again. A list is
   cut in two there: passes over many rows take so long that they wait for no next one. */

#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "lanes.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

typedef void (*Work)(const void *context, const void *self, int64_t piece);
typedef struct {
    Work work;
    const void *self;
    int64_t pieces;
} Task;

typedef void (*Host)(void (*)(void *), void *, unsigned, unsigned);
static Host host;    /* `GOMP_parallel`; without it everything runs on the calling thread */
static int orphaned; /* a child of fork has no threads but its own */

enum { FRONT = 24, TASK = 2 * FRONT, TAKEN = (1 << FRONT) - 1 }; /* bits of a ticket */
enum {
    SPINS = 2000,            /* looks at a counter before the clock is read */
    LATE = 100 * 1000,       /* ns; a shorter wait says nothing */
    LATE_PIECES = 4,         /* and so does one of fewer pieces */
    AWAY = 8,                /* waits that a late thread stays away for */
    NAP = 20 * 1000,         /* ns; sleeping lets the system move a thread to this core */
    SHORTEST = 20 * 1000000, /* ns that fewer threads are used for, doubled while that goes on */
    LONGEST = 1000 * 1000000,
    CALM = 50, /* lists in a row without a wait after which the past is forgotten */
    LISTENS = 17, /* one of so many lists is listened to; a prime, for lists of several kinds take turns */
    HEARD = 16,   /* openings that must be heard in it */
    FAR_APART = 320, /* ns from opening to hearing: 100 to 280 with a cache in common, 360 to 460 without */
};

/* How many threads a calling thread uses now. */
typedef struct {
    int64_t limit, allowed, pause, retry, calm, lists;
} Mood;
static _Thread_local Mood mood;

typedef struct {
    const Task *task;
    const void *context;
    _Atomic int64_t tasks; /* less once it is cut */
    _Atomic int64_t whole; /* ns by the clock at which missing threads are had anew; 0: none misses */
    const Mood *leader;
    _Alignas(64) _Atomic uint64_t ticket; /* task << TASK | pieces taken: front << FRONT | back */
    _Alignas(64) _Atomic int64_t done;    /* pieces of that task */
    _Atomic int64_t leaving;              /* threads that are to leave after their piece */
    _Atomic int64_t opened;               /* when the last task was opened, if it is listened to */
    _Atomic int64_t heard, delay;         /* openings that were heard by who waited, and ns until then */
    int listened;
    int64_t waited, late;                 /* by the leader: ns of long waits, threads missed */
    int64_t left;                         /* when he was through */
} List;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Let whoever hears of a piece find what it wrote past the caches (`publish`). */
static inline void settle(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_sfence();
#endif
}

static void nap(void) {
    const struct timespec t = {0, NAP};
    nanosleep(&t, NULL);
}

/* Do all tasks of one piece from `at` on, then open the next one. */
static void open_from(List *list, int64_t at) {
    for (; at < list->tasks && list->task[at].pieces <= 1; at++)
        if (list->task[at].pieces == 1) list->task[at].work(list->context, list->task[at].self, 0);
    settle();
    atomic_store_explicit(&list->done, 0, memory_order_relaxed);
    if (list->listened) atomic_store_explicit(&list->opened, now_ns(), memory_order_relaxed);
    atomic_store_explicit(&list->ticket, (uint64_t)at << TASK, memory_order_release);
}

/* Wait until another task than `at` is open. */
static void await(List *list, int64_t at, int leads, int64_t longest) {
    int64_t began = 0, held = 0;
    for (int64_t spins = 0;; spins++) {
        const uint64_t ticket = atomic_load_explicit(&list->ticket, memory_order_acquire);
        if ((int64_t)(ticket >> TASK) != at) {
            if (list->listened && spins > 0 && !began) {
                atomic_fetch_add(&list->heard, 1);
                atomic_fetch_add(&list->delay, now_ns() - atomic_load(&list->opened));
            }
            break;
        }
        relax();
        if (spins < SPINS) continue;
        const int64_t now = now_ns();
        if (!began) began = now;
        spins = SPINS - 64;
        if (now - began <= LATE) continue;
        if (leads && !held && now - began > LATE_PIECES * longest) {
            held = list->task[at].pieces - atomic_load(&list->done);
            if (held > list->late) list->late = held;
            if (held > 0) atomic_store(&list->leaving, held);
        }
        nap();
    }
    if (held <= 0) return;
    const int64_t now = now_ns();
    list->waited += now - began;
    atomic_store_explicit(&list->whole, now + AWAY * (now - began), memory_order_relaxed);
}

/* End the list before `at` if threads that miss are to be had anew. */
static void cut_at(List *list, int64_t at) {
    const int64_t whole = atomic_load_explicit(&list->whole, memory_order_relaxed);
    if (whole && at < list->tasks && now_ns() >= whole) list->tasks = at;
}

static void take_part(void *given) {
    List *list = given;
    const int leads = list->leader == &mood;
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&list->ticket, memory_order_acquire);
        int64_t at = ticket >> TASK, longest = 0;
        if (at == list->tasks) break;
        for (;;) {
            const uint64_t one = leads ? UINT64_C(1) << FRONT : 1;
            ticket = atomic_fetch_add_explicit(&list->ticket, one, memory_order_acq_rel);
            if ((int64_t)(ticket >> TASK) != at) longest = 0;
            at = ticket >> TASK;
            if (at == list->tasks) break;
            const Task *task = list->task + at;
            const int64_t front = ticket >> FRONT & TAKEN, back = ticket & TAKEN;
            if (front + back >= task->pieces) break;
            const int64_t piece = leads ? front : task->pieces - 1 - back;
            const int64_t began = leads ? now_ns() : 0;
            task->work(list->context, task->self, piece);
            settle();
            if (leads) {
                const int64_t took = now_ns() - began;
                if (took > longest) longest = took;
            }
            if (atomic_fetch_add_explicit(&list->done, 1, memory_order_acq_rel) + 1 == task->pieces) {
                cut_at(list, at + 1);
                open_from(list, at + 1);
            }
            if (!leads && atomic_load_explicit(&list->leaving, memory_order_relaxed) > 0) {
                if (atomic_fetch_sub(&list->leaving, 1) > 0) return;
            }
        }
        if (at == list->tasks) break;
        await(list, at, leads, longest);
    }
    if (leads) list->left = now_ns();
}

/* What was seen of a list says how many threads the next one gets: fewer where all waited longer than
   the others would have needed for the work of those that were late. What was heard says how lines are shared. */
static void learn(List *list, int64_t used, int64_t began, int64_t ended) {
    Mood *m = &mood;
    const int64_t missed = ended - list->left; /* until the last thread came to the end */
    const int64_t fewer = list->late > 1 ? list->late : 1;
    if (missed > LATE) list->waited += missed;
    if (list->heard >= HEARD) outpace_apart = list->delay > list->heard * FAR_APART;
    if (list->waited * used > (ended - began) * fewer) {
        m->allowed = m->allowed > fewer ? m->allowed - fewer : 1;
        m->pause = m->pause ? m->pause * 2 : SHORTEST;
        if (m->pause > LONGEST) m->pause = LONGEST;
        m->retry = ended + m->pause;
        m->calm = 0;
    } else if (++m->calm >= CALM) {
        m->pause = 0;
    }
}

/* Run tasks on at most `threads` threads; gives how many were used in the end. */
static int64_t run_tasks(const Task *task, int64_t tasks, const void *context, int64_t threads) {
    Mood *m = &mood;
    if (m->limit != threads) *m = (Mood){.limit = threads, .allowed = threads};
    int64_t used = 1;
    for (int64_t at = 0; at < tasks;) {
        List list = {.task = task, .context = context, .tasks = tasks, .leader = m};
        list.listened = m->lists++ % LISTENS == 0;
        open_from(&list, at);
        if (atomic_load(&list.ticket) >> TASK == (uint64_t)tasks) break;
        const int64_t began = now_ns();
        if (m->allowed < m->limit && began >= m->retry) m->allowed++, m->calm = 0;
        used = host == NULL || orphaned ? 1 : m->allowed;
        if (used < m->limit && host != NULL && !orphaned) list.whole = m->retry;
        if (used == 1) {
            take_part(&list);
        } else {
            host(take_part, &list, (unsigned)used, 0);
            learn(&list, used, began, now_ns());
        }
        at = list.tasks;
    }
    return used;
}

static void orphan(void) { orphaned = 1; }

/* Say how threads are had; once, before anything runs. */
void outpace_host(void *parallel) {
    if (host == NULL) pthread_atfork(NULL, NULL, orphan);
    host = (Host)parallel;
}

/* How many threads the calling thread's next list gets. */
int64_t outpace_threads(void) { return mood.limit ? mood.allowed : 0; }
