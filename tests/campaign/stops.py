"""Press Stop at random instants of a run's life: `python -m tests.campaign.stops --count 200`.

Each case brings a run into a phase, waits for an instant drawn from the seed, and stops the run
from another process. `rackless watch` runs all the time as a second keeper. After the stop has
answered, which it must within `--limit` seconds, no process of the run may live on any node, and
none may appear later: also not from a starter that was suspended and continues.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.site import Site, is_rank, open_site, tagged_processes, wait_until

NODES = ("alpha", "beta", "gamma")
AFTER_S = 1.5
"""Time after the answer in which nothing of the run may appear, in seconds."""
STARTER_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    phase: str
    delay_s: float
    answer_s: float
    problem: str
    """What was wrong; empty: nothing."""


class Stops:
    """Cases on one site. The run of a case is resumed by the next one, which saves time."""

    def __init__(self, site: Site, draw: random.Random, limit_s: float) -> None:
        self._site = site
        self._draw = draw
        self._limit_s = limit_s
        self._run_id = ""
        self._file = site.write_run_file(
            200_000, checkpoint={"every_minutes": None, "every_steps": 20, "keep": 2, "copies": 2}
        )
        self._phases: dict[str, Callable[[], tuple[subprocess.Popen[str] | None, float]]] = {
            "start": self._start,
            "suspended start": lambda: self._suspend(self._start),
            "load": self._load,
            "train": self._train,
            "save": self._save,
            "regroup": self._regroup,
            "resume": self._resume,
            "suspended resume": lambda: self._suspend(self._resume),
            "export": self._export,
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._phases)

    def run(self, phase: str) -> Result:
        """Carry out one case."""
        helper, delay_s = self._phases[phase]()
        began_s = time.monotonic()
        problem = ""
        try:
            answer = self._site.rackless("runs", "stop", self._run_id, timeout_s=180.0)
        except subprocess.TimeoutExpired:
            return Result(phase, delay_s, 180.0, "the stop did not answer")
        answer_s = time.monotonic() - began_s
        if answer_s > self._limit_s:
            problem = f"answered after {answer_s:.1f} s: {answer.problem.strip()[-300:]}"
        problem = problem or self._find_left("after the answer")
        if answer.code and "is done" not in answer.problem:
            # A resume that had not opened the store yet is ended as well, without a word.
            is_early = "not active" in answer.problem and phase.endswith(("resume", "export"))
            problem = problem or ("" if is_early else f"code {answer.code}: {answer.problem}")
        if helper is not None:
            problem = problem or self._end(helper, phase)
        time.sleep(AFTER_S)
        problem = problem or self._find_left("later")
        state = self._site.answer("runs", "show", self._run_id)["state"]
        if not problem and state not in ("stopped", "done"):
            problem = f"the run is {state}"
        return Result(phase, delay_s, answer_s, problem)

    def _find_left(self, when: str) -> str:
        left = tagged_processes(self._run_id) + list(_find_jobs(self._site))
        if not left:
            return ""
        words = [Path(f"/proc/{pid}/cmdline") for pid in left]
        named = []
        for path in words:
            with contextlib.suppress(OSError):
                named.append(path.read_bytes().replace(b"\0", b" ").decode()[-100:])
        return f"{when}: {named}" if named else ""

    def _end(self, helper: subprocess.Popen[str], phase: str) -> str:
        """Let a starter or exporter end; return a problem, if any."""
        helper.send_signal(signal.SIGCONT)
        try:
            _, said = helper.communicate(timeout=STARTER_END_S)
        except subprocess.TimeoutExpired:
            helper.kill()
            helper.communicate()
            return f"{phase} did not end after the stop"
        is_told = "was stopped" in said or helper.returncode == 0
        return "" if is_told else f"{phase} ended with {helper.returncode}: {said.strip()[-400:]}"

    # ------------------------------------------------------------ phases

    def _wait(self, most_s: float) -> float:
        delay_s = self._draw.uniform(0.0, most_s)
        time.sleep(delay_s)
        return delay_s

    def _start(self) -> tuple[subprocess.Popen[str], float]:
        starter = self._site.start("start", str(self._file))
        assert starter.stdout is not None
        self._run_id = starter.stdout.readline().strip()
        assert self._run_id, starter.communicate()[1]
        return starter, self._wait(4.0)

    def _ready(self) -> None:
        """Make sure that there is a run to resume that has a checkpoint."""
        if self._run_id and _has_checkpoint(self._site, self._run_id):
            return
        self._run_id = self._site.answer("start", str(self._file))["run_id"]
        wait_until(lambda: _has_checkpoint(self._site, self._run_id), "a checkpoint", 180)
        self._site.rackless("runs", "stop", self._run_id)

    def _resume(self) -> tuple[subprocess.Popen[str], float]:
        self._ready()
        return self._site.start("runs", "resume", self._run_id), self._wait(6.0)

    def _suspend(
        self, begin: Callable[[], tuple[subprocess.Popen[str], float]]
    ) -> tuple[subprocess.Popen[str], float]:
        starter, delay_s = begin()
        starter.send_signal(signal.SIGSTOP)
        return starter, delay_s

    def _load(self) -> tuple[None, float]:
        self._ready()
        self._site.answer("runs", "resume", self._run_id)
        return None, self._wait(8.0)

    def _begin_training(self) -> None:
        self._ready()
        attempt = self._site.answer("runs", "resume", self._run_id)["attempt"]
        wait_until(lambda: self._site.steps_told("alpha", self._run_id, 0, attempt), "steps", 180)

    def _train(self) -> tuple[None, float]:
        self._begin_training()
        return None, self._wait(3.0)

    def _save(self) -> tuple[subprocess.Popen[str], float]:
        self._begin_training()
        saver = self._site.start("runs", "save", self._run_id)
        delay_s = self._wait(3.0)
        saver.kill()
        saver.communicate()
        return None, delay_s  # type: ignore[return-value]

    def _regroup(self) -> tuple[None, float]:
        """Lose a node's ranks, which the others leave behind, or which is recovered."""
        self._begin_training()
        for pid in filter(is_rank, self._site.ranks_of(self._draw.choice(NODES), self._run_id)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return None, self._wait(10.0)

    def _export(self) -> tuple[subprocess.Popen[str], float]:
        self._ready()
        out = Path(tempfile.mkdtemp(dir=self._site.folder)) / "model"
        exporter = self._site.start("export", self._run_id, "--to", "merged", "--out", str(out))
        return exporter, self._wait(10.0)


def _has_checkpoint(site: Site, run_id: str) -> bool:
    folders = (site.agent_home(name) / "runs" / run_id / "checkpoints" for name in NODES)
    return any((step / "manifest.json").exists() for one in folders for step in one.glob("step-*"))


def _find_jobs(site: Site) -> Iterator[int]:
    """Yield the processes of exports on the site's nodes."""
    homes = [str(site.node_home(name)).encode() for name in NODES]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"agents.quantizers" in (entry / "cmdline").read_bytes():
                environ = (entry / "environ").read_bytes()
                if any(home in environ for home in homes):
                    yield int(entry.name)


@contextlib.contextmanager
def _watching(site: Site) -> Iterator[None]:
    process = site.start("watch")
    try:
        yield
    finally:
        process.terminate()
        process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="number of stops (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=15.0, help="seconds until the answer")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no case after these")
    parser.add_argument("--phase", help="only this phase")
    parser.add_argument("--no-watch", action="store_true", help="without the second keeper")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    until_s = time.monotonic() + 60 * args.minutes
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="rackless-stops-") as folder,
        open_site(Path(folder), NODES) as site,
    ):
        stops = Stops(site, draw, args.limit)
        names = [args.phase] if args.phase else list(stops.names)
        with contextlib.nullcontext() if args.no_watch else _watching(site):
            for number in range(args.count):
                if time.monotonic() > until_s:
                    break
                result = stops.run(names[number % len(names)])
                results.append(result)
                print(
                    f"{number + 1:3} {result.phase:17} at {result.delay_s:5.2f} s: "
                    f"{result.answer_s:5.1f} s  {result.problem or 'ok'}",
                    flush=True,
                )
    bad = [result for result in results if result.problem]
    slowest = max((result.answer_s for result in results), default=0.0)
    print(f"{len(results)} stops, {len(bad)} with a problem; slowest answer {slowest:.1f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
