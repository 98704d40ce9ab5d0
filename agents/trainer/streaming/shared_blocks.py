"""One copy of the frozen layers for all ranks of a PC, in memory that each of them maps.

The memory is a file without a name (`memfd_create`): unlike /dev/shm it has no limit, and it
disappears with the last process that uses it, even a killed one. The first rank creates it, and
records how others open it: through its own entries in /proc. Each layer has a slot there, of which
only filled pages take memory. The rank that has claimed a layer (`LayerClaims`) fills its slot and
then marks it; the others use its content.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.errors import ExpectedError
from agents.state import locked, read_json, write_json
from agents.trainer.streaming.layout import PAGE_BYTES

# Time to wait for another rank that creates the memory, in seconds.
_PATIENCE_S = 10.0


class SharedBlocks:
    """Blocks of the layers of one model, by index.

    Args:
        file: descriptor of the memory, which stays open for the life of the process, since others
            open it.
        places: indices of the layers.
        slot_bytes: limit of the size of a block, in bytes.
        budget_bytes: host memory that all blocks may take, in bytes.
    """

    def __init__(
        self, file: int, places: Sequence[int], slot_bytes: int, budget_bytes: int
    ) -> None:
        self._file = file
        self._slots = {place: number for number, place in enumerate(places)}
        self._slot_bytes = _to_pages(slot_bytes)
        self._marks_bytes = _to_pages(len(places))
        # Every rank does this with the same size, so none depends on who comes first.
        os.ftruncate(file, self._marks_bytes + len(places) * self._slot_bytes)
        self._marks = self._map(0, self._marks_bytes)
        self.budget_bytes = budget_bytes
        """Host memory that all blocks may take, in bytes."""

    @property
    def first_page(self) -> Tensor:
        """A page (num_bytes,) of this memory, to test operations such as pinning."""
        return self._marks[:PAGE_BYTES]

    def take(self, place: int, num_bytes: int) -> Tensor | None:
        """Return the page-aligned block (num_bytes,) of a layer, uint8; None if it is too large."""
        if num_bytes > self._slot_bytes:
            return None
        return self._map(self._marks_bytes + self._slots[place] * self._slot_bytes, num_bytes)

    def is_filled(self, place: int) -> bool:
        """Return whether a rank has filled the block of a layer."""
        return bool(self._marks[self._slots[place]])

    def mark_filled(self, place: int) -> None:
        """Let other ranks use the block of a layer in its current state."""
        self._marks[self._slots[place]] = 1

    def _map(self, start: int, num_bytes: int) -> Tensor:
        # The tensor keeps the mapping alive.
        return torch.frombuffer(
            mmap.mmap(self._file, _to_pages(num_bytes), offset=start), dtype=torch.uint8
        )[:num_bytes]


def join_blocks(
    path: Path, places: Sequence[int], slot_bytes: int, choose_budget: Callable[[], int]
) -> SharedBlocks | None:
    """Return the memory that the ranks of this PC share; the first rank creates it.

    Args:
        path: file of the attempt by which ranks find it.
        places: indices of the layers.
        slot_bytes: limit of the size of a layer's block, in bytes.
        choose_budget: returns the host memory that all blocks may take, in bytes.

    Returns:
        None if this rank cannot share memory, or others share it for other layers.
    """
    wanted = {"places": list(places), "slot_bytes": slot_bytes}
    try:
        with locked(path.with_suffix(".lock"), _PATIENCE_S, "another rank makes this memory"):
            file, about = _open(path) or _make(path, wanted, choose_budget())
        # Ranks with other layers cannot share.
        if {name: about[name] for name in wanted} != wanted:
            os.close(file)
            return None
        return SharedBlocks(file, places, slot_bytes, int(about["budget_bytes"]))
    except (OSError, ExpectedError):
        return None


def _make(path: Path, wanted: dict[str, Any], budget_bytes: int) -> tuple[int, dict[str, Any]]:
    """Create the memory; return its descriptor, and the record for other ranks.

    Raises:
        OSError: it cannot be created.
        ExpectedError: the disk cannot store the record.
    """
    name = secrets.token_hex(8)
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    about = {**wanted, "budget_bytes": budget_bytes, "name": name, "pid": os.getpid(), "file": file}
    write_json(path, about)
    return file, about


def _open(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Return descriptor and record of a block that another rank created, or None if it is gone.

    Raises:
        OSError: it exists, but this process may not use it.
    """
    about = read_json(path)
    if about is None:
        return None
    try:
        file = os.open(f"/proc/{about['pid']}/fd/{about['file']}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    # Another process may have reused the id of a dead one.
    if os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{about['name']}"):
        return file, about
    os.close(file)
    return None


def _to_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
