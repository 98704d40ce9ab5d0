"""Show a run's progress until it ends: a moving bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time

from app import events
from app.cli.kit.output import Output, plain
from app.core.action import CoreApi
from app.core.runs import WatchRun
from app.presentation.found_text import describe_found
from app.presentation.start_text import describe_start
from app.text import show_duration, show_loss, show_rate, show_share

# Seconds between two updates of what a start says.
_TICK_S = 1.0


def end_text(run: events.RunSnapshot) -> str:
    """Describe how a run ended, with its message and hint."""
    at = f" after step {run.step}" if run.step is not None else ""
    loss = f", loss {show_loss(run.loss)}" if run.loss is not None else ""
    first = f" (started at {show_loss(run.first_loss)})" if run.first_loss is not None else ""
    lines = [f"{run.run_id} is {run.state}{at}{loss}{first}"]
    lines += [f"  {text}" for text in (run.message, run.hint) if text]
    return "\n".join(lines)


def while_read(listener: events.Listener) -> events.Listener:
    """Return a listener that cancels this command once its output is no longer read.

    Raised here, BrokenPipeError would surface in the task that watches the run, as our bug.
    """
    # The task of the command, which makes the listener; events arrive in other tasks.
    command = asyncio.current_task()
    assert command is not None
    gone = False

    def take(event: events.Event) -> None:
        nonlocal gone
        if gone:
            return
        try:
            listener(event)
        except BrokenPipeError:
            gone = True
            command.cancel()

    return take


class Watching:
    """Prints the events and progress of one run inside a `with` block."""

    def __init__(self, core: CoreApi, out: Output, run_id: str = "") -> None:
        self.run_id = run_id
        """Id of the run; empty until the run is announced."""
        self._core = core
        self._out = out
        self._bar_shown = False
        # The run while it starts, as it was reported last.
        self._starting: events.RunSnapshot | None = None
        self._listening = core.events.listening(while_read(self._take))

    def __enter__(self) -> Watching:
        self._listening.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._wipe()
        self._listening.__exit__(None, None, None)

    async def until_end(self, run_id: str) -> int:
        """Follow the run; return exit code 0 if it is done, 1 if it ended otherwise."""
        self.run_id = run_id
        ticking = asyncio.create_task(self._tick()) if self._out.is_terminal else None
        try:
            run = await self._core.do(WatchRun(run_id=run_id))
        finally:
            if ticking is not None:
                ticking.cancel()
        self._wipe()
        self._out.line({"kind": "ended", "run": plain(run)})
        self._out.text(end_text(run))
        return 0 if run.state == "done" else 1

    def _take(self, event: events.Event) -> None:
        match event:
            # A dotted name in a pattern compares with its value; a bare one would capture.
            case events.StepsArrived(run_id=self.run_id, steps=steps):
                for step in steps:
                    self._out.line({"kind": "step", **plain(step)})
            case events.RunEventArrived(event=run_event) if run_event.run_id == self.run_id:
                self._out.line({**plain(run_event), "kind": "event", "event": run_event.kind})
                self._wipe()
                self._out.text(run_event.text)
            case events.RunChanged(run=run) if run.run_id == self.run_id:
                self._show(run)

    async def _tick(self) -> None:
        """Count the seconds of a start down: its node reports only where it is."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._starting is not None:
                self._show(self._starting)

    def _show(self, run: events.RunSnapshot) -> None:
        self._starting = run if run.starting is not None else None
        # With --json the steps themselves are the progress.
        if self._out.as_json:
            return
        if run.starting is not None:
            text, share = describe_start(run.starting, time.time()), run.starting.share
            phase = f"attempt {run.attempt}, {run.starting.phase}"
        elif run.step is not None and run.total_steps is not None:
            text, share = (
                progress_text(run),
                run.step / run.total_steps if run.total_steps else None,
            )
            phase = f"attempt {run.attempt}"
        else:
            return
        if self._out.is_terminal:
            self._out.bar(text)
            self._bar_shown = True
        else:
            self._out.progress_text(text, phase, share)

    def _wipe(self) -> None:
        if self._bar_shown:
            self._out.wipe()
            self._bar_shown = False


def progress_text(run: events.RunSnapshot) -> str:
    """Return one line of progress."""
    parts = [
        f"step {run.step} of {run.total_steps}",
        f"loss {show_loss(run.loss)}",
        show_rate(run.tokens_per_s),
        *([f"MFU {show_share(run.mfu)}"] if run.mfu is not None else []),
        *([f"efficiency {show_share(run.eta)}"] if run.eta is not None else []),
        f"{show_duration(run.remaining_s)} left",
    ]
    return "  ".join(parts)


class ChangeLines:
    """Prints each event of a run, and each change of the state of a node or run."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._states: dict[str, str] = {}

    def take(self, event: events.Event) -> None:
        match event:
            case events.RunEventArrived(event=found):
                self._out.line({**plain(found), "kind": "event", "event": found.kind})
                self._out.text(f"{found.run_id}  {found.text}")
            case events.RunChanged(run=run) if self._is_new(f"run {run.run_id}", run.state):
                self._out.line({"kind": "run", "run_id": run.run_id, "state": run.state})
                self._out.text(f"{run.run_id}  {run.state}")
            case events.FoundRunsChanged(runs=runs):
                for one in runs:
                    if self._is_new(f"found {one.run_id} {one.attempt} {one.node}", one.state):
                        self._out.line({**plain(one), "kind": "found"})
                        self._out.text(f"{describe_found(one)} See: rackless runs found")
            case events.NodeChanged(node=node) if self._is_new(f"node {node.name}", node.state):
                self._out.line({"kind": "node", "node": node.name, "state": node.state})
                problem = f": {node.problem}" if node.problem else ""
                self._out.text(f"{node.name}  {node.state}{problem}")

    def _is_new(self, subject: str, state: str) -> bool:
        was = self._states.get(subject)
        self._states[subject] = state
        return was != state
