"""Bound the computing and the memory of work that a stranger's file decides, in this process.

A chat template is a small program: it may loop for ever, or double a text until the memory is full.
Rendering it in a process of its own would take longer than rendering, so the bounds are set around
it here. Two timers count the process's computing time, which does not depend on what else the PC
does: the first raises an error, which ends loops of Python; the second kills the process, if a
single operation in C takes that long. Whoever started it then reports `KILLED`. The address space
may grow by a fixed size, so that what needs more gets a MemoryError instead of the whole PC.

Windows has neither; there, and in threads, the one who starts the program has to bound its time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

SOFT_S = 3.0
"""Computing time after which work is interrupted, in seconds. Real templates take milliseconds."""
HARD_S = 10.0
"""Computing time after which the process is killed, in seconds."""
MEMORY_BYTES = 512 << 20
"""Memory by which the process may grow meanwhile."""
MAX_BITS = 1 << 16
"""Maximum size of a whole number that a template computes."""
MAX_LENGTH = 1 << 26
"""Maximum length of a text or list that a template multiplies."""
KILLED = 26
"""Number of the signal of the second timer (SIGVTALRM)."""
KILLED_MESSAGE = "a chat template did not end, so that its program was killed"
KILLED_HINT = "Use a model from a source that you trust, or give it another chat_template"

T = TypeVar("T")


class LimitReached(Exception):
    """Work took more than its bounds; the text says more than what, such as `5 s of computing`."""


class _Interrupted(BaseException):
    """The first timer; no `except Exception` of the work may catch it."""


def within_limits(work: Callable[[], T], soft_s: float = SOFT_S, hard_s: float = HARD_S) -> T:
    """Do the work and return its result.

    Raises:
        LimitReached: it took too long, or more memory than there is.
    """
    try:
        if threading.current_thread() is not threading.main_thread():
            return work()
        return _timed(work, soft_s, hard_s)
    except _Interrupted:
        raise LimitReached(f"{soft_s:g} s of computing") from None
    except MemoryError:
        raise LimitReached(f"{MEMORY_BYTES >> 20} MiB of memory") from None


if sys.platform == "win32":

    def _timed(work: Callable[[], T], soft_s: float, hard_s: float) -> T:
        return work()

    @contextlib.contextmanager
    def limited_memory(more_bytes: int = MEMORY_BYTES) -> Iterator[None]:
        """Let this process grow as it likes: Windows has no bound that a program sets itself."""
        yield

else:
    import resource

    def _timed(work: Callable[[], T], soft_s: float, hard_s: float) -> T:
        is_armed = True

        def interrupt(number: int, frame: FrameType | None) -> None:
            if is_armed:
                raise _Interrupted

        before = signal.signal(signal.SIGPROF, interrupt)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, hard_s)
            signal.setitimer(signal.ITIMER_PROF, soft_s)
            return work()
        finally:
            is_armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGPROF, before)

    @contextlib.contextmanager
    def limited_memory(more_bytes: int = MEMORY_BYTES) -> Iterator[None]:
        """Let this process grow by at most so much inside the block."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = _read_size() + more_bytes
        if soft != resource.RLIM_INFINITY:
            most = min(most, soft)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _read_size() -> int:
        """Return the address space of this process, in bytes."""
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return 1 << 40  # a system without /proc: no bound that would matter


def bound_operators(sandbox: Any) -> None:
    """Refuse powers and products of unreasonable size in Jinja's sandbox, before they are computed.

    They are single operations in C, which no timer can interrupt.

    Args:
        sandbox: class `SandboxedEnvironment` of Jinja.
    """
    sandbox.default_binop_table = {
        **sandbox.default_binop_table,
        "**": _power,
        "*": _product,
    }
    sandbox.intercepted_binops = frozenset({*sandbox.intercepted_binops, "**", "*"})


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        _expect(abs(base).bit_length() * max(0, exponent) <= MAX_BITS)
    return base**exponent


def _product(one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        _expect(one.bit_length() + other.bit_length() <= MAX_BITS)
    for value, times in ((one, other), (other, one)):
        if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
            _expect(len(value) * max(0, times) <= MAX_LENGTH)
    return one * other


def _expect(is_reasonable: bool) -> None:
    if not is_reasonable:
        raise OverflowError("it computes a number or a text of unreasonable size")
