"""Find unreachable nodes, and distinguish a network outage from ranks that hang.

While ranks wait or load, the supervisor probes the other nodes of the attempt. If one does not
answer, the ranks may wait for it, for as long as the user has chosen (`outage_s`). Once all answer
again, the ranks get as much time again as the outage lasted, because the kernel doubles its
retransmission timeout with each try.

A living PC answers a TCP connection to any port, by accepting or refusing it; a PC that is off or
disconnected does neither.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from agents.contract.run import AttemptIntent

PROBE_TIMEOUT_S = 4.0
"""Maximum time for an answer, in seconds; Linux needs 3 s to find that no PC has an address."""
SSH_PORT = 22
ASKED_AFTER_S = (1.0, 5.0)
"""Shortest and longest wait of a rank before the other nodes are probed, in seconds; between these,
half of the outage time that the user has chosen."""
PAUSE_S = 2.0
"""Time between two probes, in seconds."""
RECOVERY_S = 10.0
"""Minimum time for ranks to continue after an outage, in seconds."""


def find_silent_peers(intent: AttemptIntent) -> tuple[str, ...]:
    """Return the other nodes of the attempt that do not answer at their addresses, in order."""
    others = {name: address for name, address in intent.addresses.items() if name != intent.node}
    # Two ports, because a firewall may drop the packets to one of them.
    probes = [(a, port) for a in others.values() for port in (SSH_PORT, intent.master_port)]
    if not probes:
        return ()
    with ThreadPoolExecutor(len(probes)) as pool:
        answers = dict(zip(probes, pool.map(_answers, probes), strict=True))
    found = {address for (address, _), answer in answers.items() if answer}
    return tuple(name for name, address in others.items() if address not in found)


def find_unreachable(intent: AttemptIntent) -> tuple[str, ...]:
    """Return the same as `find_silent_peers`, with one probe per node, for repeated use."""
    others = {name: address for name, address in intent.addresses.items() if name != intent.node}
    # The port of the store: rank 0's node accepts, the others refuse. Not the SSH port: sshd counts
    # connections without a login and would lock out the master if it runs on one of these nodes.
    doors = [(address, intent.master_port) for address in others.values()]
    with ThreadPoolExecutor(max(1, len(doors))) as pool:
        answers = list(pool.map(_answers, doors))
    return tuple(name for name, answer in zip(others, answers, strict=True) if not answer)


def _answers(door: tuple[str, int]) -> bool:
    try:
        socket.create_connection(door, PROBE_TIMEOUT_S).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True  # a refusal comes from a living kernel
    except OSError:
        return False
    return True


class OutageWatch:
    """Watch over the reachability of the other nodes; it probes in a thread while ranks wait."""

    def __init__(
        self,
        intent: AttemptIntent,
        ask: Callable[[AttemptIntent], tuple[str, ...]] = find_unreachable,
    ) -> None:
        self._intent = intent
        self._ask = ask
        self._asked_after_s = sorted((*ASKED_AFTER_S, intent.outage_s / 2))[1]  # clamped
        self._thread: threading.Thread | None = None
        self._answer: tuple[str, ...] | None = None
        self._due_s = 0.0
        self.silent: tuple[str, ...] = ()
        """Nodes that did not answer the last probe."""
        self.is_known = not intent.addresses
        """True if a probe has ended since ranks began to wait, or none is possible."""
        self._healed_s: float | None = None
        self._outage_s = 0.0
        # Time at which all nodes last answered, or at which the wait for them began.
        self._heard_s: float | None = None

    def look(self, waits_s: float, now_s: float, *, is_loading: bool = False) -> None:
        """Use the result of the last probe, and probe again while ranks wait or load.

        Args:
            waits_s: longest current wait of any rank for its peers, in seconds (0 if none).
            now_s: time on the monotonic clock, in seconds.
            is_loading: True before the first step: a rank may load for long before it waits for a
                node that is gone.
        """
        is_asked = is_loading or waits_s >= self._asked_after_s
        if not is_asked or not self._intent.addresses:
            self.silent, self._healed_s, self._answer, self._heard_s = (), None, None, None
            self.is_known = not self._intent.addresses
            return
        if self._heard_s is None:
            self._heard_s = now_s - waits_s
        # A probe may last for its timeout, and the supervisor must not be blocked by it.
        if self._thread is not None and self._thread.is_alive():
            return
        answer, self._answer = self._answer, None
        self.is_known = self.is_known or answer is not None
        if answer:
            self.silent, self._healed_s = answer, None
        elif answer is not None and self.silent:
            self.silent, self._healed_s, self._outage_s = (), now_s, now_s - self._heard_s
        if answer == ():
            self._heard_s = now_s
        if now_s >= self._due_s:
            self._due_s = now_s + PAUSE_S
            self._thread = threading.Thread(target=self._find, name="outages", daemon=True)
            self._thread.start()

    def excuses(self, waits_s: float, now_s: float) -> bool:
        """Return whether a rank that has waited for `waits_s` may continue to wait."""
        if self.silent:
            # A rank may have waited long for a slow node before that one was lost.
            return min(waits_s, self.measure(now_s)) < self._intent.outage_s
        if self._healed_s is None:
            return False
        return now_s - self._healed_s < max(RECOVERY_S, min(self._outage_s, self._intent.outage_s))

    def forgive(self, now_s: float) -> None:
        """Count the silence of nodes from now on: another probe has found that they answer."""
        self._heard_s = now_s

    def measure(self, now_s: float) -> float:
        """Return the time for which a node has not answered, in seconds; 0 if all do."""
        return now_s - self._heard_s if self.silent and self._heard_s is not None else 0.0

    def _find(self) -> None:
        self._answer = self._ask(self._intent)
