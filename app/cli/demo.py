"""`rackless demo`: the main job on this PC alone, in the window or in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app.cli.gui import has_display
from app.cli.kit.output import Output, SparseLines
from app.errors import Interrupted
from app.text import show_duration, show_foreign, show_loss

if TYPE_CHECKING:
    from app.demo import Demo, DemoOutcome, Story


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=_demo)
    parser.add_argument(
        "--headless", action="store_true", help="run in the terminal, without a window"
    )
    parser.add_argument("--nodes", type=_num_nodes, default=3, metavar="N", help="2 to 8")
    parser.add_argument(
        "--python",
        metavar="FILE",
        help="interpreter that the nodes train with; default: this one, or in the desktop bundle "
        "one that is built first",
    )


def _num_nodes(text: str) -> int:
    # At least 2: one is lost, and the others continue. At most the names of `app.demo`.
    if not text.isdigit() or not 2 <= int(text) <= 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 2 to 8")
    return int(text)


def _demo(args: argparse.Namespace, out: Output) -> int:
    from app.demo import Demo
    from app.paths import Paths, default_home

    demo = Demo(Paths(default_home()).demo, args.nodes, args.python)
    # Before `try`: a demo that did not get its folder has nothing to close.
    demo.prepare()
    try:
        if not (args.headless or out.as_json) and has_display():
            return _show_window(demo)
        outcome = asyncio.run(_run_headless(demo, out))
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise Interrupted(
            "the demo was cancelled; everything it started has been stopped",
            "Start it again: rackless demo",
        ) from None
    finally:
        demo.close()
    out.document(outcome)
    out.text(_end_text(outcome))
    return 0


def _show_window(demo: Demo) -> int:
    from app.gui.application import open_window

    async def story(core: Any, report: Callable[[Story], None]) -> DemoOutcome:
        return await demo.run(core, report)

    return open_window(demo.master_home, story, starts_demo=True)


async def _run_headless(demo: Demo, out: Output) -> DemoOutcome:
    from app.core.core import Core

    _end_on_terminate()
    began_s = time.monotonic()
    # Outside the core, so that the bar is gone only after the core has closed.
    with _StoryPrinter(out) as printer:
        async with Core.open(demo.master_home) as core:
            outcome = await demo.run(core, printer.take)
    out.text(f"The whole demo took {show_duration(time.monotonic() - began_s)}.")
    return outcome


def _end_on_terminate() -> None:
    """Make SIGTERM end the demo as Ctrl-C does, with everything cleaned up."""
    task = asyncio.current_task()
    # Windows event loops have no signal handlers.
    if sys.platform != "win32" and task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _end_text(outcome: DemoOutcome) -> str:
    return "\n".join(
        (
            f"The loss fell from {show_loss(outcome.first_loss)} to {show_loss(outcome.loss)}. "
            f"{outcome.lost_node} was lost during the run, which continued by itself, and rejoined "
            "it:",
            *(f"  {moment}" for moment in outcome.recovery),
            f"Question:         {outcome.question}",
            f"Before training:  {outcome.answer_before}",
            f"After training:   {outcome.answer_after}",
            f"The model is in {outcome.model_path}",
        )
    )


class _StoryPrinter:
    """Prints the story: a moving bar on a terminal, plain lines elsewhere, nothing with --json."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._title = ""
        self._began_s = 0.0
        self._sparse = SparseLines()
        self._last_story: Story | None = None
        self._printed_note = ""
        self._bar: _Bar | None = None

    def __enter__(self) -> _StoryPrinter:
        if self._out.is_terminal:
            self._bar = _Bar()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def take(self, story: Story) -> None:
        title, state = next(
            (step for step in reversed(story.steps) if step[1] in ("now", "failed")),
            story.steps[-1],
        )
        # A new step is always printed, but only a few of the notes within it.
        if title != self._title:
            self._finish_step()
            self._title, self._began_s = title, time.monotonic()
            self._print(f"{title}: {story.note}")
            self._printed_note = story.note
        elif state == "now" and self._sparse.allows(story.note, *_phase_of(story, title)):
            self._print_note(story)
        self._last_story = story
        if self._bar is not None:
            self._bar.show(story, title)
        if state == "failed":
            self._print(f"  failed: {story.note}")
        elif state == "done":
            self._finish_step()

    def _finish_step(self) -> None:
        if self._title and self._last_story is not None:
            self._print_note(self._last_story)
            self._print(f"  ok, {show_duration(time.monotonic() - self._began_s)}")
        self._title = ""

    def _print_note(self, story: Story) -> None:
        # The bar shows step and loss already.
        is_shown = story.counts_steps and self._bar is not None
        if story.note != self._printed_note and not is_shown:
            self._print(f"  {story.note}")
        self._printed_note = story.note

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print(text)
        else:
            self._out.text(text)


def _phase_of(story: Story, title: str) -> tuple[str, float | None]:
    """Return phase and share of a note; empty and None where the note itself says it."""
    run = story.run
    if not story.counts_steps or run is None or not run.total_steps:
        return "", None
    return title, (run.step or 0) / run.total_steps


class _Bar:
    """rich's progress bar below the lines of the story."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("", total=1.0, note="")
        self._progress.start()

    def show(self, story: Story, title: str) -> None:
        run = story.run
        steps = (run.step or 0, run.total_steps or 0) if run else (0, 0)
        # Only these two follow the steps of a run; the others are steps of the story.
        in_training = title in ("Train", "Recover", "Rejoin") and steps[1]
        done = sum(state == "done" for _, state in story.steps)
        total = steps[1] if in_training else len(story.steps)
        completed = steps[0] if in_training else done
        self._progress.update(
            self._task, description=title, total=total, completed=completed, note=story.note[:60]
        )

    def print(self, text: str) -> None:
        # rich would take brackets in a message for its markup.
        self._progress.console.print(show_foreign(text, keep="\n"), markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()
