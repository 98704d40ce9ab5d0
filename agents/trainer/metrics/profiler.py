"""Record a few steps with torch's profiler on request, as a Chrome trace.

Without a request this costs nothing: no hook, no thread, no profiler. A trace is written under a
hidden name and renamed when complete, so that half a trace is never fetched. Any failure (a full
disk, a driver that refuses) is written to the journal, and training continues.

The table of operations is made from the raw events, because torch's own `key_averages` takes 18
times as long (250,000 events: 14.5 s against 0.8 s) while all ranks stand still.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from agents.contract.run_layout import trace_name
from agents.shared.files.full_disk import describe_full
from agents.state import tells_full_disk
from agents.trainer.rank.journal import RankJournal

NUM_ROWS = 10
"""Number of operations in the journal's table."""
# Chrome traces shrink to a tenth at any level; this is the fastest such level.
_GZIP_LEVEL = 3
# Maximum length of an operation's name: those of C++ templates have thousands of letters.
_NAME_LETTERS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRow:
    """Cost of one operation or kernel in the recorded steps."""

    name: str
    count: int
    seconds: float
    """Time of the operation itself, without the operations that it called, in seconds."""
    share: float
    """Fraction of the time of all operations, 0 to 1."""


class TraceRecorder:
    """Records steps on one rank; all ranks start and end at the same steps."""

    def __init__(self, folder: Path, rank: int, device: torch.device, journal: RankJournal) -> None:
        self._folder = folder
        self._rank = rank
        self._device = device
        self._journal = journal
        self._profile: profile | None = None
        self._first_step = 0
        self._last_step = 0
        self._began_s = 0.0

    @property
    def is_on(self) -> bool:
        """True while steps are recorded, or should be but the profiler failed."""
        return self._last_step > 0

    def is_last(self, step: int) -> bool:
        """Return whether `step` ends the recording."""
        return self.is_on and step >= self._last_step

    def begin(self, first_step: int, num_steps: int) -> None:
        """Record `num_steps` from `first_step` on; a running recording is extended."""
        is_new = not self.is_on
        self._last_step = max(self._last_step, first_step + num_steps - 1)
        if not is_new:
            return
        self._first_step = first_step
        self._began_s = time.monotonic()
        try:
            self._profile = start_profile(self._device)
        except Exception as error:  # noqa: BLE001 - a trace must never end a training
            self._profile = None
            self._report_failure(error)

    def finish(self, step: int) -> None:
        """End the recording after `step`, write the trace, and report it in the journal."""
        made, self._profile = self._profile, None
        first_step, self._last_step = self._first_step, 0
        if made is None:
            return
        seconds = time.monotonic() - self._began_s
        try:
            made.stop()
            if step < first_step:
                raise RuntimeError("the run ended before a step could be recorded")
            name = trace_name(first_step, self._rank)
            size_bytes = write_trace(made, self._folder / name)
            rows = summarise(made)
        except Exception as error:  # noqa: BLE001 - a trace must never end a training
            self._report_failure(error)
            return
        self._journal.write(
            "trace",
            first_step=first_step,
            last_step=step,
            seconds=seconds,
            file=name,
            size_bytes=size_bytes,
            top=[asdict(row) for row in rows],
        )

    def _report_failure(self, error: Exception) -> None:
        if tells_full_disk(error):
            message = (
                f"{describe_full(self._folder)[0]}: no trace could be written to {self._folder}."
            )
        else:
            message = f"{type(error).__name__}: {error}"
        self._journal.write("trace_failed", first_step=self._first_step, message=message)


def start_profile(device: torch.device) -> profile:
    """Return a profiler that records the CPU and the device from now on."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    made = profile(activities=activities)
    with warnings.catch_warnings():
        # There is only one cycle. `acc_events` would also silence torch, but then a trace that does
        # not fit on the disk would stay open after its deletion, and keep the disk full.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        made.start()
    return made


def write_trace(made: profile, path: Path) -> int:
    """Write a gzipped Chrome trace; return its size in bytes.

    Raises:
        OSError, RuntimeError: it could not be written; no part of it remains.
    """
    # A folder, since on a full disk the profiler leaves other files next to the trace.
    scratch = path.with_name(f".{path.name}")
    plain, packed = scratch / "plain.json", scratch / "packed.gz"
    try:
        scratch.mkdir()
        made.export_chrome_trace(str(plain))
        _expect_complete(plain)
        with plain.open("rb") as source, gzip.open(packed, "wb", _GZIP_LEVEL) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.rename(path)
    finally:
        # Traces are large, so no part may remain after an error.
        shutil.rmtree(scratch, ignore_errors=True)
    return path.stat().st_size


def _expect_complete(path: Path) -> None:
    """Check the end of the trace, because the profiler ignores write errors.

    Raises:
        RuntimeError: the trace is incomplete.
    """
    end = b""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        end = file.read().rstrip()
    if not end.endswith(b"}"):
        free_bytes = shutil.disk_usage(path.parent).free
        raise RuntimeError(
            f"the profiler could not write a complete trace to {path.parent.parent}, "
            f"where {free_bytes} bytes are free now"
        )


def summarise(made: profile) -> list[ProfileRow]:
    """Return the longest work: kernels if a GPU was recorded, otherwise operations of the CPU."""
    results: Any = made.profiler
    events = results.kineto_results.events()
    # Work on a GPU, without the spans that name the host operations that started it.
    busy = [
        event
        for event in events
        if event.device_type() != DeviceType.CPU and not event.is_user_annotation()
    ]
    if busy:
        return rank_rows((event.name(), event.duration_ns()) for event in busy)
    operations = [
        (event.start_thread_id(), event.start_ns(), event.duration_ns(), event.name())
        for event in events
    ]
    return rank_rows(own_times(operations))


def own_times(operations: Iterable[tuple[int, int, int, str]]) -> list[tuple[str, int]]:
    """Return name and own nanoseconds of each operation, without those called inside it.

    Args:
        operations: thread, start, duration and name of each, in any order.

    >>> own_times([(1, 10, 30, "inner"), (1, 0, 100, "outer"), (2, 0, 5, "other")])
    [('inner', 30), ('outer', 70), ('other', 5)]
    """
    own: list[tuple[str, int]] = []
    open_calls: list[list[Any]] = []  # thread, end, name, own time: a stack of calls
    for thread, start, duration, name in sorted(operations, key=lambda o: (o[0], o[1], -o[2])):
        while open_calls and (open_calls[-1][0] != thread or open_calls[-1][1] <= start):
            own.append((open_calls[-1][2], open_calls.pop()[3]))
        if open_calls:
            open_calls[-1][3] -= duration
        open_calls.append([thread, start + duration, name, duration])
    own += [(name, rest) for _, _, name, rest in reversed(open_calls)]
    return own


def rank_rows(times: Iterable[tuple[str, int]]) -> list[ProfileRow]:
    """Return the operations that took the most time in total, longest first.

    >>> [(row.name, row.count, row.share) for row in rank_rows([("a", 1), ("b", 6), ("a", 1)])]
    [('b', 1, 0.75), ('a', 2, 0.25)]
    """
    total_ns: defaultdict[str, int] = defaultdict(int)
    count: defaultdict[str, int] = defaultdict(int)
    for name, own_ns in times:
        total_ns[name] += max(0, own_ns)
        count[name] += 1
    whole_ns = sum(total_ns.values()) or 1
    longest = sorted(total_ns, key=lambda name: -total_ns[name])[:NUM_ROWS]
    return [
        ProfileRow(
            name=name[:_NAME_LETTERS],
            count=count[name],
            seconds=total_ns[name] / 1e9,
            share=total_ns[name] / whole_ns,
        )
        for name in longest
    ]
