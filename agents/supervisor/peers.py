"""Find out which other node of an attempt has gone, when ranks here lost it or wait for it.

Without a master nobody else can say so. A living PC answers a connection on any port, by taking or
by refusing it; one that is off, or behind a cut cable, does neither. Two ports are tried, since a
firewall may drop what comes for one.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from agents.contract.run import AttemptIntent

PATIENCE_S = 4.0
"""Time for an answer, in seconds: Linux needs 3 s to find that no PC has an address."""
SSH_PORT = 22


def find_silent_peers(intent: AttemptIntent) -> tuple[str, ...]:
    """Return the other nodes of the attempt that do not answer at their addresses, in order."""
    others = {name: address for name, address in intent.addresses.items() if name != intent.node}
    probes = [(a, port) for a in others.values() for port in (SSH_PORT, intent.master_port)]
    if not probes:
        return ()
    with ThreadPoolExecutor(len(probes)) as pool:
        answers = dict(zip(probes, pool.map(_answers, probes), strict=True))
    found = {address for (address, _), answer in answers.items() if answer}
    return tuple(name for name, address in others.items() if address not in found)


def find_unreachable(intent: AttemptIntent) -> tuple[str, ...]:
    """Return the same by one port each, for questions that are repeated.

    It is the port of the ranks' store, which its owner takes and any other PC refuses: sshd counts
    callers that do not log in, and would shut out the master if that is one of the nodes.
    """
    others = {name: address for name, address in intent.addresses.items() if name != intent.node}
    doors = [(address, intent.master_port) for address in others.values()]
    with ThreadPoolExecutor(max(1, len(doors))) as pool:
        answers = list(pool.map(_answers, doors))
    return tuple(name for name, answer in zip(others, answers, strict=True) if not answer)


def _answers(door: tuple[str, int]) -> bool:
    try:
        socket.create_connection(door, PATIENCE_S).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
    return True
