"""Parts of the campaign that need no network: kills while saving, and starts that interleave."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agents.contract.requests.attempts import LaunchAttempt
from agents.contract.run import AttemptStatus
from agents.contract.spec import DataSpec, RunSpec
from app.errors import RacklessError, UserError
from app.runs.lifecycle.launch import start_run
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.models import write_model
from tests.fakes.requests import Report

SHOW_EVERY = 25
"""Number of kills or starts after which the progress is shown and stored."""
MAX_DELAY_TICKS = 400
"""Longest head start of the first click, in turns of the event loop."""


def main(args: argparse.Namespace) -> int:
    """Run the part that `args` names, print a sentence and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as made:
        if args.part == "hours":
            from tests.campaign import hours

            began_s = time.monotonic()
            text, is_kept = hours.simulate(Path(made), args.hours)
            text = f"{text} ({time.monotonic() - began_s:.0f} s)"
            if args.out:
                args.out.write_text(json.dumps({"part": args.part, "kept": is_kept, "text": text}))
        else:
            text, is_kept = _repeat(args, Path(made))
    print(text)
    if args.write:
        from tests.campaign.report import write_part

        write_part(args.part, text)
    return 0 if is_kept else 1


def _repeat(args: argparse.Namespace, folder: Path) -> tuple[str, bool]:
    """Repeat kills or starts, going on from the file of an interrupted call; say what came of it.

    Each has draws of its own, so that the same seed draws the same ones whenever it goes on.
    """
    tally = Tally(args.out, args.part, args.seed)
    once = Saves(folder).kill if args.part == "saves" else Starts(folder).race
    tally.run(args.count, once, 60.0 * args.minutes if args.minutes is not None else math.inf)
    did = {
        "saves": "kills while saving left a checkpoint that verifies",
        "starts": "interleavings of two starts made one run",
    }
    good = tally.done - len(tally.broken)
    text = f"{good} of {args.count} {did[args.part]} (seed {args.seed}, {tally.seconds:.0f} s)"
    if tally.done < args.count:
        text += f"; {tally.done} were done, and the same command goes on if it has --out"
    if tally.broken:
        text += f"; not {tally.broken[0]}"
    return text, good == args.count


class Tally:
    """How many times something was done, and what went wrong; kept in a file."""

    def __init__(self, path: Path | None, part: str, seed: int) -> None:
        """Begin at 0, or where the file ends.

        Raises:
            SystemExit: the file holds another part or seed.
        """
        self._path = path
        self._is = {"part": part, "seed": seed}
        self.done = 0
        self.broken: list[str] = []
        self.seconds = 0.0
        if path is not None and path.exists():
            stored = json.loads(path.read_text())
            if {name: stored.get(name) for name in self._is} != self._is:
                raise SystemExit(f"{path} does not hold {part} of seed {seed}: give another --out")
            self.done, self.broken = stored["done"], stored["broken"]
            self.seconds = stored["seconds"]

    def run(
        self, count: int, once: Callable[[int, random.Random], str], limit_s: float = math.inf
    ) -> None:
        """Do it until it was done `count` times.

        Args:
            count: number of times, those of earlier calls among them.
            once: does it, with its number from 1 on and its draws; returns what went wrong.
            limit_s: time after which it ends early, in seconds.
        """
        began_s, spent_s = time.monotonic(), self.seconds
        with contextlib.suppress(KeyboardInterrupt):
            while self.done < count and time.monotonic() - began_s < limit_s:
                number = self.done + 1
                if problem := once(number, random.Random(f"{self._is['seed']}-{number}")):
                    self.broken.append(f"number {number}: {problem}")
                self.done = number
                self.seconds = spent_s + time.monotonic() - began_s
                if number % SHOW_EVERY == 0 or number == count:
                    print(f"{number} of {count}, {len(self.broken)} went wrong", flush=True)
                    self._store()
        self._store()

    def _store(self) -> None:
        if self._path is not None:
            values = {"done": self.done, "broken": self.broken, "seconds": self.seconds}
            beside = self._path.with_name(f"{self._path.name}.new")
            beside.write_text(json.dumps({**self._is, **values}))
            beside.replace(self._path)


class Saves:
    """A writer of checkpoints that saves without a pause, so that nearly every kill hits a save."""

    def __init__(self, folder: Path) -> None:
        self._run = folder / "runs" / "r1"
        self._run.mkdir(parents=True)
        self._newest = 0

    def kill(self, number: int, draw: random.Random) -> str:
        """Kill the writer at a random instant; return what is wrong with what it left."""
        from tests.agents.trainer.checkpoint.writer_kills import kill_writer

        try:
            self._newest = kill_writer(self._run, number, draw, self._newest)
        except AssertionError as broken:
            return f"no whole checkpoint: {broken}"
        return ""


class Starts:
    """One run file that two processes' worth of services start at about the same moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        data = folder / "data.jsonl"
        data.write_text('{"text": "hello"}\n')
        model = write_model(folder / "model")
        self._spec = RunSpec(model=str(model), data=DataSpec(train=str(data)))

    def race(self, number: int, draw: random.Random) -> str:
        """Start twice in a drawn order; return what came of it if it was not one run."""
        home = self._folder / f"home-{number}"
        found = asyncio.run(_race(home, self._spec, draw))
        shutil.rmtree(home)
        return "" if found == 1 else f"{found} runs"


async def _race(home: Path, spec: RunSpec, draw: random.Random) -> int:
    """Return the number of runs that two starts made, on nodes and in the store alike."""
    cluster = FakeCluster("alpha", "beta")
    for name in ("alpha", "beta"):
        _slow_down(cluster, name, draw)
    first, second = make_services(home, cluster), make_services(home, cluster)
    delay = draw.randrange(MAX_DELAY_TICKS)

    async def late() -> str:
        for _ in range(delay):
            await asyncio.sleep(0)
        return await start_run(second, spec)

    ended = await asyncio.gather(start_run(first, spec), late(), return_exceptions=True)
    for result in ended:
        if isinstance(result, BaseException) and not isinstance(result, RacklessError):
            raise result
    started = [result for result in ended if isinstance(result, str)]
    on_nodes = {run_id for name in cluster.nodes for run_id, _ in cluster[name].attempts}
    stored = {run.run_id for run in first.runs.store.all()}
    with contextlib.suppress(ValueError):
        (only,) = started
        return 1 if on_nodes == stored == {only} else len(on_nodes | stored)
    return len(started)


def _slow_down(cluster: FakeCluster, name: str, draw: random.Random) -> None:
    """Let a node take a drawn number of turns for each launch, and lease its device to one run."""
    node = cluster[name]
    launch, turns = node.launch, draw.randrange(MAX_DELAY_TICKS // 2)

    async def launch_later(request: LaunchAttempt, progress: Report = None) -> AttemptStatus:
        for _ in range(turns):
            await asyncio.sleep(0)
        for run_id, _ in node.attempts:
            if run_id != request.intent.run_id:
                raise UserError(f"Node {name} is already busy: run {run_id} uses its CPU.")
        return await launch(request)

    node.launch = launch_later  # type: ignore[method-assign]
