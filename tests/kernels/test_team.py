"""Tasks over borrowed threads: each piece once, in order, and fewer threads while some are late."""

import ctypes
import multiprocessing
import os
import threading
from statistics import median

import pytest

from outpace.kernels import build, compiled
from outpace.kernels.compiled import library
from tests.support import until

pytestmark = pytest.mark.skipif(library() is None, reason="C cannot be compiled for this machine")

SOURCE = r"""
#include "team.h"
#include <stdlib.h>

typedef struct { int64_t *done, *order, sleep, leader; } Seen;
static _Atomic int64_t clock_, slept;
static _Thread_local int64_t me;

static void work(const void *context, const void *self, int64_t piece) {
    const Seen *seen = context;
    const int64_t first = (int64_t)self;
    __atomic_fetch_add(&seen->done[first + piece], 1, __ATOMIC_SEQ_CST);
    seen->order[first + piece] = atomic_fetch_add(&clock_, 1);
    if (seen->sleep && (int64_t)&me != seen->leader) {
        const struct timespec t = {0, seen->sleep};
        atomic_fetch_add(&slept, 1);
        nanosleep(&t, NULL);
    } else {
        const int64_t end = now_ns() + 5000;
        while (now_ns() < end) relax();
    }
}

int64_t outpace_try(const int64_t *pieces, int64_t tasks, int64_t *done, int64_t *order, int64_t sleep,
            int64_t threads) {
    Task task[4096];
    Seen seen = {done, order, sleep, (int64_t)&me};
    int64_t first = 0;
    for (int64_t i = 0; i < tasks; first += pieces[i++])
        task[i] = (Task){work, (void *)first, pieces[i]};
    slept = 0;
    return run_tasks(task, tasks, &seen, threads);
}
int64_t outpace_slept(void) { return slept; }

static Host real;
static _Atomic int64_t lists;
static void counted(void (*work)(void *), void *list, unsigned threads, unsigned flags) {
    lists++;
    real(work, list, threads, flags);
}

/* Two pieces of a task meet if one that waits awake sees the other begin. Then they run at once, and the
   second ends 5 us after the first. */
typedef struct { _Atomic int64_t here, met; } Meeting;
static void meet(const void *context, const void *self, int64_t piece) {
    Meeting *m = (Meeting *)context;
    const int64_t here = atomic_fetch_add(&m->here, 1) + 1, first = here % 2;
    const int64_t end = now_ns() + 20000;
    while (first && m->here == here && now_ns() < end) relax();
    if (first && m->here > here && now_ns() < end && lists == 1) m->met++;
    for (int64_t until = now_ns() + 5000 * (1 + piece); now_ns() < until;) relax();
}

void outpace_learn(int64_t heard, int64_t delay) {
    List list = {.heard = heard, .delay = delay};
    learn(&list, 2, 0, 1);
}

/* How many of so many tasks had pieces that met, on two threads and in the first list, which may be cut. */
int64_t outpace_meet(int64_t tasks) {
    Task task[4096];
    Meeting m = {0};
    for (int64_t i = 0; i < tasks; i++) task[i] = (Task){meet, NULL, 2};
    real = host, host = counted, lists = 0;
    run_tasks(task, tasks, &m, 2);
    host = real;
    return m.met;
}
"""
PIECES = [1, 0, 40, 1, 1, 7, 0, 300, 2, 1]


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """Runs tasks of so many pieces: on how many threads, how often each piece, and when."""
    folder = tmp_path_factory.mktemp("team")
    (folder / "try.c").write_text(SOURCE)
    built = folder / "try.so"
    build.compile_to(built, [build.NATIVE, "-I", str(build.FOLDER)], folder / "try.c")
    code = ctypes.CDLL(str(built))
    code.outpace_host.argtypes = [ctypes.c_void_p]
    code.outpace_host(compiled._threads())
    code.outpace_try.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 2,
    ]
    code.outpace_slept.restype = code.outpace_threads.restype = code.outpace_try.restype = ctypes.c_int64

    def run(pieces=PIECES, threads=4, sleep=0):
        counts = (ctypes.c_int64 * len(pieces))(*pieces)
        done, order = ((ctypes.c_int64 * max(1, sum(pieces)))() for _ in range(2))
        used = code.outpace_try(counts, len(pieces), done, order, sleep, threads)
        return used, list(done)[: sum(pieces)], list(order)[: sum(pieces)]

    run.threads, run.slept = code.outpace_threads, code.outpace_slept
    code.outpace_meet.argtypes, code.outpace_meet.restype = [ctypes.c_int64], ctypes.c_int64
    code.outpace_learn.argtypes, code.outpace_learn.restype = [ctypes.c_int64] * 2, None
    run.meet, run.learn = code.outpace_meet, code.outpace_learn
    run.apart = ctypes.c_int.in_dll(code, "outpace_apart")
    return run


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_piece_is_done_once_and_tasks_follow_each_other(team, threads):
    for _ in range(20):
        used, done, order = team(threads=threads)
        assert 1 <= used <= threads
        assert done == [1] * sum(PIECES)
        first = 0
        for count in PIECES:
            assert not first or not count or max(order[:first]) < min(order[first : first + count])
            first += count


def test_nothing_to_do_is_done(team):
    assert team([])[1] == team([0, 0])[1] == []


def in_a_thread(work):
    """What a new thread makes of it: what a team remembers is remembered per thread."""
    out = []
    thread = threading.Thread(target=lambda: out.append(work()))
    thread.start()
    thread.join()
    return out[0]


def test_who_is_late_is_sent_away_and_asked_again(team):
    """A second thread that takes 20 ms for pieces of 5 us. It is tried until the system lets it."""

    def used(count, sleep=0):
        return lambda: team([20], 2, sleep)[0] == count

    def work():
        until(used(2))
        until(used(1, sleep=20_000_000))
        until(used(2))  # the longest pause is a second
        return True

    assert in_a_thread(work)


def test_who_was_late_takes_part_in_what_is_left_of_a_long_list(team):
    """60 tasks of 1.5 ms; a piece that takes 5 ms sends its thread away for some 30 ms."""

    def slept():
        _, done, _ = team([300] * 60, 2, sleep=5_000_000)
        assert done == [1] * 300 * 60
        return team.slept()

    def again():
        return median(slept() for _ in range(11)) > 1

    assert in_a_thread(lambda: until(again) or True)


@pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: range(2))(0)) < 2,
    reason="one core runs no two threads at once",
)
def test_a_team_learns_whether_its_threads_share_a_cache(team):
    """Whoever waits hears of the next task if both threads run at once. The first list of a thread is
    listened to. The system may run the two by turns for long: then there is nothing to hear.
    """
    team.apart.value = -1

    def often():
        return team.meet(4000) > 64

    try:
        until(lambda: in_a_thread(often))
    except AssertionError:
        pytest.skip("the system runs no two threads at once")
    assert team.apart.value in (0, 1)


@pytest.mark.parametrize("far", [False, True])
def test_caches_are_apart_where_hearing_takes_long(team, far):
    team.apart.value = -1
    team.learn(15, 15 * 10_000)
    assert team.apart.value == -1  # so few may be chance
    team.learn(16, 16 * (450 if far else 250))
    assert team.apart.value == far


def test_two_threads_have_teams_of_their_own(team):
    def work():
        return all(team(threads=2)[1] == [1] * sum(PIECES) for _ in range(50))

    out = []
    both = [threading.Thread(target=lambda: out.append(work())) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert out == [True, True]


def test_a_child_of_fork_works_alone(team):
    team(threads=2)
    pipe, end = multiprocessing.Pipe()

    def child():
        used, done, _ = team(threads=2)
        end.send((used, done == [1] * sum(PIECES)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert pipe.poll(20) and pipe.recv() == (1, True)
    process.join()
