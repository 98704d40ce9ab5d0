"""One model of bench_planning: what is in memory when during a step, and how long it takes.

A step is that of the trainer's loop: micro-batches in shapes that repeat, the first of which is
launched and the second recorded, all in one pool of memory; then the optimizer, in the same pool.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

from tests.bench.planning.planning_jobs import Job, Row
from tests.bench.planning.planning_model import make_rows

NUM_MICRO_BATCHES = 2
"""Micro-batches of a step: of equal ones the first is launched, the second recorded."""
_TIMED_S, _LEAST_TURNS, _MOST_TURNS = 0.4, 2, 6
_HOST_BYTES = 12 << 30
_COMPILED_TOKENS = 512


def prepare_process(device: Any) -> None:
    """Set what the trainer sets for exact runs before anything is compiled."""
    import torch

    from agents.trainer.kernels import compiling

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    compiling.fix_settings()


class Meter:
    """Reads what torch has allocated; all zero on a CPU."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._on = device.type == "cuda"

    def now(self) -> int:
        """Return the bytes allocated now."""
        import torch

        return torch.cuda.memory_allocated(self._device) if self._on else 0

    def peak(self) -> int:
        """Return the most since the last call of `reset`."""
        import torch

        return torch.cuda.max_memory_allocated(self._device) if self._on else 0

    def reserved(self) -> int:
        """Return the most that was reserved since then."""
        import torch

        return torch.cuda.max_memory_reserved(self._device) if self._on else 0

    def reset(self) -> None:
        """Begin a new peak."""
        import torch

        if self._on:
            torch.cuda.reset_peak_memory_stats(self._device)

    def clean(self) -> None:
        """Give back what is free."""
        import torch

        gc.collect()
        if self._on:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def wait(self) -> float:
        """Return the time when all that was asked for is done."""
        import torch

        if self._on:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def outside(self) -> dict[str, int]:
        """Return what the whole GPU has in use, and what this process has reserved of it."""
        import torch

        if not self._on:
            return {"used_bytes": 0, "held_bytes": 0}
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device)
        return {"used_bytes": total - free, "held_bytes": held}


class Watched:
    """An objective, with a look at the memory between body and head of its last forward pass."""

    def __init__(self, objective: Any, forward: Any, meter: Meter) -> None:
        self._objective, self.sums = objective, objective.sums
        self._meter = meter
        self.seen: dict[str, int] = {}
        self.most_bytes = 0
        """Peak until the last of these moments."""
        features = forward.features

        def watched(batch: Any) -> Any:
            found = features(batch)
            self._see("body")
            return found

        forward.features = watched

    def look_up(self, batch: Any, places: Any) -> Any:
        """See `Objective`."""
        return self._objective.look_up(batch, places)

    def compute(self, batch: Any, known: Any, gradient_scale: Any) -> Any:
        """See `Objective`."""
        found = self._objective.compute(batch, known, gradient_scale)
        self._see("head")
        return found

    def _see(self, name: str) -> None:
        peak = self._meter.peak()
        self.seen |= {f"{name}_peak_bytes": peak, f"{name}_bytes": self._meter.now()}
        self.most_bytes = max(self.most_bytes, peak)
        self._meter.reset()


class Bench:
    """One loaded model."""

    def __init__(self, job: Job, base: Any, device: Any) -> None:
        import torch

        from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
        from agents.trainer.execution.activation_offload import Offloader
        from agents.trainer.execution.executor import Executor
        from agents.trainer.execution.layers import LayerStack
        from agents.trainer.model.model import build_trained_model
        from agents.trainer.objectives.registry import KnownOfRows, make_objective
        from agents.trainer.optim.flat_parameters import FlatParameters
        from agents.trainer.prepare import _make_forward

        self.job, self.device, self.meter = job, device, Meter(device)
        self.warnings: list[str] = []
        self.sizes: dict[str, int] = {}
        adapter = AdapterSpec(
            kind=job.kind,  # type: ignore[arg-type]
            rank=job.rank, targets=job.targets, dropout=job.dropout, dora=job.dora,
            experts=job.experts,
        )  # fmt: skip
        self.spec = RunSpec(
            model="bench",
            data=DataSpec(train="rows.jsonl"),
            adapter=adapter,
            objective=job.objective,
        )
        self._note("base_bytes")
        self.model = build_trained_model(self.spec, base, None, plain_template=False, device=device)
        self._note("model_bytes")
        longest = max(one.sequence for one in job.rows)
        self.forward = _make_forward(self.model, device, longest)
        self.warnings += self.forward.limits
        self.flat = FlatParameters(self.model.named_parameters(), device)
        self._note("flat_bytes")
        # In full training the reference is a table.
        table = torch.zeros(4096, 2, dtype=torch.float64) if job.kind == "full" else None
        objective = make_objective(self.spec, self.forward, KnownOfRows(reference=table))
        self.watched = Watched(objective, self.forward, self.meter)
        fixed = [*self.model.module.parameters(), *self.model.module.buffers()]
        layers = LayerStack(
            self.model,
            compiled=device.type == "cuda",
            offloader=Offloader(device, fixed, _HOST_BYTES),
            warn=lambda message, hint: self.warnings.append(message),
        )
        self.executor = Executor(
            self.model, self.flat, self.watched, device, layers=layers, micro_tokens=1 << 20,
            warn=lambda message, hint: self.warnings.append(message), beat=lambda: None,
        )  # fmt: skip
        self.optimizer: Any = None
        self.optimizer_name = ""

    def _note(self, name: str) -> None:
        self.meter.clean()
        self.sizes[name] = self.meter.now()

    def compile(self) -> dict[str, Any]:
        """Compile both ways of a layer on few tokens, and say what a layer of each kind keeps."""
        from agents.contract.layer_plan import LayerPlan
        from agents.trainer.execution.cuda_graphs import CudaRecorder, GraphReplayer

        layers = self.executor.layers
        some = Row(sequence=_COMPILED_TOKENS, batch=2, recomputed=0.0)
        _, part = make_rows(some, self.job, 1)
        offloader = layers.offloader
        assert offloader is not None
        saved: dict[int, list[Any]] = {}
        pack = offloader._pack

        def look(tensor: Any) -> Any:
            saved.setdefault(offloader._turn, []).append([str(tensor.dtype), list(tensor.shape)])
            return pack(tensor)

        offloader._pack = look  # type: ignore[method-assign]
        started = time.perf_counter()
        found: dict[str, Any] = {}
        for name, plan in (
            ("saved", LayerPlan(num_moved=layers.num_layers)),
            ("saved_again", LayerPlan(num_recomputed=layers.num_layers)),
        ):
            layers.set(plan)
            saved.clear()
            if not self.executor.try_gradients(part):
                found["out_of_memory"] = True
            # Of layers that are alike only one.
            kinds = {str(one): one for _, one in sorted(saved.items())}
            found[name] = list(kinds.values())
        found["compile_s"] = self.meter.wait() - started
        offloader._pack = pack  # type: ignore[method-assign]
        if layers.compiled and self.forward.flat and self.device.type == "cuda":
            recorder = CudaRecorder(self.device)
            self.executor.replayer = GraphReplayer(self.model.clock, recorder)
        return found | {"compiled": layers.compiled, "num_layers": layers.num_layers}

    def measure(self, wanted: Row) -> dict[str, Any]:
        """Return the figures of a row."""
        from agents.contract.layer_plan import LayerPlan
        from agents.trainer.execution.shapes import ShapeGrid

        executor, meter, layers = self.executor, self.meter, self.executor.layers
        rows, part = make_rows(wanted, self.job, NUM_MICRO_BATCHES)
        executor.drop_graphs()
        executor.micro_tokens = wanted.sequence * wanted.batch
        executor.grid = ShapeGrid(rows, wanted.sequence)
        executor.is_repeating = executor.replayer is not None
        count = layers.num_layers
        plan = LayerPlan(
            num_recomputed=round(wanted.recomputed * count), num_moved=round(wanted.moved * count)
        )
        layers.set(plan)
        self._choose(wanted.optimizer)
        meter.clean()
        found: dict[str, Any] = {"rest_bytes": meter.now(), **self._describe(rows, part)}
        meter.reset()
        self.watched.most_bytes = 0
        if not executor.try_gradients(part):
            executor.drop_graphs()
            meter.clean()
            return found | {"fits": False}
        found["backward_peak_bytes"] = meter.peak()
        found |= self.watched.seen
        found["pool_bytes"] = executor.held_bytes
        meter.reset()
        with executor.sharing():
            self._update()
        found |= {"step_peak_bytes": meter.peak(), "reserved_bytes": meter.reserved()}
        found |= meter.outside()
        found |= self._time(part)
        found["peak_bytes"] = max(
            self.watched.most_bytes, found["backward_peak_bytes"], found["step_peak_bytes"]
        )
        # As in the record of a step; see `rank.device.read_memory_bytes`.
        found["memory_bytes"] = max(found["peak_bytes"], found["rest_bytes"] + executor.held_bytes)
        found["plan"] = {"recomputed": plan.num_recomputed, "moved": plan.num_moved}
        replayer = executor.replayer
        found["replayed"] = replayer.num_replayed if replayer is not None else 0
        found["failure"] = replayer.failure if replayer is not None else None
        executor.drop_graphs()
        meter.clean()
        return found

    def _describe(self, rows: Any, part: Any) -> dict[str, Any]:
        """Return lengths of the step, and the sizes of its micro-batches."""
        from agents.shared.micro_shapes import group_examples

        executor = self.executor
        lengths = [one.num_tokens for one in part.examples]
        groups = group_examples(lengths, executor.micro_tokens, is_filled=True)
        shapes = [
            executor.grid.choose([part.examples[index] for index in group], executor.micro_tokens)
            for group in groups
        ]
        kept = ("num_tokens", "num_segments", "num_targets", "longest")
        return {
            "lengths": lengths,
            "all_lengths": sorted(rows.num_tokens.tolist()),
            "shapes": [[getattr(one, name) for name in kept] for one in shapes],
        }

    def _time(self, part: Any) -> dict[str, Any]:
        replayer = self.executor.replayer
        if replayer is not None and not replayer.num_replayed:
            self.executor.try_gradients(part)  # records what the first pass has launched
        passes: list[float] = []
        steps: list[float] = []
        while len(passes) < _LEAST_TURNS or (sum(passes) < _TIMED_S and len(passes) < _MOST_TURNS):
            started = self.meter.wait()
            fits = self.executor.try_gradients(part)
            between = self.meter.wait()
            with self.executor.sharing():
                self._update()
            if not fits:
                return {"pass_s": [], "step_s": [], "fits": False}
            passes.append(between - started)
            steps.append(self.meter.wait() - between)
        return {"pass_s": passes, "step_s": steps, "fits": True}

    def _choose(self, name: str) -> None:
        """Have an optimizer of this kind with all of its state."""
        from agents.trainer.optim.optimizer import make_optimizer

        if name == self.optimizer_name:
            return
        self.optimizer = None
        self.meter.clean()
        before = self.meter.now()
        self.optimizer = make_optimizer(replace(self.spec, optimizer=name), self.flat)
        self.optimizer_name = name
        self._update()
        self._note("optimizer_bytes")
        self.sizes["optimizer_bytes"] -= before

    def _update(self) -> None:
        """Do what the trainer's loop does between the backward pass and the next step."""
        from agents.trainer.optim.flat_parameters import compute_norm
        from agents.trainer.optim.optimizer import take_step

        gradients = self.flat.gradients
        gradients.div_(1000.0)
        norm = compute_norm(gradients)
        gradients.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        take_step(self.optimizer)
