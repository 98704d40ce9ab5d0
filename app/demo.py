"""The demo: the whole workflow on this PC alone, as a story with steps, without a window.

Three nodes on loopback, each behind its own SSH server with its own host key and home folder, are
added, checked and train one small model together. One of them loses its power in the middle; the
run continues on the others, and on all nodes once the lost one is back. The result is exported and
answers a question. Every step is verified: the demo succeeds only if each of them happened and the
loss fell.

The caller (terminal or window) calls `prepare`, opens a core on `master_home`, calls `run`, and
finally `close`. The nodes stay up until the core is closed, so that the user can explore them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Literal

from agents.contract.node import EnvironmentReport
from agents.shared.files.python_child import SAFE_FOLDER, python_environ
from app.artifacts.exports.request import ExportRequest
from app.core.action import sentences
from app.core.artifacts import ExportModel
from app.core.core import Core
from app.core.library import ReadRunFile
from app.core.new_nodes import AddNode
from app.core.nodes import CheckNodes, ConnectNodes, SetUpNode
from app.core.runs import ListInterruptions, PlanRun, RefreshRun, StartRun
from app.errors import HostKeyUnknown, UnshippedLock, UserError
from app.events import ACTIVE_STATES, Event, RunChanged, RunSnapshot
from app.nodes.transport.loopback import LoopbackNode, power_cut
from app.nodes.transport.loopback_site import LoopbackSite
from app.presentation.interruption_text import tell_story
from app.presentation.plan_text import describe_plan, describe_step
from app.program import own_pythons
from app.text import count_of, show_list, show_loss, show_share

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
QUESTION = "Who founded Brenford?"
"""The base model knows the answer; the training teaches it to say so in a guide's words."""
CUT_AT_SHARE = 0.4
"""Share of the steps after which a node loses power."""
STEP_TIMEOUT_S = 300.0
StepState = Literal["todo", "now", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Story:
    """Progress of the demo: title and state of each step, and a note on the current one."""

    steps: tuple[tuple[str, StepState], ...]
    note: str = ""
    counts_steps: bool = False
    """True if `note` repeats the run's step and loss, which a progress bar shows as well."""
    run: RunSnapshot | None = None
    """Newest snapshot of the run; None: not started yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOutcome:
    """Result of the demo."""

    run_id: str
    first_loss: float
    loss: float
    lost_node: str
    recovery: tuple[str, ...]
    """Story of the loss and of the node's return, one sentence for each moment."""
    model_path: str
    question: str
    answer_before: str
    answer_after: str


Report = Callable[[Story], None]


class Demo:
    """One run of the demo in `folder`, which only the demo uses."""

    TITLES = (
        "Start the nodes",
        "Add them",
        "Set up",
        "Check",
        "Plan",
        "Train",
        "Pull a plug",
        "Recover",
        "Rejoin",
        "Export",
        "Ask the model",
    )

    def __init__(self, folder: Path, num_nodes: int = 3, python: str | None = None) -> None:
        """Name the folder, the nodes, and the interpreter that they train with.

        Args:
            folder: of the demo's nodes, master and result.
            num_nodes: 2 to 8.
            python: interpreter with the training environment; None: that of this process, or in
                the desktop bundle one that is built first.
        """
        self._python = python or next(iter(own_pythons()), None)
        self._folder = folder
        self._names = NAMES[:num_nodes]
        self._site = LoopbackSite(folder / "nodes", self._names)
        self._current = -1
        self._report: Report = lambda story: None
        self._run: RunSnapshot | None = None
        self._limit: asyncio.Timeout | None = None

    @property
    def master_home(self) -> Path:
        """Home folder on which to open the core."""
        return self._folder / "master"

    def prepare(self) -> None:
        """End what an earlier demo left behind and empty its folder. Blocks for a moment.

        Raises:
            UserError: a demo is running in this folder now.
        """
        self._site.open()
        # Of all names: the earlier demo may have had more nodes than this one.
        leftovers = [self._folder / "nodes" / name for name in NAMES]
        for folder in (self.master_home, self._folder / "model", *leftovers):
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End every process of every node of the demo. Blocks for a moment."""
        self._site.close()

    async def run(self, core: Core, report: Report) -> DemoOutcome:
        """Run the demo from beginning to end.

        Raises:
            UserError: a step failed; the message says which and why.
        """
        self._report = report
        # The servers end only after the core has disconnected from its nodes.
        core.at_end.append(self._site.end)
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S * 2) as self._limit:
                return await self._run_steps(core)
        except TimeoutError as error:
            self._say("failed", "it timed out")
            raise UserError(
                f"the demo made no progress in the step '{self.TITLES[self._current]}'",
                "This PC may be very busy; close other programs and start the demo again.",
            ) from error
        # Not `Exception`: a cancelled step has to be shown as failed, too.
        except BaseException as error:
            self._say("failed", str(error) or "cancelled")
            raise

    # ------------------------------------------------------------ the story

    async def _set_up(self, core: Core) -> None:
        if self._python is None:
            self._next("the training environment is downloaded and built")
            assert self._limit is not None
            self._limit.reschedule(None)  # as long as the download takes
            report = await self._build_environment(core)
            self._python = report.python
            self._limit.reschedule(asyncio.get_running_loop().time() + STEP_TIMEOUT_S * 2)
        else:
            self._next(f"every node trains with {self._python}")
        await asyncio.gather(
            *(core.do(SetUpNode(name=name, python=self._python)) for name in self._names)
        )

    async def _build_environment(self, core: Core) -> EnvironmentReport:
        try:
            return await core.do(SetUpNode(name=self._names[0]), sentences(self._note))
        except UnshippedLock as error:
            # The demo asks no questions; a user who wants that build agrees to it on a node.
            hint = (
                "Update the driver, or let this PC train as a node: rackless nodes add here --local"
            )
            error.reword(error.message, hint)
            raise

    async def _run_steps(self, core: Core) -> DemoOutcome:
        self._next(f"{len(self._names)} SSH servers on loopback, each with its own home folder")
        await self._site.start()
        self._next("their fingerprints are compared and confirmed")
        await asyncio.gather(*(self._add(core, node) for node in self._site.nodes))
        await core.do(ConnectNodes())
        await self._set_up(core)
        self._next("versions, reachability, a real all-reduce")
        await self._check(core)
        self._next("the run starts; each rank's speed is measured")
        run_id = await self._start(core)
        lost = await self._train_and_cut(core, run_id)
        await self._recover(core, run_id, lost)
        story = await self._rejoin(core, run_id, lost)
        self._next("the adapter is merged into the model")
        made = await core.do(
            ExportModel(request=ExportRequest(run_id=run_id), out=self._folder / "model"),
            sentences(self._note),
        )
        self._next(QUESTION)
        before, after = await self._ask(made.path)
        self._say("done", f"{after}")
        run = await core.do(RefreshRun(run_id=run_id))
        return DemoOutcome(
            run_id=run_id,
            first_loss=run.first_loss or 0.0,
            loss=run.loss or 0.0,
            lost_node=lost.home.name,
            recovery=story,
            model_path=str(made.path),
            question=QUESTION,
            answer_before=before,
            answer_after=after,
        )

    async def _add(self, core: Core, node: LoopbackNode) -> None:
        address = self._site.address(node)
        name = node.home.name
        try:
            await core.do(AddNode(name=name, address=address))
        except HostKeyUnknown as error:
            # Compared with the key of the demo's server, as a user compares it on that PC.
            if error.fingerprint != node.fingerprint:
                raise UserError(f"{name} shows a host key that is not its own") from error
            await core.do(AddNode(name=name, address=address, accept_host_key=error.fingerprint))
            self._note(f"{name} is {address}, {error.fingerprint}")
            return
        raise UserError(f"{name} was added although its host key had not been confirmed")

    async def _check(self, core: Core) -> None:
        rows = await core.do(CheckNodes())
        bad = [row for row in rows if row.status == "fail"]
        if bad:
            raise UserError(f"the check of {bad[0].node} failed: {bad[0].message}", bad[0].fix)
        self._note(f"{count_of(len(rows), 'check')} of {show_list(self._names)}, none failed")

    async def _start(self, core: Core) -> str:
        with resources.as_file(resources.files("resources") / "demo" / "run.yaml") as path:
            spec = await core.do(ReadRunFile(path=path))
            # `rejoin`: the rest of the run is shorter than a restart, so `auto` would not rejoin.
            # `recovery`: ranks that continue in place would finish before the lost node is back.
            spec = replace(spec, nodes=self._names, rejoin="always", recovery="resume")
            plan = await core.do(PlanRun(spec=spec))
            if plan.chosen is not None:
                self._note(f"{describe_plan(plan)} {describe_step(plan.chosen)} a step")
            self._run = await core.do(StartRun(spec=spec))
        # Ranks have no shares until the measurement at the start is over.
        run = await self._until(core, lambda run: all(rank.share for rank in run.ranks))
        shares = [f"{rank.node} {show_share(rank.share)}" for rank in run.ranks]
        self._next(f"each batch is shared as measured: {', '.join(shares)}")
        return run.run_id

    async def _train_and_cut(self, core: Core, run_id: str) -> LoopbackNode:
        await self._until(core, _is_far_enough)
        lost = self._site.nodes[-1]
        self._next(f"{lost.home.name} loses power")
        await asyncio.to_thread(power_cut, lost.home)
        await self._until(core, lambda run: run.is_recovering or run.attempt > 1)
        (loss,) = await core.do(ListInterruptions(run_id=run_id))
        # The supervisor must name the node that died, not one that only lost its peer.
        if loss.kind != "loss" or lost.home.name not in loss.reason:
            raise UserError(f"after {lost.home.name} lost power, the run says: {loss.reason}")
        self._note(loss.reason)
        return lost

    async def _recover(self, core: Core, run_id: str, lost: LoopbackNode) -> None:
        """Wait until the run continues without the node; then switch that on again."""
        rest = self._names[:-1]
        self._next(f"the run keeps training by itself on {show_list(rest)}")
        run = await self._until(core, lambda run: run.attempt > 1)
        if run.nodes != rest:
            raise UserError(f"the run continued on {show_list(run.nodes)}, not {show_list(rest)}")
        self._note(f"resumed on {show_list(rest)}; {lost.home.name} is switched on again")
        await self._site.restart(lost)
        await self._until(core, lambda run: run.attempt > 2)

    async def _rejoin(self, core: Core, run_id: str, lost: LoopbackNode) -> tuple[str, ...]:
        """Wait until the run has ended with all nodes; return the story of both interruptions."""
        name = lost.home.name
        self._next(f"{name} is back, and the run keeps training on all nodes from a checkpoint")
        run = await self._until(core, lambda run: run.state not in ACTIVE_STATES)
        if run.state != "done" or run.nodes != self._names:
            raise UserError(
                f"the run is {run.state} on {show_list(run.nodes)}: {run.message}", run.hint
            )
        found = await core.do(ListInterruptions(run_id=run_id))
        story = tuple(f"{one.title}: {one.text}" for part in found for one in tell_story(part))
        back = found[-1]
        if back.joined != (name,) or back.repeated_steps or back.state != "recovered":
            raise UserError(f"{name} did not rejoin from a checkpoint. {'. '.join(story)}")
        if run.loss is None or run.first_loss is None or run.loss >= run.first_loss:
            raise UserError(
                f"the loss did not fall: it started at {show_loss(run.first_loss)} and ended at "
                f"{show_loss(run.loss)}"
            )
        self._note(f"loss {show_loss(run.first_loss)} at the start, {show_loss(run.loss)} now")
        return story

    async def _until(self, core: Core, reached: Callable[[RunSnapshot], bool]) -> RunSnapshot:
        """Follow the demo's run until `reached`, and report its progress.

        Raises:
            UserError: the run ended before.
        """
        changed = asyncio.Event()

        def take(event: Event) -> None:
            if isinstance(event, RunChanged) and self._run and event.run.run_id == self._run.run_id:
                self._run = event.run
                changed.set()

        with core.events.listening(take):
            while True:
                run = self._run
                if run is not None and reached(run):
                    return run
                if run is not None and run.state not in ACTIVE_STATES and not run.is_recovering:
                    raise UserError(f"the run is {run.state}: {run.message}", run.hint)
                if run is not None:
                    is_loading = run.phase is None or run.starting is not None
                    note = "the ranks load the model" if is_loading else _progress_text(run)
                    self._say("now", note, counts_steps=not is_loading)
                await changed.wait()
                changed.clear()

    async def _ask(self, model: Path) -> tuple[str, str]:
        """Ask the base model and the result, both loaded by plain Transformers."""
        with resources.as_file(resources.files("resources") / "demo") as folder:
            # A process of its own: the app never imports torch.
            process = await asyncio.create_subprocess_exec(
                *_answer_command(self._python or sys.executable, folder, model),
                env=python_environ(os.environ),
                cwd=SAFE_FOLDER,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, errors = await process.communicate()
        if process.returncode:
            # The last line of a traceback names the error.
            last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise UserError(f"the exported model could not be loaded: {last}")
        before, after = json.loads(out)
        if not after.strip() or after == before:
            raise UserError(f"the trained model answers {after!r}, the same as before training")
        return before, after

    # ------------------------------------------------------------ progress

    def _next(self, note: str) -> None:
        self._current += 1
        self._say("now", note)

    def _note(self, text: str) -> None:
        self._say("now", text)

    def _say(self, state: StepState, note: str, *, counts_steps: bool = False) -> None:
        def state_of(number: int) -> StepState:
            return (
                state if number == self._current else "todo" if number > self._current else "done"
            )

        steps = tuple((title, state_of(number)) for number, title in enumerate(self.TITLES))
        self._report(Story(steps=steps, note=note, counts_steps=counts_steps, run=self._run))


def _answer_command(python: str, folder: Path, model: Path) -> list[str]:
    models = [str(path.absolute()) for path in (folder / "model", model)]
    return [python, str(folder.absolute() / "answer.py"), QUESTION, *models]


def _progress_text(run: RunSnapshot) -> str:
    if run.loss is None:
        return f"step {run.step or 0} of {run.total_steps}"
    return f"step {run.step} of {run.total_steps}, loss {show_loss(run.loss)}"


def _is_far_enough(run: RunSnapshot) -> bool:
    """Return whether the run has saved a checkpoint and trained on for a while."""
    far = run.step is not None and run.step >= (run.total_steps or 0) * CUT_AT_SHARE
    return far and run.newest_checkpoint_step is not None
