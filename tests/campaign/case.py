"""One case: a run, a fault, and what came of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.campaign.draw import Drawn
from tests.campaign.history import Damage, Step, compare, find_return_s, read_load_s
from tests.campaign.keeper import Line
from tests.campaign.processes import find_part, wait_for_none
from tests.campaign.site import Site, Stuck, wait_until
from tests.campaign.verdict import ALARMS, Finding, find_name, judge
from tests.cluster.namespaces import ClusterError, Node

START_S = 240.0
"""Time for a run to get to the step of its fault, in seconds: PCs that share cores are slow."""
END_S = 240.0
"""Time for a run to heal and end after its fault, in seconds."""
SETTLE_S = 60.0
"""Time for processes to end after the run, such as those of a node that came back, in seconds."""


class Case:
    """A run under attack."""

    def __init__(self, site: Site, drawn: Drawn, number: int, undisturbed: Sequence[Step]) -> None:
        self.site = site
        self.number = number
        self.drawn = drawn
        self.node: Node = site.nodes[drawn.node]
        self.rank = drawn.node  # one CPU rank per node, in their order
        self.run_id = ""
        self.breaks: list[str] = []
        self._undisturbed = undisturbed
        self._began_s = time.time()
        self._fault_s = 0.0
        self._load_s = 0.0

    @property
    def others(self) -> list[Node]:
        return [node for node in self.site.nodes if node is not self.node]

    def find(self, part: str) -> list[int]:
        """Return the processes of this kind on the victim."""
        return find_part(self.site.cluster, self.node, part)

    def play(self) -> Finding:
        """Start the run, do the fault, wait for the end, and judge."""
        fault, site = self.drawn.fault, self.site
        is_done = False
        state = "not started"
        steps: list[Step] = []
        try:
            fault.prepare(self)
            self.run_id = self._start()
            site.wait_for_step(self.run_id, self.drawn.at_step, START_S)
            self._fault_s = time.time()
            fault.do(self)
            is_done = True
            time.sleep(fault.lasts_s)
            fault.undo(self)
            is_done = False
            state = site.wait_for_end(self.run_id, END_S)
        except (Stuck, ClusterError, OSError, AssertionError, subprocess.SubprocessError) as error:
            self.breaks.append(f"{type(error).__name__}: {error}")
        finally:
            if is_done:
                fault.undo(self)
        if self.run_id:
            state = state if state == "done" else site.run_state(self.run_id)
            steps = site.steps(self.run_id)
            folders = [site.run_folder(node, self.run_id) for node in site.nodes]
            took_over = min((step.attempt for step in steps if step.attempt > 1), default=0)
            self._load_s = read_load_s(folders, took_over)
        orphans, leftovers = self._clean_up(state)
        return self._describe(state, steps, orphans, leftovers)

    def _start(self) -> str:
        answer = self.site.master.rackless("start", str(self.site.run_file))
        if answer.code == 0:
            return str(answer.document["run_id"])

        # The other of two clicks was faster.
        def active() -> str:
            runs = self.site.master.answer("runs", "list")
            return next((str(run["run_id"]) for run in runs if run["state"] == "running"), "")

        try:
            return str(wait_until(active, "a running run", 30))
        except Stuck as error:
            raise Stuck(f"the start was refused: {answer.problem.strip()[-300:]}") from error

    def _clean_up(self, state: str) -> tuple[list[str], list[str]]:
        """Return processes and files that the run left, once it is over and deleted."""
        if not self.run_id:
            return [], []
        site = self.site
        if state != "done":
            site.give_up(self.run_id)
        orphans = wait_for_none(self.run_id, SETTLE_S)
        deleted = site.master.rackless("runs", "delete", self.run_id)
        if deleted.code:
            self.breaks.append(f"it could not be deleted: {deleted.problem.strip()[-200:]}")
        return orphans, site.leftovers(self.run_id)

    def _describe(
        self, state: str, steps: Sequence[Step], orphans: list[str], leftovers: list[str]
    ) -> Finding:
        fault = self.drawn.fault
        expectation = fault.expectation
        told = self.site.keeper.told_since(self.run_id, self._fault_s) if self._fault_s else []
        lines = [(line.time_s, line.text) for line in told]
        victim = {"node": self.node.name, "rank": str(self.rank)}
        named = find_name(expectation, lines, victim) if expectation.named else None
        attempts = max((step.attempt for step in steps), default=0)
        ranks = {step.attempt: set[int]() for step in steps}
        for step in steps:
            ranks[step.attempt].add(step.rank)
        all_ranks = set(range(len(self.site.nodes)))
        alarms = [line for line in told if line.kind in ALARMS]
        finding = Finding(
            number=self.number,
            fault=fault.name,
            detail=fault.detail,
            victim=self.node.name,
            at_step=self.drawn.at_step,
            state=state,
            detected_s=named[0] - self._fault_s if named else None,
            told=named[1] if named else _join(alarms),
            back_s=self._returned(steps, state, attempts),
            load_s=self._load_s,
            attempts=attempts,
            is_on_same_ranks=all(seen == all_ranks for seen in ranks.values()),
            damage=compare(steps, self._undisturbed, is_done=state == "done")
            if steps
            else Damage(),
            orphans=tuple(orphans),
            leftovers=tuple(leftovers),
            alarms=tuple(line.text for line in alarms),
            story=tuple(f"{at_s - self._fault_s:.1f} s: {text}" for at_s, text in lines),
            seconds=time.time() - self._began_s,
            breaks=tuple(self.breaks),
        )
        return replace(finding, breaks=judge(finding, expectation))

    def _returned(self, steps: Sequence[Step], state: str, attempts: int) -> float | None:
        if state != "done" or not steps:
            return None
        return find_return_s(steps, self._fault_s, is_new_attempt=attempts > 1)


def _join(lines: Sequence[Line]) -> str:
    return lines[0].text if lines else ""


def record_undisturbed(site: Site) -> list[Step]:
    """Train once without a fault; return the steps."""
    run_id = site.start()
    state = site.wait_for_end(run_id, END_S)
    if state != "done":
        raise Stuck(f"the undisturbed run is {state}")
    steps = site.steps(run_id)
    site.master.answer("runs", "delete", run_id)
    return steps
