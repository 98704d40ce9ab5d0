"""The ring: the last ten minutes of samples in one file of fixed size.

The file is allocated completely at the start, so that a full disk cannot stop the telemetry that
reports it. Slot 0 is the header; slot 1 + seq % NUM_SLOTS holds sample `seq` as `CRC32 JSON`. No
lock is needed: a reader that hits a half-written slot sees a wrong checksum and reads again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents.contract.node import Sample
from agents.contract.wire import to_wire
from agents.errors import explain_os_error

NUM_SLOTS = 600
"""Number of samples in the ring, at one per second."""
HOST_BYTES = 1024
"""Space for the host's part of a sample, in bytes."""
GPU_BYTES = 1024
"""Space for one GPU in a sample, including process ids, in bytes; a longer sample is dropped."""


class RingWriter:
    """Writer of the ring, in one process only; it continues after the newest sample."""

    def __init__(self, path: Path, num_gpus: int) -> None:
        slot_bytes = HOST_BYTES + GPU_BYTES * num_gpus
        # Sequence numbers continue after a restart, so that readers can go by them.
        newest = RingReader(path).read_newest_seq()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _read_header(self._file) != {"slot_bytes": slot_bytes, "num_slots": NUM_SLOTS}:
                self._format(slot_bytes)
        except OSError as error:
            raise explain_os_error(error, f"making {path}") from error
        self._slot_bytes = slot_bytes
        self.next_seq = newest + 1

    def append(self, sample: Sample) -> None:
        """Store `sample`, whose seq must be `next_seq`."""
        data = json.dumps(to_wire(sample), separators=(",", ":")).encode("ascii")
        record = _seal(data)
        if len(record) <= self._slot_bytes:
            place = 1 + sample.seq % NUM_SLOTS
            os.pwrite(self._file, record.ljust(self._slot_bytes, b" "), place * self._slot_bytes)
            # After the sample, so that a reader never sees a seq before its slot is written.
            # The newest seq is in slot 0, behind the 256 bytes of the header.
            os.pwrite(self._file, _seal(b"%d" % sample.seq).ljust(64, b" "), 256)
        # Also after a dropped sample: a reader sees a missing number and skips it.
        self.next_seq = sample.seq + 1

    def _format(self, slot_bytes: int) -> None:
        # Samples of another slot size are unreadable now.
        os.ftruncate(self._file, 0)
        # Real blocks instead of a hole, so that later writes need no more space.
        os.posix_fallocate(self._file, 0, slot_bytes * (NUM_SLOTS + 1))
        header = json.dumps({"slot_bytes": slot_bytes, "num_slots": NUM_SLOTS})
        os.pwrite(self._file, _seal(header.encode("ascii")).ljust(256, b" "), 0)


class RingReader:
    """Reader of the ring while another process writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._slot_bytes = 0

    def read_newest_seq(self) -> int:
        """Return the seq of the newest sample, or 0 for an empty ring."""
        if self._file is None and not self._open():
            return 0
        assert self._file is not None
        data = _unseal(os.pread(self._file, 64, 256))
        return int(data) if data and data.isdigit() else 0

    def read(self, seq: int) -> dict[str, Any] | None:
        """Return one sample in its wire form, or None if it is overwritten or damaged."""
        if self._file is None:
            return None
        place = (1 + seq % NUM_SLOTS) * self._slot_bytes
        data = _unseal(os.pread(self._file, self._slot_bytes, place))
        value = json.loads(data) if data else None
        # The writer may have wrapped around and put a newer sample into this slot.
        return value if isinstance(value, dict) and value.get("seq") == seq else None

    def read_since(self, time_s: float) -> Iterator[dict[str, Any]]:
        """Yield the samples after this wall-clock time, oldest first."""
        newest = self.read_newest_seq()
        for seq in range(max(1, newest - NUM_SLOTS + 1), newest + 1):
            sample = self.read(seq)
            if sample is not None and sample["time_s"] > time_s:
                yield sample

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> bool:
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        header = _read_header(file)
        if header is None:
            os.close(file)
            return False
        self._file, self._slot_bytes = file, header["slot_bytes"]
        return True


def _read_header(file: int) -> dict[str, int] | None:
    data = _unseal(os.pread(file, 256, 0))
    value = json.loads(data) if data else None
    return value if isinstance(value, dict) and "slot_bytes" in value else None


def _seal(data: bytes) -> bytes:
    return b"%08x " % zlib.crc32(data) + data + b"\n"


def _unseal(record: bytes) -> bytes | None:
    data = record[9:].rstrip(b" \0").removesuffix(b"\n")
    return data if data and record[:9] == b"%08x " % zlib.crc32(data) else None
