"""Divide the preparation of layers among the ranks of one PC, first come, first served.

Each layer that is kept in a file, or in memory that ranks share, is claimed before it is read or
prepared. A rank first prepares layers that are missing and unclaimed, from a different start than
other ranks, then reads layers that others have prepared. Claims are locks of the kernel, so they
end with the process that holds them; a rank that waits for a hanging process prepares the layer
itself after a while. Two ranks that prepare the same layer do no harm: a file appears atomically,
and memory is filled with the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Time without progress after which a claimed layer is prepared anyway, in seconds: more than the
# largest layer takes from a slow disk.
_PATIENCE_S = 300.0
# Time between two attempts to claim a layer, in seconds.
_POLL_S = 0.1
_BUSY = (errno.EACCES, errno.EAGAIN)


class LayerClaims:
    """Claims of the layers of one model: each is a lock of one byte of a file, at its index.

    Args:
        path: path of the file; claims always succeed if it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self._file = -1

    def take(self, place: int) -> bool:
        """Claim a layer; return False if another process has claimed it."""
        if self._file < 0:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            return error.errno not in _BUSY  # others: this file system has no locks
        return True

    def close(self) -> None:
        """Release all claims."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def give_back(self, place: int) -> None:
        """Release a claim, if it is held."""
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
    """Yield each layer once, when no other process of this PC works on it.

    Args:
        claims: claims of the layers; closed at the end.
        places: indices of the layers.
        share: start among them, 0 to 1, different for each rank of a PC.
        is_common: returns whether other ranks use the layer; asked again as layers are prepared.
        is_there: returns whether such a layer is prepared.
        report: called with the number of finished layers and of all layers, also while waiting.

    Raises:
        PeerLost: raised by `report`.
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
                # Its owner hangs: this rank prepares the layer itself.
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
    """Return a claimed layer, missing ones before those to read; None if others have all."""
    for place in [each for each in left if each in missing]:
        if claims.take(place):
            if not is_there(place):
                return place
            missing.discard(place)  # another rank has prepared it
            claims.give_back(place)
    ready = (each for each in left if each not in missing)
    return next((each for each in ready if not is_common(each) or claims.take(each)), None)
