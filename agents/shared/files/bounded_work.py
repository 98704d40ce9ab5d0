"""Bound the computing time and memory of work that depends on a foreign file, in this process.

A chat template is a small program: it may loop endlessly, or double a text until the memory is
full. Rendering it in its own process would take longer than rendering, so it is bounded in this
one. Two timers count the process's computing time, which does not depend on other programs: the
first raises an error, which ends loops of Python; the second kills the process if a single
operation in C takes that long. The parent process then reports `KILLED`. The address space may grow
by a fixed size, so that excessive work gets a MemoryError instead of filling the PC's memory.

A tokenizer is a program of its file, too: its rules can make a million tokens of one letter, and
its regular expressions can search for hours, in threads of a library that no error of Python
interrupts. So `limited_library` kills the process, by a signal of its own that the parent reports
in the same way.

Windows has neither. There, and in threads, the code that starts the program must bound its time.
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
"""Maximum growth of the process during the work, in bytes."""
MAX_BITS = 1 << 16
"""Maximum size of a whole number that a template computes, in bits."""
MAX_LENGTH = 1 << 26
"""Maximum length of a text or list that a template multiplies."""
KILLED = 26
"""Signal of the second timer (SIGVTALRM)."""
TOKENIZER_KILLED = 27
"""Signal that ends a process whose tokenizer exceeds its bounds (SIGPROF)."""
KILLED_MESSAGE = "a chat template did not end, so that its program was killed"
KILLED_HINT = "Use a model from a source that you trust, or give it another chat_template"
TOKENIZER_MESSAGE = (
    "the tokenizer of the model needed more time or memory than any real one, so that its program "
    "was killed"
)
TOKENIZER_HINT = "Use a model from a source that you trust, or replace its tokenizer.json"
KILLS = {
    KILLED: (KILLED_MESSAGE, KILLED_HINT),
    TOKENIZER_KILLED: (TOKENIZER_MESSAGE, TOKENIZER_HINT),
}
"""Reason and hint by the signal that ended a process which worked with a foreign file."""
_LOOK_S = 0.02

T = TypeVar("T")


class LimitReached(Exception):
    """Work exceeded a bound; the text names it, such as `5 s of computing`."""


class _Interrupted(BaseException):
    """The first timer; a BaseException, so that no `except Exception` of the work catches it."""


def within_limits(work: Callable[[], T], soft_s: float = SOFT_S, hard_s: float = HARD_S) -> T:
    """Do the work and return its result.

    Raises:
        LimitReached: the work took too long or too much memory.
    """
    try:
        # Python allows signal handlers in the main thread only.
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
    def limited_library(cpu_s: float, more_bytes: int) -> Iterator[None]:
        """Do nothing: Windows has no timer of computing time."""
        yield

    @contextlib.contextmanager
    def limited_memory(more_bytes: int = MEMORY_BYTES) -> Iterator[None]:
        """Do nothing: Windows has no memory limit that a program can set itself."""
        yield

else:
    import resource

    def _timed(work: Callable[[], T], soft_s: float, hard_s: float) -> T:
        is_armed = True

        # A signal may still arrive while the timers are reset.
        def interrupt(number: int, frame: FrameType | None) -> None:
            if is_armed:
                raise _Interrupted

        before = signal.signal(signal.SIGPROF, interrupt)
        # SIGVTALRM has no handler here, so it kills the process.
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
    def limited_library(cpu_s: float, more_bytes: int) -> Iterator[None]:
        """Kill this process if the block computes or grows more than this.

        Args:
            cpu_s: computing time of all threads, in seconds.
            more_bytes: growth of the memory in use, in bytes. It is read only while the library
                leaves the interpreter to other threads, as it does while it makes tokens.
        """
        is_over = threading.Event()
        most_bytes = _read_own() + more_bytes

        def watch() -> None:
            while not is_over.wait(_LOOK_S):
                if _read_own() > most_bytes:
                    os.kill(os.getpid(), TOKENIZER_KILLED)

        watcher = threading.Thread(target=watch, name="tokenizer memory", daemon=True)
        watcher.start()
        # SIGPROF has no handler here, so it kills the process.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            is_over.set()
            watcher.join()

    @contextlib.contextmanager
    def limited_memory(more_bytes: int = MEMORY_BYTES) -> Iterator[None]:
        """Limit the growth of this process inside the block."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = _read_size() + more_bytes
        if soft != resource.RLIM_INFINITY:
            most = min(most, soft)
        # Only the soft limit, so that it can be raised again.
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _read_size() -> int:
        """Return the size of this process's address space, in bytes."""
        return _read_pages()[0]

    def _read_own() -> int:
        """Return the memory of this process alone, without files that it maps, in bytes."""
        _, resident, shared = _read_pages()
        return resident - shared

    def _read_pages() -> tuple[int, int, int]:
        """Return the address space, the memory in use and the shared part of it, in bytes."""
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                size, resident, shared = (
                    int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split()[:3]
                )
            return size, resident, shared
        except (OSError, ValueError):
            return 1 << 40, 0, 0  # without /proc: a limit too high to matter


def bound_operators(sandbox: Any) -> None:
    """Refuse powers and products of unreasonable size in Jinja's sandbox before computing them.

    They are single operations in C, which the first timer cannot interrupt.

    Args:
        sandbox: class `SandboxedEnvironment` of Jinja.
    """
    sandbox.default_binop_table = {**sandbox.default_binop_table, "**": _power, "*": _product}
    sandbox.intercepted_binops = frozenset({*sandbox.intercepted_binops, "**", "*"})


def _power(base: Any, exponent: Any) -> Any:
    # The result has about so many bits; 0 and 1 never grow.
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        _expect(abs(base).bit_length() * max(0, exponent) <= MAX_BITS)
    return base**exponent


def _product(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _expect(left.bit_length() + right.bit_length() <= MAX_BITS)
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
            _expect(len(value) * max(0, times) <= MAX_LENGTH)
    return left * right


def _expect(is_reasonable: bool) -> None:
    if not is_reasonable:
        raise OverflowError("it computes a number or a text of unreasonable size")
