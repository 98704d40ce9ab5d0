"""One fault on its place: what it may touch, and when it struck."""

from __future__ import annotations

import contextlib
import time

from tests.campaign.draw import Drawn
from tests.campaign.processes import find_part
from tests.campaign.site import Site, Stuck
from tests.cluster.namespaces import Node


class Case:
    """One fault that strikes a run."""

    def __init__(self, site: Site, drawn: Drawn, number: int) -> None:
        self.site = site
        self.number = number
        self.drawn = drawn
        self.node: Node = site.nodes[drawn.node]
        self.rank = drawn.node  # one CPU rank per node, in their order
        self.run_id = ""
        self.breaks: list[str] = []
        self.ending = contextlib.ExitStack()
        """What ends all that the fault keeps running, also if it fails or never strikes."""
        self.began_s = time.time()
        self.fault_s = 0.0
        """Time at which the fault struck, in seconds since the epoch; 0: it has not."""
        self.ended_s = 0.0
        """Time at which the fault was over, in seconds since the epoch."""

    @property
    def others(self) -> list[Node]:
        return [node for node in self.site.nodes if node is not self.node]

    @property
    def victim(self) -> dict[str, str]:
        """Words that name the victim, as an expectation's words stand for them."""
        return {"node": self.node.name, "rank": str(self.rank)}

    def find(self, part: str) -> list[int]:
        """Return the processes of this kind on the victim.

        Raises:
            Stuck: it has none, so that the fault would strike nothing.
        """
        found = find_part(self.site.cluster, self.node, part)
        if not found:
            raise Stuck(f"{self.node.name} has no {part} to strike")
        return found

    def strike(self) -> None:
        """Do the fault and, after its time, undo it."""
        fault = self.drawn.fault
        self.fault_s = time.time()
        is_done = False
        try:
            fault.do(self)
            is_done = True
            time.sleep(fault.lasts_s)
        finally:
            # One that failed in the middle is undone as far as it came.
            with contextlib.suppress(*(() if is_done else (Exception,))):
                fault.undo(self)
            self.ended_s = time.time()
