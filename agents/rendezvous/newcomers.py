"""Callers of a port that have not proved yet who they are, so that idle ones close it for no one.

Anyone in the network can open connections and say nothing. Each address has a few places until its
handshake is done; one more caller takes the place of the oldest one, which has likely nothing to
say. So the newest caller always gets its chance, and known callers are counted elsewhere.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable


class Newcomers:
    """Unknown callers with limits, in all and per address. Thread-safe.

    >>> ended = []
    >>> callers = Newcomers(most=3, most_per_address=2)
    >>> for address in ("a", "a", "a", "b", "c"):
    ...     place = callers.admit(address, lambda address=address: ended.append(address))
    >>> ended, callers.leave(place), callers.leave(place)
    (['a', 'a'], True, False)
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._callers: dict[object, tuple[str, Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def admit(self, address: str, end: Callable[[], None]) -> object:
        """Give a caller a place and return it; `end` ends the caller if another one needs it."""
        place = object()
        with self._lock:
            doomed = self._find_oldest(address)
            end_it = self._callers.pop(doomed)[1] if doomed is not None else None
            self._callers[place] = (address, end)
        if end_it is not None:
            end_it()
        return place

    def _find_oldest(self, address: str) -> object | None:
        """Return the place that a new caller of `address` takes over, or None if one is free."""
        counts = Counter(other for other, _ in self._callers.values())
        if counts[address] < self._most_per_address:
            if len(self._callers) < self._most:
                return None
            # Whoever has opened the most connections loses one.
            address = max(counts, key=lambda other: counts[other])
        return next(place for place, (other, _) in self._callers.items() if other == address)

    def leave(self, place: object) -> bool:
        """Free a place; return False if the caller was ended meanwhile."""
        with self._lock:
            return self._callers.pop(place, None) is not None

    def end_all(self) -> None:
        """End all callers."""
        with self._lock:
            callers, self._callers = list(self._callers.values()), {}
        for _, end in callers:
            end()
