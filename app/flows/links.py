"""Links between nodes as a matrix: from the row's node to the column's, as last measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.events import LinkSnapshot
from app.telemetry.state import Status
from app.text import DASH, count_of, show_moment

SLOW_BYTES_PER_S = 30e6
"""Bandwidth below which a link is slow: much slower than Gigabit Ethernet, in bytes/s."""
SLOW_ROUND_TRIP_S = 0.005
"""Round trip above which a link is slow, in seconds."""

ITSELF = Status("calm", DASH)
NOT_MEASURED = Status("calm", "not measured")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRow:
    """All links from one node."""

    node: str
    cells: Mapping[str, Status]
    """Peer -> bandwidth and round trip."""


def make_matrix(names: Sequence[str], links: Sequence[LinkSnapshot]) -> tuple[LinkRow, ...]:
    """Return one row for each node, with a cell for each node."""
    known = {(link.node, link.peer): link for link in links}

    def cell(node: str, peer: str) -> Status:
        if node == peer:
            return ITSELF
        link = known.get((node, peer))
        return NOT_MEASURED if link is None else describe_link(link)

    return tuple(
        LinkRow(node=node, cells={peer: cell(node, peer) for peer in names}) for node in names
    )


def describe_link(link: LinkSnapshot) -> Status:
    """Describe the speed of a link; the tone is a warning if it slows training down.

    >>> describe_link(LinkSnapshot(
    ...     node="a", peer="b", round_trip_s=0.0004, bytes_per_s=117e6, measured_s=0.0))
    Status(tone='good', text='117 MB/s, 0.40 ms')
    """
    parts = [] if link.bytes_per_s is None else [f"{link.bytes_per_s / 1e6:.0f} MB/s"]
    is_slow = link.round_trip_s > SLOW_ROUND_TRIP_S
    is_slow = is_slow or (link.bytes_per_s is not None and link.bytes_per_s < SLOW_BYTES_PER_S)
    parts.append(f"{link.round_trip_s * 1000:.2f} ms")
    return Status("warning" if is_slow else "good", ", ".join(parts))


def summarise(names: Sequence[str], links: Sequence[LinkSnapshot], now_s: float) -> str:
    """Summarise which links are measured, how old that is, and what to do about the others."""
    if len(names) < 2:
        return "Add a second node to measure the link between them."
    ours = [link for link in links if link.node in names and link.peer in names]
    # Each direction is a link of its own: speeds may differ.
    missing = len(names) * (len(names) - 1) - len(ours)
    if not ours:
        return "No links measured yet. Measuring takes a few seconds."
    oldest = show_moment(min(link.measured_s for link in ours), now_s)
    slow = sum(describe_link(link).tone == "warning" for link in ours)
    words = f"Speed and round trip from row to column, measured {oldest}"
    if missing:
        words += f"; {count_of(missing, 'link')} not measured"
    if slow:
        words += f"; {count_of(slow, 'link')} much slower than Gigabit Ethernet"
    return f"{words}."
