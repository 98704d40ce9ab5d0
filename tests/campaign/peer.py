"""torchrun's own elastic restart beside ours: the same faults, model, data, steps and PCs."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.attack import Attack, record_undisturbed
from tests.campaign.draw import Drawn
from tests.campaign.faults import FAULTS
from tests.campaign.processes import command_of, send
from tests.campaign.report import write_part
from tests.campaign.site import EVERY_STEPS, Site, Stuck, wait_until
from tests.cluster.master import ROOT
from tests.cluster.namespaces import Cluster, Node

LIMIT_S = 150.0
"""Time for torchrun to be back, in seconds; Gloo's own patience is half an hour."""
AT_STEP = EVERY_STEPS + 25
KINDS = {"rank-kill": "a rank is killed", "reboot": "a node loses its power"}


@dataclass(frozen=True, slots=True)
class Return:
    """Cost of one fault."""

    back_s: float | None
    """Time until the next step, in seconds; None: not within the limit."""
    repeated: int


def main(args: argparse.Namespace) -> int:
    """Measure both, print a table of ratios; exit with 1 if ours did not come back."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as made:
        theirs = {kind: _strike_torchrun(Path(made) / kind, kind, args.steps) for kind in KINDS}
        ours = _strike_ours(Path(made) / "ours", args.steps)
    table = as_markdown(ours, theirs)
    print(table)
    if args.out:
        document = {
            kind: {"ours": vars_of(ours[kind]), "torchrun": vars_of(theirs[kind])} for kind in KINDS
        }
        args.out.write_text(json.dumps(document, indent=1))
    if args.write:
        write_part("torchrun", table)
    return 0 if all(one.back_s is not None for one in ours.values()) else 1


def vars_of(one: Return) -> dict[str, float | int | None]:
    return {"back_s": one.back_s, "repeated": one.repeated}


def as_markdown(ours: dict[str, Return], theirs: dict[str, Return]) -> str:
    """Return the comparison as a table."""
    lines = [
        "",
        "| fault | Rackless back | torchrun back | ratio | repeated | torchrun repeated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, says in KINDS.items():
        mine, other = ours[kind], theirs[kind]
        ratio = f"{other.back_s / mine.back_s:.2f}" if other.back_s and mine.back_s else "-"
        cells = (says, _show(mine), _show(other), ratio, str(mine.repeated), str(other.repeated))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _show(one: Return) -> str:
    return f"{one.back_s:.1f} s" if one.back_s is not None else f"not within {LIMIT_S:.0f} s"


def _strike_ours(folder: Path, num_steps: int) -> dict[str, Return]:
    found = {}
    with Site(folder, 2, num_steps) as site:
        undisturbed = record_undisturbed(site)
        for number, kind in enumerate(KINDS, 1):
            fault = FAULTS[kind](random.Random(1), 8.0)
            (finding,) = Attack(site, number, undisturbed).play([Drawn(fault, 1, AT_STEP)])
            found[kind] = Return(finding.back_s or None, finding.damage.repeated)
    return found


def _strike_torchrun(folder: Path, kind: str, num_steps: int) -> Return:
    shared = folder / "shared"
    shared.mkdir(parents=True)
    with Cluster(folder / "cluster", 2) as cluster:
        agents = [_start_torchrun(cluster, node, shared, num_steps) for node in cluster.nodes]
        victim = cluster.nodes[1]
        wait_until(lambda: _newest(shared) >= AT_STEP, "torchrun's first steps", 180)
        before = _newest(shared)
        fault_s = time.time()
        if kind == "reboot":
            cluster.cut(victim)
            send(cluster.pids(victim), signal.SIGKILL)
        else:
            send([pid for pid in cluster.pids(victim) if _is_rank(pid)], signal.SIGKILL)
        try:
            back = wait_until(_since(shared), "torchrun's return", LIMIT_S)
        except Stuck:
            return Return(None, before - before // EVERY_STEPS * EVERY_STEPS)
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        time_s, step = back
        return Return(time_s - fault_s, max(before - step + 1, 0))


def _start_torchrun(
    cluster: Cluster, node: Node, shared: Path, num_steps: int
) -> subprocess.Popen[bytes]:
    rendezvous = f"{cluster.nodes[0].address}:29400"
    demo = ROOT / "resources/demo"
    script = [str(ROOT / "tests/campaign/peer_rank.py"), str(demo / "model")]
    script += [str(demo / "train.jsonl"), str(shared), str(num_steps * 20), str(EVERY_STEPS)]
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    is_host = int(node is cluster.nodes[0])  # names of this PC say nothing about its namespaces
    options += [
        f"--rdzv-conf=is_host={is_host}",
        f"--rdzv-endpoint={rendezvous}",
        "--rdzv-id=peer",
        f"--local-addr={node.address}",
    ]
    with (shared.parent / f"{node.name}.log").open("wb") as log:
        return cluster.start(
            node,
            *(sys.executable, "-m", "torch.distributed.run", *options, *script),
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _is_rank(pid: int) -> bool:
    """Return whether this is a rank, and not torchrun itself, which names the script, too."""
    words = command_of(pid)
    return b"torch.distributed.run" not in words and any(
        word.endswith(b"peer_rank.py") for word in words
    )


def _read(shared: Path) -> list[tuple[float, int]]:
    """Return time and number of every step that any rank has done."""
    found = []
    for journal in shared.glob("steps-*.jsonl"):
        for line in journal.read_bytes().rpartition(b"\n")[0].splitlines():
            record = json.loads(line)
            found.append((record["time_s"], record["step"]))
    return sorted(found)


def _newest(shared: Path) -> int:
    return max((step for _, step in _read(shared)), default=0)


def _since(shared: Path) -> Callable[[], tuple[float, int] | None]:
    """Return a condition: the first step of a process that has begun after now."""
    known = {journal.name for journal in shared.glob("steps-*.jsonl")}

    def find() -> tuple[float, int] | None:
        fresh = [path for path in shared.glob("steps-*.jsonl") if path.name not in known]
        lines = [path.read_bytes().partition(b"\n") for path in fresh]
        records = [json.loads(first) for first, end, _ in lines if end]
        return min(((record["time_s"], record["step"]) for record in records), default=None)

    return find
