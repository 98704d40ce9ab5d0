"""Gradient error against one process: `python -m tests.bench.bench_gradients [--vectors N]`.

Draws share vectors of 1 to 6 ranks, with a largest micro-batch and a number of recomputed layers
for each rank; a rank may get no work. The batch is cut, grouped, differentiated and reduced by the
trainer's own code, with dropout on and rows of unequal length. One process plays the ranks one
after the other: each bucket is copied when its rank sends it, so one that is sent before it is
final gives a wrong sum. A part of the vectors is run again by real processes over Gloo, where all
ranks also have to hold the same bits.

The one process computes a row at a time: the sum over the tokens of one micro-batch is made inside
a matrix product, whose float32 rounding grows with their number (at 700 at once the largest value
is 1.3e-6 off the float64 one, a row at a time 0.3e-6).

Errors are the norm of the difference over the norm of the gradient, and the largest difference over
the largest value; for the loss the relative difference. The greatest counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, reduce
from pathlib import Path

import torch
from torch import Tensor

from agents.contract.layer_plan import LayerPlan
from agents.contract.spec import AdapterSpec, RunSpec
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.parallel.batch import choose_batch
from agents.trainer.parallel.reducer import ExactTransport, Reducer
from agents.trainer.parallel.registry import make_strategy
from agents.trainer.prepare import prepare
from agents.trainer.rank.attempt import read_attempt
from agents.trainer.rank.group import Group, Ranks
from tests.agents.trainer.ranks import (
    Run,
    finish,
    free_port,
    make_context,
    make_pairs,
    make_spec,
    make_tiny_model,
    start,
)

LIMITS = {"fp64": 1e-12, "fp32": 1e-6}
LAYERS, STEPS, MOST_RANKS = 3, 40, 6
GLOO_RANKS = (2, 3, 6)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """What is trained."""

    precision: str
    objective: str
    packing: bool
    adapter: str

    @property
    def name(self) -> str:
        packed = " packed" if self.packing else ""
        return f"{self.precision} {self.objective}{packed} {self.adapter}"


KINDS = [
    Kind(precision, objective, packing, adapter)
    for precision in LIMITS
    for objective, packing in (("sft", False), ("sft", True), ("dpo", False))
    for adapter in ("lora", "full")
]


@dataclass(frozen=True)
class Case:
    """One way to cut the batch of a step."""

    step: int
    shares: tuple[float, ...]
    micro_tokens: tuple[int, ...]
    num_recomputed: tuple[int, ...]


def draw_case(draw: random.Random, num_ranks: int | None = None) -> Case:
    """Return a case; shares differ up to a thousandfold, micro-batches from 1 row to all."""
    count = num_ranks or draw.randint(1, MOST_RANKS)
    return Case(
        step=draw.randint(1, STEPS),
        shares=tuple(round(10 ** draw.uniform(-3, 0), 4) for _ in range(count)),
        micro_tokens=tuple(int(10 ** draw.uniform(0, 2.8)) for _ in range(count)),
        num_recomputed=tuple(draw.randint(0, LAYERS) for _ in range(count)),
    )


class PlayedGroup:
    """Stands for `Group`: one process is every rank in turn, the last one gets the sums."""

    def __init__(self) -> None:
        self._sent: list[list[Tensor]] = []
        self._world_size = 0

    def begin(self, world_size: int) -> None:
        self._sent, self._world_size = [], world_size

    def next_rank(self) -> None:
        self._sent.append([])

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        place = len(self._sent[-1])
        self._sent[-1].append(tensor.clone())

        def finish_sum() -> None:
            if len(self._sent) < self._world_size:
                return
            total = self._sent[0][place].clone()
            for other in self._sent[1:]:
                total += other[place]
            tensor.copy_(total)

        return finish_sum


@dataclass(frozen=True)
class Errors:
    """Relative errors of one case, or the worst of many."""

    norm: float = 0.0
    largest: float = 0.0
    loss: float = 0.0
    num_cases: int = 0
    num_idle: int = 0
    """Cases with a rank that had no work."""

    def worse(self, other: Errors) -> Errors:
        return Errors(
            norm=max(self.norm, other.norm),
            largest=max(self.largest, other.largest),
            loss=max(self.loss, other.loss),
            num_cases=self.num_cases + other.num_cases,
            num_idle=self.num_idle + other.num_idle,
        )

    def over_limit(self, kind: Kind) -> float:
        """Return the greatest error over what is allowed."""
        return max(self.norm, self.largest, self.loss) / LIMITS[kind.precision]

    def tell(self, kind: Kind, how: str) -> str:
        return (
            f"{how:6} {kind.name:20} {self.num_cases:4} vectors, {self.num_idle:3} with an idle "
            f"rank: norm {self.norm:.1e}, largest {self.largest:.1e}, loss {self.loss:.1e}; "
            f"{self.over_limit(kind):.3f} of {LIMITS[kind.precision]:.0e}"
        )


class Trainer:
    """The trainer of one kind in this process; each number of recomputed layers has its model."""

    def __init__(self, home: Path, model: Path, kind: Kind, group: PlayedGroup | Group) -> None:
        adapter = AdapterSpec(kind=kind.adapter, rank=4, alpha=8, dropout=0.1)  # type: ignore[arg-type]
        self.spec: RunSpec = make_spec(
            precision=kind.precision, objective=kind.objective, packing=kind.packing,
            adapter=adapter,
        )  # fmt: skip
        run = Run(home, model, self.spec)
        if kind.objective == "dpo":
            make_pairs(run.train, 40)
        run.intend()
        self._attempt = read_attempt(run.attempt_folder, 0, 1)
        self._group = group
        self._player = cache(self._make_player)
        self.expected = cache(self._compute_alone)

    def _make_player(self, num_recomputed: int) -> tuple[Executor, Reducer]:
        context = make_context(self._attempt, Group(Ranks(), self._attempt.rank_names))
        state = prepare(context, make_strategy(self.spec, context))
        self._train = state.train
        values = state.parameters.values  # B of an adapter is zero at first, and the gradient of A
        draw = torch.Generator().manual_seed(5)
        values += 0.05 * torch.randn(len(values), generator=draw, dtype=torch.float64).to(values)
        layers = LayerStack(state.model)
        layers.set(LayerPlan(num_recomputed=num_recomputed))
        if layers.plan.num_recomputed != num_recomputed:
            raise RuntimeError(f"{layers.plan.num_recomputed} layers are computed twice")
        executor = Executor(
            state.model, state.parameters, state.objective, CPU,
            layers=layers, micro_tokens=1,
            warn=lambda message, hint: None, beat=lambda: None,
        )  # fmt: skip
        transport = ExactTransport(self._group)  # type: ignore[arg-type]
        return executor, Reducer(state.parameters, transport, world_size=2)

    def _compute_alone(self, step: int) -> tuple[Tensor, float]:
        """Return gradient and loss of one process that computes a row at a time."""
        executor, _ = self._player(0)
        executor.micro_tokens = 1
        batch = choose_batch(self.spec, self._train, step, shares=(1.0,), rank=0)
        executor.add_gradients(batch.mine)
        return executor._flat.gradients.clone(), executor.loss_sum.item()

    def compute(self, case: Case, rank: int) -> tuple[Tensor, float, int]:
        """Be one rank; return the summed gradient, this rank's loss, and its examples."""
        executor, reducer = self._player(case.num_recomputed[rank])
        executor.micro_tokens = case.micro_tokens[rank]
        batch = choose_batch(self.spec, self._train, case.step, shares=case.shares, rank=rank)
        alone = len(case.shares) == 1
        executor.add_gradients(batch.mine, None if alone else reducer)
        if not alone:
            reducer.finish()
        return executor._flat.gradients, executor.loss_sum.item(), len(batch.mine.examples)

    def play(self, case: Case, played: PlayedGroup) -> Errors:
        """Be all ranks in turn; return the errors."""
        played.begin(len(case.shares))
        losses, idle = 0.0, 0
        for rank in range(len(case.shares)):
            played.next_rank()
            found, loss, num_examples = self.compute(case, rank)
            losses += loss
            idle += not num_examples
        return find_errors(found, losses, self.expected(case.step), idle)


def find_errors(found: Tensor, loss: float, expected: tuple[Tensor, float], idle: int) -> Errors:
    """Return the relative errors of a gradient and a loss."""
    gradient, alone_loss = expected
    difference = found - gradient
    return Errors(
        norm=float(difference.norm() / gradient.norm()),
        largest=float(difference.abs().max() / gradient.abs().max()),
        loss=abs(loss - alone_loss) / abs(alone_loss),
        num_cases=1,
        num_idle=int(idle > 0),
    )


def measure_played(home: Path, model: Path, kind: Kind, cases: Sequence[Case]) -> Errors:
    """Return the worst errors of ranks that are played in this process."""
    played = PlayedGroup()
    trainer = Trainer(home, model, kind, played)
    return reduce(Errors.worse, (trainer.play(case, played) for case in cases))


def be_rank(environ: dict[str, str], home: str, model: str, kind: Kind, cases: list[Case]) -> None:
    """Be one real rank; write the errors that it saw, and a hash of every sum."""
    import os

    os.environ.update(environ)
    torch.set_num_threads(1)
    ranks = Ranks.from_environment()
    group = Group(ranks, [f"rank {rank}" for rank in range(ranks.world_size)])
    group.join("gloo", CPU)
    trainer = Trainer(Path(home, str(ranks.rank)), Path(model), kind, group)
    told = []
    for case in cases:
        expected = trainer.expected(case.step)
        found, mine, num_examples = trainer.compute(case, ranks.rank)
        totals = torch.tensor([mine, float(num_examples == 0)], dtype=torch.float64)
        group.sum(totals)
        errors = find_errors(found, totals[0].item(), expected, int(totals[1]))
        told.append([asdict(errors), hashlib.sha256(found.numpy().tobytes()).hexdigest()])
    Path(home, f"told-{ranks.rank}.json").write_text(json.dumps(told))
    group.leave()


def measure_gloo(home: Path, model: Path, kind: Kind, cases: list[Case]) -> Errors:
    """Return the worst errors of real processes; all cases have the same number of ranks."""
    count = len(cases[0].shares)
    home.mkdir(parents=True)
    environ = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        start(be_rank, {**environ, "RANK": str(rank)}, str(home), str(model), kind, cases)
        for rank in range(count)
    ]
    codes = finish(processes, timeout_s=600)
    if codes != [0] * count:
        raise RuntimeError(f"the ranks ended with {codes}")
    told = [json.loads((home / f"told-{rank}.json").read_text()) for rank in range(count)]
    for of_case in zip(*told, strict=True):
        if len({sha256 for _, sha256 in of_case}) > 1:
            raise RuntimeError("the ranks hold different sums")
    return reduce(Errors.worse, (Errors(**errors) for errors, _ in told[0]))


def share_out(num_vectors: int, num_kinds: int) -> list[int]:
    """Return how many of the vectors each kind gets."""
    return [num_vectors // num_kinds + (i < num_vectors % num_kinds) for i in range(num_kinds)]


def main() -> int:
    """Measure all kinds; the vectors of a precision are shared out to its kinds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--vectors", type=int, default=1000, help="for each precision")
    parser.add_argument("--gloo", type=int, default=3, help="of each kind and number of ranks")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"{platform.machine()}, python {platform.python_version()}, torch {torch.__version__}")
    began_s, worst_ratio, sizes = time.monotonic(), 0.0, Counter[int]()
    per_precision = len(KINDS) // len(LIMITS)
    counts = share_out(args.vectors, per_precision) * len(LIMITS)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder, "model"), LAYERS)
        for number, (kind, count) in enumerate(zip(KINDS, counts, strict=True)):
            draw = random.Random(number)
            cases = [draw_case(draw) for _ in range(count)]
            sizes.update(len(case.shares) for case in cases)
            found = [
                (measure_played(Path(folder, f"played{number}"), model, kind, cases), "played")
            ]
            for ranks in GLOO_RANKS if args.gloo else ():
                some = [draw_case(draw, ranks) for _ in range(args.gloo)]
                home = Path(folder, f"gloo{number}-{ranks}")
                found.append((measure_gloo(home, model, kind, some), f"gloo {ranks}"))
            for worst, how in found:
                print(worst.tell(kind, how), flush=True)
                worst_ratio = max(worst_ratio, worst.over_limit(kind))
    print(f"ranks: vectors {dict(sorted(sizes.items()))}; {time.monotonic() - began_s:.0f} s")
    print(f"worst error over its limit: {worst_ratio:.3f} (at most 1)")
    return int(worst_ratio > 1)


if __name__ == "__main__":
    sys.exit(main())
