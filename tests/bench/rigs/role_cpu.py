"""CPU time of all processes in network namespaces, of those too that end on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLE_S = 0.1
"""Time between two samples, in seconds; what a process uses after its last one is not counted."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """Context manager: sums up CPU time, user and system, from its start to its end.

    What the kernel does on behalf of nobody, such as writing pages back to disk, does not count.
    """

    def __init__(self, namespaces: Mapping[str, str]) -> None:
        """`namespaces`: names in /run/netns, by whatever they are to be called in `seconds`."""
        self.seconds: dict[str, float] = dict.fromkeys(namespaces, 0.0)
        """CPU seconds, by the same names; complete at the end of the block."""
        self._names = {os.stat(f"/run/netns/{ns}").st_ino: name for name, ns in namespaces.items()}
        # By pid: its namespace and the ticks before the block began. A pid is not reused so soon.
        self._before: dict[int, tuple[int, int]] = {}
        self._ticks: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._sample(is_first=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._sample()
        for pid, (namespace, before) in self._before.items():
            if namespace in self._names:
                spent = self._ticks[pid] - before
                self.seconds[self._names[namespace]] += spent / _TICKS_PER_S

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._sample()

    def _sample(self, *, is_first: bool = False) -> None:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            pid = int(entry.name)
            try:
                if pid not in self._before:
                    namespace = os.stat(entry / "ns" / "net").st_ino
                    self._before[pid] = (namespace, read_ticks(pid) if is_first else 0)
                if self._before[pid][0] in self._names:
                    self._ticks[pid] = read_ticks(pid)
            except OSError:
                continue  # it has ended


def read_ticks(pid: int) -> int:
    """Return the CPU time of a process and all of its threads, in clock ticks.

    Raises:
        OSError: it has ended.
    """
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])
