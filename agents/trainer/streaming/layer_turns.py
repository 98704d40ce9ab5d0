"""Divide the making of layers among the ranks of one PC, whoever comes first.

Each layer that is kept in a file, or in memory that ranks share, is claimed before it is read or
made. A rank first makes what is missing and nobody has claimed, from a place of its own on, then
reads what others have made. Claims are locks of the kernel, so they end with the process that holds
them; whoever waits for a process that hangs makes the layer itself after a while. Two that make the
same layer do no harm: a file appears whole, and memory is filled with the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Seconds without any progress after which a layer is made although another process has claimed it:
# more than the largest layer takes from a slow disk.
_PATIENCE_S = 300.0
# Seconds between two attempts to claim a layer.
_POLL_S = 0.1
_BUSY = (errno.EACCES, errno.EAGAIN)


class LayerClaims:
    """Claims of the layers of one model: each is a lock of one byte of a file, at its index.

    Args:
        path: Of the file; claims always succeed where it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self._file = -1

    def take(self, place: int) -> bool:
        """Claim a layer; return False if another process has."""
        if self._file < 0:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            return error.errno not in _BUSY  # others: this file system knows no locks
        return True

    def close(self) -> None:
        """Give up all claims."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def give_back(self, place: int) -> None:
        """Give up a claim, if there is one."""
        if self._file >= 0:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)


def take_turns(
    claims: LayerClaims,
    places: Sequence[int],
    share: float,
    is_common: Callable[[int], bool],
    is_there: Callable[[int], bool],
    report: Callable[[int, int], None],
) -> Iterator[int]:
    """Yield each layer once, at a time when no other process of this PC works on it.

    Args:
        claims: Of the layers; closed at the end.
        places: Their indices.
        share: Where among them to begin, 0 to 1: ranks of one PC begin at different ones.
        is_common: Returns whether other ranks use what is made; asked again as layers are made.
        is_there: Returns whether such a layer has been made.
        report: Called with the number of layers that are done and of all, also while waiting.

    Raises:
        PeerLost: from `report`, where that notices it.
    """
    first = int(share * len(places))
    left = [*places[first:], *places[:first]]
    try:
        missing = {place for place in left if is_common(place) and not is_there(place)}
        since_s = time.monotonic()
        while left:
            report(len(places) - len(left), len(places))
            place = _choose(claims, left, missing, is_common, is_there)
            if place is None:
                if time.monotonic() - since_s < _PATIENCE_S:
                    time.sleep(_POLL_S)
                    continue
                place = left[0]
            yield place
            claims.give_back(place)
            left.remove(place)
            since_s = time.monotonic()
        report(len(places), len(places))
    finally:
        claims.close()


def _choose(
    claims: LayerClaims,
    left: Sequence[int],
    missing: set[int],
    is_common: Callable[[int], bool],
    is_there: Callable[[int], bool],
) -> int | None:
    """Return a layer that was claimed: one to make before those to read; None: others have all."""
    for place in [one for one in left if one in missing]:
        if claims.take(place):
            if not is_there(place):
                return place
            missing.discard(place)  # another rank has made it
            claims.give_back(place)
    ready = (one for one in left if one not in missing)
    return next((one for one in ready if not is_common(one) or claims.take(one)), None)
