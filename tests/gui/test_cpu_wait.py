"""A busy PC is told from a thread that is really held up."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.gui.cpu_wait import CpuWait, TurnTime

HELD_S = 0.1
PATIENCE_S = 30.0


def timed(deed: Callable[[], object]) -> tuple[float, float]:
    """Return what `deed` takes by the clock, and for how long this thread was not free."""
    began_s, turn = time.perf_counter(), TurnTime()
    deed()
    return time.perf_counter() - began_s, turn.seconds()


def compute() -> None:
    end_s = time.thread_time() + HELD_S
    while time.thread_time() < end_s:
        pass


@contextlib.contextmanager
def crowd(core: int) -> Iterator[None]:
    """Keep a core busy with others' work."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", code]
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            hog = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(hog.kill)
            assert hog.stdout is not None
            hog.stdout.readline()
        yield


@pytest.fixture
def cores() -> Iterator[tuple[int, int]]:
    """The first for this thread, which is kept to it, the second for others."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    first, second, *_ = sorted(allowed)
    os.sched_setaffinity(0, {first})
    yield first, second
    os.sched_setaffinity(0, allowed)


def test_a_thread_that_sleeps_or_computes_is_held_up() -> None:
    for deed in (compute, lambda: time.sleep(HELD_S)):  # what a host takes is told in whole ticks
        assert max(timed(deed)[1] for _ in range(3)) > HELD_S * 0.9


def test_waiting_for_a_core_is_left_out(cores: tuple[int, int]) -> None:
    with crowd(cores[0]):
        wait = CpuWait()
        took_s, held_s = timed(compute)
        waited_s = wait.seconds()
    assert took_s > HELD_S * 1.5
    assert held_s < HELD_S * 1.3
    assert waited_s == pytest.approx(took_s - held_s, abs=0.02)


def test_waiting_for_the_lock_of_a_thread_without_a_core_is_left_out(
    cores: tuple[int, int],
) -> None:
    """The other thread holds Python's lock, and the core that it computes on is others' mostly."""
    is_over, turns = False, []

    def hold() -> None:
        me = threading.get_native_id()
        os.sched_setaffinity(me, {cores[1]})
        os.setpriority(os.PRIO_PROCESS, me, 10)
        while not is_over:
            pass

    thread = threading.Thread(target=hold)
    with crowd(cores[1]):
        thread.start()
        end_s = time.monotonic() + PATIENCE_S
        while not any(took_s > HELD_S for took_s, _ in turns) and time.monotonic() < end_s:
            turns.append(timed(lambda: time.sleep(0.001)))
        is_over = True
        thread.join()
    assert max(took_s for took_s, _ in turns) > HELD_S, "a thread was held up"
    assert max(held_s for _, held_s in turns) < HELD_S / 2
