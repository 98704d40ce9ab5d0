"""One run under attack: the faults that strike it, one after the other, and what came of each.

Starting a run and loading its model takes most of a campaign's time. So a run that a fault leaves
as it was takes the next one too. It is judged first: nothing may be wrong with it that would be
blamed on the next. What is found at the end of the run is blamed on its last fault.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise

from tests.campaign.case import Case
from tests.campaign.draw import Drawn
from tests.campaign.history import (
    Damage,
    Step,
    compare,
    find_return_s,
    is_on_all_ranks,
    read_load_s,
)
from tests.campaign.keeper import Line
from tests.campaign.processes import find_part, wait_for_none
from tests.campaign.site import Site, Stuck, wait_until
from tests.campaign.verdict import ALARMS, HEALED, WENT_ON, Finding, conclude, find_name
from tests.cluster.namespaces import ClusterError

START_S = 240.0
"""Time for a run to get to the step of its fault, in seconds: PCs that share cores are slow."""
END_S = 240.0
"""Time for a run to heal and end after its fault, in seconds."""
SETTLE_S = 60.0
"""Time for processes to end after the run, such as those of a node that came back, in seconds."""
CALM_S = 30.0
"""Time for a run to be as before after a fault, in seconds, or it is not struck again."""
PAUSE_S = 3.0
"""Time after that for false alarms to come, in seconds."""
ROOM_S = 6.0
"""Time for which a run has to go on after a further fault, in seconds."""
MORE_STEPS = 15
"""Steps before a further fault, at most: faults strike at all distances from a checkpoint."""
PROBLEMS = (Stuck, ClusterError, OSError, AssertionError, subprocess.SubprocessError)


class Attack:
    """A run under attack."""

    def __init__(self, site: Site, first_number: int, undisturbed: Sequence[Step]) -> None:
        self.site = site
        self.run_id = ""
        self.first_number = first_number
        self._undisturbed = undisturbed

    def play(self, drawn: Sequence[Drawn]) -> list[Finding]:
        """Strike one run with the first of the faults, and more as long as it can take them."""
        findings: list[Finding] = []
        for place, one in enumerate(drawn):
            case = Case(self.site, one, self.first_number + place)
            self._strike(case, is_first=not place)
            following = drawn[place + 1].fault if place + 1 < len(drawn) else None
            if following is None or following.is_at_start or not self._is_calm(case):
                break
            if not self._has_room(following.lasts_s):
                break
            finding = self._describe(case, WENT_ON, self.site.steps(self.run_id))
            if finding.breaks:
                break
            findings.append(finding)
        return [*findings, self._finish(case)]

    # ---- the run

    def _strike(self, case: Case, *, is_first: bool) -> None:
        fault, site = case.drawn.fault, self.site
        try:
            if is_first:
                fault.prepare(case)
                self.run_id = case.run_id = self._start()
                if fault.strikes_while_loading:
                    ranks = functools.partial(find_part, site.cluster, case.node, "rank")
                    wait_until(ranks, "a rank that loads", START_S)
                else:
                    site.wait_for_step(self.run_id, case.drawn.at_step, START_S)
            else:
                case.run_id = self.run_id
                time.sleep(PAUSE_S)
                more = case.drawn.at_step % MORE_STEPS
                site.wait_for_step(self.run_id, self._newest() + more, CALM_S)
            case.strike()
        except PROBLEMS as error:
            case.breaks.append(f"{type(error).__name__}: {error}")
        finally:
            case.ending.close()

    def _newest(self) -> int:
        return max((step.step for step in self.site.steps(self.run_id)), default=0)

    def _is_calm(self, case: Case) -> bool:
        """Wait until the run is as it was before the fault; return whether it can take another."""
        site, fault = self.site, case.drawn.fault
        expectation = fault.expectation
        if case.breaks or expectation.recovery == "recovered" or not fault.leaves_as_before:
            return False

        def is_as_before() -> bool:
            ranks = {s.rank for s in site.steps(self.run_id) if s.time_s > case.ended_s}
            return (
                len(ranks) == len(site.nodes)
                and site.keeper.sees_all(self.run_id)
                and (not expectation.named or self._find_name(case) is not None)
            )

        try:
            wait_until(is_as_before, "the run as before", CALM_S)
        except Stuck:
            return False
        time.sleep(PAUSE_S)
        steps = site.steps(self.run_id)
        return (
            max(step.attempt for step in steps) == 1
            and site.keeper.state_of(self.run_id) == "running"
        )

    def _has_room(self, lasts_s: float) -> bool:
        """Return whether enough steps are left for a fault of that length, at the present pace."""
        times = {step.step: step.time_s for step in self.site.steps(self.run_id)}
        newest = max(times)
        recent_s = [times[step] for step in sorted(times)[-MORE_STEPS:]]
        step_s = statistics.median(b - a for a, b in pairwise(recent_s))
        left_s = (self.site.num_steps - newest - MORE_STEPS) * step_s
        return left_s > PAUSE_S + lasts_s + ROOM_S

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

    def _finish(self, case: Case) -> Finding:
        """Wait for the end of the run, delete it, and describe its last fault."""
        site = self.site
        if not self.run_id:
            return self._describe(case, "not started", [])
        state = site.wait_for_end(self.run_id, END_S) if case.fault_s else "not struck"
        if state != "done":
            state = site.run_state(self.run_id)
        steps = site.steps(self.run_id)
        folders = [site.run_folder(node, self.run_id) for node in site.nodes]
        took_over = min((step.attempt for step in steps if step.attempt > 1), default=0)
        load_s = read_load_s(folders, took_over)
        orphans, leftovers = self._clean_up(case, state)
        return self._describe(
            case, state, steps, load_s=load_s, orphans=orphans, leftovers=leftovers
        )

    def _clean_up(self, case: Case, state: str) -> tuple[list[str], list[str]]:
        """Return processes and files that the run left, once it is over and deleted."""
        site = self.site
        if state != "done":
            site.give_up(self.run_id)
        orphans = wait_for_none(self.run_id, SETTLE_S)
        deleted = site.master.rackless("runs", "delete", self.run_id)
        if deleted.code:
            case.breaks.append(f"it could not be deleted: {deleted.problem.strip()[-200:]}")
        return orphans, site.leftovers(self.run_id)

    # ---- what came of a fault

    def _lines(self, case: Case) -> list[Line]:
        return self.site.keeper.told_since(self.run_id, case.fault_s) if case.fault_s else []

    def _find_name(self, case: Case) -> tuple[float, str] | None:
        """Return time and text of the line that named the fault rightly."""
        expectation = case.drawn.fault.expectation
        lines = [(line.time_s, line.text) for line in self._lines(case)]
        return find_name(expectation, lines, case.victim) if expectation.named else None

    def _describe(
        self,
        case: Case,
        state: str,
        steps: Sequence[Step],
        *,
        load_s: float = 0.0,
        orphans: Sequence[str] = (),
        leftovers: Sequence[str] = (),
    ) -> Finding:
        fault, delays = case.drawn.fault, self.site.delays
        lines = self._lines(case)
        alarms = [line.text for line in lines if line.kind in ALARMS]
        named = self._find_name(case)
        named_s = named[0] if named else case.fault_s
        attempts = max((step.attempt for step in steps), default=0)
        back_s = None
        if state in HEALED and steps:
            back_s = find_return_s(steps, case.fault_s, is_new_attempt=attempts > 1)
        # What the ranks need to load is allowed in full.
        acting_until_s = case.fault_s + max((back_s or 0.0) - load_s, 0.0)
        finding = Finding(
            number=case.number,
            run=self.first_number,
            fault=fault.name,
            detail=fault.detail,
            victim=case.node.name,
            at_step=max((s.step for s in steps if s.time_s <= case.fault_s), default=0),
            state=state,
            detected_s=named[0] - case.fault_s if named else None,
            named_delay_s=delays.between(case.fault_s, named_s),
            told=named[1] if named else next(iter(alarms), ""),
            back_s=back_s,
            back_delay_s=delays.between(case.fault_s, acting_until_s),
            load_s=load_s,
            attempts=attempts,
            is_on_same_ranks=is_on_all_ranks(steps, len(self.site.nodes)),
            damage=compare(steps, self._undisturbed, is_done=state == "done")
            if steps
            else Damage(),
            orphans=tuple(orphans),
            leftovers=tuple(leftovers),
            alarms=tuple(alarms),
            story=tuple(line.describe(case.fault_s) for line in lines),
            seconds=time.time() - case.began_s,
            load=os.getloadavg()[0],
            breaks=tuple(case.breaks),
        )
        return conclude(finding, fault.expectation)


def record_undisturbed(site: Site) -> list[Step]:
    """Train once without a fault; return the steps."""
    run_id = site.start()
    state = site.wait_for_end(run_id, END_S)
    if state != "done":
        raise Stuck(f"the undisturbed run is {state}")
    steps = site.steps(run_id)
    site.master.answer("runs", "delete", run_id)
    return steps
