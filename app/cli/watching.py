"""Show a run's progress until it ends: a moving bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from app.cli.output import Output, plain
from app.events import Event, RunChanged, RunHappened, RunSnapshot, StepsArrived
from app.text import show_duration, show_loss, show_rate

if TYPE_CHECKING:
    from app.core import Core

PLAIN_EVERY_S = 2.0
"""Between two lines of progress where there is no terminal."""


async def watch(core: Core, run_id: str, out: Output) -> int:
    """Follow the run; return 0 when it is done, 1 when it ended in any other way."""
    told = _Told(run_id, out)
    with core.events.listening(told.take):
        task = asyncio.create_task(core.watch_run(run_id))
        run = await task
    told.finish()
    out.line({"kind": "ended", "run": plain(run)})
    out.text(end_text(run))
    return 0 if run.state == "done" else 1


def end_text(run: RunSnapshot) -> str:
    """Return how a run ended, in a sentence or two."""
    at = f" after step {run.step}" if run.step is not None else ""
    loss = f", loss {show_loss(run.loss)}" if run.loss is not None else ""
    first = f" (it began at {show_loss(run.first_loss)})" if run.first_loss is not None else ""
    lines = [f"{run.run_id} is {run.state}{at}{loss}{first}"]
    lines += [f"  {text}" for text in (run.message, run.hint) if text]
    return "\n".join(lines)


class _Told:
    """Takes the events of one run and prints what a person wants to read of them."""

    def __init__(self, run_id: str, out: Output) -> None:
        self._run_id = run_id
        self._out = out
        self._printed_s = 0.0
        self._bar_shown = False

    def take(self, event: Event) -> None:
        match event:
            case StepsArrived(run_id=self._run_id, steps=steps):
                for step in steps:
                    self._out.line({"kind": "step", **plain(step)})
            case RunHappened(event=happened) if happened.run_id == self._run_id:
                self._out.line({"kind": "event", **plain(happened)})
                self._wipe()
                self._out.text(happened.text)
            case RunChanged(run=run) if run.run_id == self._run_id:
                self._show(run)

    def finish(self) -> None:
        self._wipe()

    def _show(self, run: RunSnapshot) -> None:
        if run.step is None or run.total_steps is None or self._out.as_json:
            return
        if self._out.is_terminal:
            self._wipe()
            self._out.raw(progress_text(run).encode())
            self._bar_shown = True
        elif time.monotonic() - self._printed_s >= PLAIN_EVERY_S:
            self._printed_s = time.monotonic()
            self._out.text(progress_text(run))

    def _wipe(self) -> None:
        if self._bar_shown:
            self._out.raw(b"\r\x1b[K")
            self._bar_shown = False


def progress_text(run: RunSnapshot) -> str:
    """Return one line of progress."""
    return (
        f"step {run.step} of {run.total_steps}  loss {show_loss(run.loss)}  "
        f"{show_rate(run.tokens_per_s)}  {show_duration(run.remaining_s)} left"
    )
