"""Journal of one rank: JSON lines, appended by a thread.

A training step never waits for the disk: it puts a record into a bounded queue. Space for some
records is reserved, so that a full disk can still be reported: `step` records then wait and the
others are written. If the queue is full, too, the oldest `step` records are dropped and their
number is recorded later. Other records are never dropped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents.disk_space import give_back, hold_ahead

# Maximum number of queued records.
_CAPACITY = 10_000
# Bytes reserved beyond the end of the file: two hundred records. Steps leave half of them.
_HELD_BYTES = 64 << 10
# Time between two attempts to write to a full disk, in seconds.
_RETRY_S = 1.0
# Phases in which only the training loop gives signs of life.
_LOOP_PHASES = ("training", "evaluating")


class RankJournal:
    """Appends records to one file. Every method is safe in any thread."""

    def __init__(self, path: Path, capacity: int = _CAPACITY) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._capacity = capacity
        self._queue: deque[tuple[str, bytes]] = deque()
        self._num_lost = 0
        self._closing = False
        self._could_hold = False
        self._is_held()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, kind: str, **fields: Any) -> None:
        """Queue one record with the current `time_s`. A number that is not finite becomes null."""
        record = {"kind": kind, "time_s": time.time(), **fields}
        line = json.dumps({name: _finite(value) for name, value in record.items()}) + "\n"
        with self._changed:
            if len(self._queue) >= self._capacity:
                self._drop_oldest_step()
            self._queue.append((kind, line.encode("ascii")))
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Write the queued records; give up after `timeout_s` if the disk is full."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            give_back(self._file)

    def _drop_oldest_step(self) -> None:
        # Steps are the only records without a limit, and each resembles the next one.
        for place, (kind, _) in enumerate(self._queue):
            if kind == "step":
                del self._queue[place]
                self._num_lost += 1
                return

    def _run(self) -> None:
        while (line := self._next()) is not None:
            self._append(line)
            if self._num_lost and not self._queue:
                lost, self._num_lost = self._num_lost, 0
                self.write("warning", message=f"{lost} step records were lost.", hint="")

    def _next(self) -> bytes | None:
        with self._changed:
            while True:
                if not self._queue:
                    if self._closing:
                        return None
                    self._changed.wait()
                elif (place := self._find_writable()) is None:
                    self._changed.wait(_RETRY_S)
                else:
                    line = self._queue[place][1]
                    del self._queue[place]
                    return line

    def _find_writable(self) -> int | None:
        """Return the index of the next record; on a full disk, of the next that is not a step."""
        if self._is_held() or self._closing:
            return 0
        kinds = enumerate(kind for kind, _ in self._queue)
        return next((place for place, kind in kinds if kind != "step"), None)

    def _is_held(self) -> bool:
        """Return whether reserved space is left for all records; reserve more if possible."""
        held = hold_ahead(self._file, _HELD_BYTES) >= _HELD_BYTES // 2
        self._could_hold = self._could_hold or held
        return held or not self._could_hold  # some file systems cannot reserve

    def _append(self, line: bytes) -> None:
        while line:
            try:
                # A write to a nearly full disk may take only a part of the line.
                line = line[os.write(self._file, line) :]
            except OSError:  # disk full: the record waits, training does not
                time.sleep(_RETRY_S)


def _finite(value: Any) -> Any:
    # JSON has no infinity or NaN, and other readers refuse the way Python writes them.
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Heartbeat:
    """Small file that reports step and phase to the supervisor, overwritten in place.

    While the rank loads, measures, saves or waits, a thread writes it every two seconds. While it
    trains or evaluates, only the training loop does, so a hang in the middle of a step shows. Work
    that may take long, such as loading or saving, reports since when it waits for other ranks.
    """

    PERIOD_S = 2.0
    """Time between two writes of the thread, in seconds."""
    # Bytes of every record, so that one write replaces the whole record before.
    _WIDTH = 200

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._step = 0
        self._phase = "loading"
        self._forecast_step_s = 0.0
        self._waits_since_s: float | None = None
        self._generation = 0
        # Number of beats by the work itself, not by the thread.
        self._num_signs = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._write()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def beat(self, step: int, phase: str | None = None) -> None:
        """Report the number of finished steps and the current `phase`; None keeps the phase."""
        with self._lock:
            self._step = step
            self._phase = phase or self._phase
            self._num_signs += 1
            self._write()

    def forecast_step(self, step_s: float) -> None:
        """Report an expected step time with each beat, while no step has been timed."""
        with self._lock:
            self._forecast_step_s = round(step_s, 3)

    def join_generation(self, generation: int) -> None:
        """Report with each beat the generation of this rank's group; see `Group`."""
        with self._lock:
            self._generation = generation

    def touch(self) -> None:
        """Report that this rank is alive in the middle of a step."""
        with self._lock:
            self._num_signs += 1
            self._write()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Report that the work waits for other ranks inside the block.

        In phase `training` the silence of the loop shows it, so nothing is written.
        """
        if self._phase == "training" or self._waits_since_s is not None:  # or an outer block does
            yield
            return
        self._wait_since(round(time.monotonic(), 3))
        try:
            yield
        finally:
            self._wait_since(None)

    def _wait_since(self, time_s: float | None) -> None:
        with self._lock:
            self._waits_since_s = time_s
            self._write()

    def close(self) -> None:
        """End the thread; the last record stays."""
        self._ended.set()

    def _write(self) -> None:
        record = {
            "step": self._step,
            "phase": self._phase,
            "monotonic_s": time.monotonic(),
            # The name in files, which supervisors of earlier versions read, too.
            "foreseen_step_s": self._forecast_step_s,
            "waits_since_s": self._waits_since_s,
            "generation": self._generation,
            "num_signs": self._num_signs,
        }
        line = json.dumps(record).ljust(self._WIDTH - 1) + "\n"
        with contextlib.suppress(OSError):  # a full disk must not end the run
            # One write in place: readers always see a whole record, and no new space is needed.
            os.pwrite(self._file, line.encode("ascii"), 0)

    def _run(self) -> None:
        while not self._ended.wait(self.PERIOD_S):
            with self._lock:
                if self._phase not in _LOOP_PHASES or self._waits_since_s is not None:
                    self._write()
