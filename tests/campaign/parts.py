"""Parts of the campaign that need no network: kills while saving, and starts that interleave."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from pathlib import Path

from agents.contract.run import AttemptIntent, AttemptStatus
from agents.contract.spec import DataSpec, RunSpec
from app.errors import RacklessError, UserError
from app.runs.lifecycle.launch import start_run
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.models import write_model

MAX_DELAY_TICKS = 400
"""Longest head start of the first click, in turns of the event loop."""


def main(args: argparse.Namespace) -> int:
    """Run the part that `args` names, print a sentence and return the exit code."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-") as made:
        if args.part == "hours":
            from tests.campaign import hours

            text, is_kept = hours.simulate(Path(made), args.hours)
        elif args.part == "saves":
            text, is_kept = kill_while_saving(Path(made), args.count)
        else:
            text, is_kept = interleave_starts(Path(made), args.count, args.seed)
    text = f"{text} ({time.monotonic() - began_s:.0f} s)"
    print(text)
    if args.out:
        args.out.write_text(json.dumps({"part": args.part, "kept": is_kept, "text": text}))
    if args.write:
        from tests.campaign.report import write_part

        write_part(args.part, text)
    return 0 if is_kept else 1


def kill_while_saving(folder: Path, count: int) -> tuple[str, bool]:
    """Kill a writer of checkpoints `count` times, at random instants; verify the newest each time.

    The writer saves without a pause, so that nearly every kill strikes a save.
    """
    from tests.agents.trainer.checkpoint.test_folder import kill_writers

    run = folder / "runs" / "r1"
    run.mkdir(parents=True)
    try:
        kill_writers(run, count)
    except AssertionError as broken:
        return f"a kill while saving left no whole checkpoint: {broken}", False
    return f"{count} of {count} kills while saving left a checkpoint that verifies", True


def interleave_starts(folder: Path, count: int, seed: int) -> tuple[str, bool]:
    """Let two processes' worth of services start one run file `count` times, in drawn orders."""
    draw = random.Random(seed)
    model = write_model(folder / "model")
    data = folder / "data.jsonl"
    data.write_text('{"text": "hello"}\n')
    spec = RunSpec(model=str(model), data=DataSpec(train=str(data)))
    others = []
    for number in range(count):
        found = asyncio.run(_race(folder / f"home-{number}", spec, draw))
        if found != 1:
            others.append(f"number {number}: {found} runs")
    if others:
        return f"{len(others)} of {count} pairs of starts did not make one run: {others[0]}", False
    return f"{count} of {count} interleavings of two starts made one run (seed {seed})", True


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

    async def launch_later(intent: AttemptIntent) -> AttemptStatus:
        for _ in range(turns):
            await asyncio.sleep(0)
        for run_id, _ in node.attempts:
            if run_id != intent.run_id:
                raise UserError(f"Node {name} is already busy: run {run_id} uses its CPU.")
        return await launch(intent)

    node.launch = launch_later  # type: ignore[method-assign]
