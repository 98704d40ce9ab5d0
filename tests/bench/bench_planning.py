"""What a GPU's memory and time really are, to hold the planner's forecasts against.

Models of random weights in the shapes of 1B to 13B, made on the GPU, with the trainer's own parts:
flat buffers, compiled layers that keep, move or recompute, the loss in chunks, 4-bit weights, its
optimizers. Each row is a whole step: forward and backward passes over one micro-batch, then the
optimizer; it tells what was in memory when, and how long it took. Several models are loaded and
compiled at once by processes of their own, but only one of them computes a row at a time.

    python3 -m tests.bench.bench_planning --out rows.jsonl --seconds 320
    python3 -m tests.bench.planning_table rows.jsonl                 # forecasts beside them
    ... --families                  # a few layers of Gemma, Qwen3, Phi, Mistral with DoRA, ...
    ... --part 0/4 --at-once 2      # a quarter of the models, for one of four GPUs: true times
    python3 -m tests.bench.bench_planning --out rows.jsonl --cpu     # tiny shapes, to try it
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.planning_jobs import FAMILIES, JOBS, SHAPES, TINY, Job, Row, make_base

GPU_GIB = 100.0
"""Of models that are there at once; a row's activations take the rest."""
AT_ONCE = 6
"""Models; while others compile, a PC of 16 cores starts kernels at half its pace."""
TIMED_S, MOST_TURNS = 0.8, 7
LAST_ROW_S = 8.0


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Let no other process compute inside the block; a process that dies lets go."""
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_row(path: str, found: dict[str, Any]) -> None:
    """Append a line, whole, and see it on disk."""
    with open(path, "a", encoding="ascii") as file:
        file.write(json.dumps(found) + "\n")
        file.flush()
        os.fsync(file.fileno())


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


class Bench:
    """One loaded model."""

    def __init__(self, job: Job, device: Any) -> None:
        import torch

        from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
        from agents.trainer.execution.activation_offload import Offloader
        from agents.trainer.execution.executor import Executor
        from agents.trainer.execution.layers import LayerStack
        from agents.trainer.kernels import compiling, nf4
        from agents.trainer.model.forward import Forward
        from agents.trainer.model.model import build_trained_model
        from agents.trainer.optim.flat_parameters import FlatParameters

        self.job, self.device, self.meter = job, device, Meter(device)
        self.warnings: list[str] = []
        self.sizes: dict[str, int] = {}
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        compiling.fix_settings()
        adapter = AdapterSpec(
            kind=job.kind,  # type: ignore[arg-type]
            rank=job.rank, targets=job.targets, dropout=job.dropout, dora=job.dora,
        )  # fmt: skip
        self.spec = RunSpec(model="bench", data=DataSpec(train="rows.jsonl"), adapter=adapter)
        base = make_base(job, device)
        self.meter.clean()
        self.sizes["base_bytes"] = self.meter.now()
        model = build_trained_model(self.spec, base, None, plain_template=False, device=device)
        forward = Forward(model, device)
        if device.type == "cuda":
            nf4.register(model.module)
            forward.fuse_linear()
        self.sizes["model_bytes"] = self.meter.now()
        self.watched = Watched(forward, self.meter)
        self.meter.clean()
        self.sizes["tried_bytes"] = self.meter.now()
        self.flat = FlatParameters(model.named_parameters(), device)
        self.meter.clean()
        self.sizes["flat_bytes"] = self.meter.now()
        fixed = [*model.module.parameters(), *model.module.buffers()]
        layers = LayerStack(
            model,
            compiled=device.type == "cuda",
            offloader=Offloader(device, fixed, 24 << 30),
            warn=lambda message, hint: self.warnings.append(message),
        )
        self.executor = Executor(
            model, self.flat, self.watched, device, layers=layers, micro_tokens=1 << 20,
            warn=lambda message, hint: self.warnings.append(message), beat=lambda: None,
        )  # fmt: skip
        self.optimizer: Any = None
        self.optimizer_name = ""

    def compile(self) -> dict[str, Any]:
        """Compile both ways of a layer on few tokens, and tell what one layer keeps."""
        from agents.contract.layer_plan import LayerPlan

        layers = self.executor.layers
        part = make_part([512, 512], self.job)
        layers.set(LayerPlan(num_recomputed=layers.num_layers - 1, num_moved=1))
        offloader = layers.offloader
        assert offloader is not None
        saved: list[Any] = []
        pack = offloader._pack

        def look(tensor: Any) -> Any:
            saved.append([offloader._layer, str(tensor.dtype), list(tensor.shape)])
            return pack(tensor)

        offloader._pack = look  # type: ignore[method-assign]
        started = time.perf_counter()
        self.executor.try_gradients(part)
        seconds = self.meter.wait() - started
        offloader._pack = pack  # type: ignore[method-assign]
        middle = layers.num_layers // 2  # that which moves, and keeps all
        return {
            "compile_s": seconds,
            "layer_bytes_per_token": offloader.max_layer_bytes / 1024,
            "saved": [one[1:] for one in saved if one[0] == middle],
            "saved_again": [one[1:] for one in saved if one[0] == 0],
            "compiled": layers.compiled,
        }

    def measure(self, wanted: Row) -> dict[str, Any]:
        """Return the figures of a row."""
        from agents.contract.layer_plan import LayerPlan

        layers, meter = self.executor.layers, self.meter
        count = layers.num_layers
        plan = LayerPlan(
            num_recomputed=round(wanted.recomputed * count), num_moved=round(wanted.moved * count)
        )
        layers.set(plan)
        lengths = [wanted.sequence] * wanted.batch
        if wanted.unequal:
            lengths = [*lengths, wanted.sequence // 3]
        part = make_part(lengths, self.job)
        self._choose(wanted.optimizer)
        meter.clean()
        if not self.executor.try_gradients(part):
            meter.clean()
            return {"out_of_memory": True}
        meter.clean()
        found: dict[str, Any] = {"rest_bytes": meter.now(), "lengths": lengths}
        passes, steps = [], []
        for turn in range(MOST_TURNS):
            meter.reset()
            self.watched.seen = {}
            started = meter.wait()
            fits = self.executor.try_gradients(part)
            between = meter.wait()
            if not turn:
                found["backward_peak_bytes"] = meter.peak()
                found |= self.watched.seen
                found["after_bytes"] = meter.now()
                meter.reset()
            self._update()
            ended = meter.wait()
            if not turn:
                found["step_peak_bytes"] = meter.peak()
                found["reserved_bytes"] = meter.reserved()
                found |= meter.outside()
            else:
                passes.append(between - started)
                steps.append(ended - between)
            if not fits or sum(passes) > TIMED_S:
                break
        peaks = ("body_peak_bytes", "head_peak_bytes", "backward_peak_bytes", "step_peak_bytes")
        found["peak_bytes"] = max(found.get(name, 0) for name in peaks)
        found |= {"pass_s": passes, "step_s": steps, "fits": fits}
        found["plan"] = {"recomputed": plan.num_recomputed, "moved": plan.num_moved}
        found["tokens"] = sum(lengths)
        meter.clean()
        return found

    def _choose(self, name: str) -> None:
        """Have an optimizer of this kind with all of its state."""
        from dataclasses import replace

        from agents.trainer.optim.optimizer import make_optimizer

        if name == self.optimizer_name:
            return
        self.optimizer = None
        self.meter.clean()
        before = self.meter.now()
        self.optimizer = make_optimizer(replace(self.spec, optimizer=name), self.flat)
        self.optimizer_name = name
        self._update()
        self.meter.clean()
        self.sizes["optimizer_bytes"] = self.meter.now() - before

    def _update(self) -> None:
        """Do what the trainer's loop does between the backward pass and the next step."""
        import torch

        gradients = self.flat.gradients
        gradients.div_(1000.0)
        norm = torch.linalg.vector_norm(gradients)
        gradients.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()


class Watched:
    """The supervised loss, with a look at the memory between body and head."""

    def __init__(self, forward: Any, meter: Meter) -> None:
        self._forward = forward
        self._meter = meter
        self.seen: dict[str, int] = {}

    def look_up(self, batch: Any, places: Any) -> None:
        """Return None, as `objectives.Supervised` does."""

    def compute(self, batch: Any, known: Any, gradient_scale: Any) -> Any:
        """Return what `objectives.Supervised` does."""
        import torch.nn.functional as F  # noqa: N812 - everybody's name for it

        from agents.trainer.objectives.objective import NUM_SUMS

        features = self._forward.features(batch)
        meter = self._meter
        self.seen = {"body_peak_bytes": meter.peak(), "body_bytes": meter.now()}
        meter.reset()
        loss = self._forward.head.sum_loss(features, batch.label_N, gradient_scale)
        self.seen |= {"head_peak_bytes": meter.peak(), "head_bytes": meter.now()}
        meter.reset()
        return loss, F.pad(loss.detach().double().reshape(1), (0, NUM_SUMS - 1))


def make_part(lengths: list[int], job: Job) -> Any:
    """Return sequences of random tokens that all count."""
    import numpy as np

    from agents.trainer.data.examples import Example, Part, Segment

    draw = np.random.default_rng(5)
    examples = []
    for number, length in enumerate(lengths, 1):
        ids = draw.integers(6, SHAPES[job.shape]["vocab_size"], length).astype(np.int32)
        examples.append(Example((Segment(number, ids, np.arange(length) > 0),)))
    count = len(lengths)
    return Part(examples=examples, places=[0] * count, positions=list(range(count)))


def measure_job(job: Job, out: str, lock: str, deadline_s: float, alive: Any, cpu: bool) -> None:
    """Load a model and write its rows, until there is no time left."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    device = torch.device("cpu" if cpu else "cuda:0")
    said = {"shape": job.shape, "kind": job.kind, "rank": job.rank, "targets": job.targets,
            "dropout": job.dropout, "dora": job.dora}  # fmt: skip
    try:
        started = time.time()
        bench = Bench(job, device)
        loaded_s = time.time() - started
        head = {**said, "what": "job", "load_s": loaded_s, **bench.compile(), **bench.sizes}
        write_row(out, {**head, "warnings": bench.warnings, "num_trained": len(bench.flat.values)})
        for wanted in job.rows:
            with alone(lock):
                if time.time() + LAST_ROW_S > deadline_s:
                    write_row(out, {**said, "what": "no time"})
                    return
                started = time.time()
                found = bench.measure(wanted)
                took_s = time.time() - started
            write_row(
                out,
                {"what": "row", **said, **asdict(wanted), **found, **bench.sizes, "took_s": took_s,
                 "at_once": alive.value, "compiled": bench.executor.layers.compiled,
                 "warnings": bench.warnings},
            )  # fmt: skip
    except Exception:  # noqa: BLE001 - whatever happens to one model, the others go on
        write_row(out, {**said, "what": "failed", "error": traceback.format_exc()[-3000:]})


def calibrate_first(out: str, lock: str, deadline_s: float, cpu: bool) -> None:
    """Write what the node's own measurement says of this card, and what a bare process holds."""
    import torch

    from agents.contract.node import CalibrationJob
    from agents.trainer.calibration import calibrate

    with alone(lock):
        held = {} if cpu else {"bare": Meter(_warm()).outside()}
        found = calibrate(
            CalibrationJob(
                python=sys.executable,
                device="cpu" if cpu else "cuda:0",
                device_id="",
                seconds=1 if cpu else 6,
            ),
            lambda text: None,
        )
        names = {} if cpu else {"properties": str(torch.cuda.get_device_properties(0))}
        line = {"what": "calibration", **asdict(found), **held, **names, "torch": torch.__version__}
        write_row(out, line)


def _warm() -> Any:
    import torch

    device = torch.device("cuda:0")
    torch.ones(8, device=device).sum().item()
    return device


def choose_context(*, cpu: bool) -> Any:
    """Return how processes start: as forks of one that has the slow imports, where that works.

    A library that looks at the GPU while it is imported makes forks useless; PEFT and bitsandbytes
    do, so each process imports them itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "transformers.models.llama.modeling_llama"]
    )
    if cpu:
        return context
    probe = context.Process(target=_warm)
    probe.start()
    probe.join()
    return context if probe.exitcode == 0 else multiprocessing.get_context("spawn")


def measure_all(jobs: list[Job], out: str, seconds: float, at_once: int, *, cpu: bool) -> None:
    """Run the jobs, several at once as far as they fit, and end in time."""
    started_s = time.time()
    deadline_s = started_s + seconds
    context = choose_context(cpu=cpu)
    alive = context.Value("i", 0)
    waiting, running = list(jobs), list[tuple[Any, float]]()
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as folder:
        lock = str(Path(folder) / "lock")
        first = context.Process(target=calibrate_first, args=(out, lock, deadline_s, cpu))
        first.start()
        if not cpu:
            time.sleep(0.5)
        while (waiting or running) and time.time() < deadline_s:
            running = [(process, gib) for process, gib in running if process.is_alive()]
            room = GPU_GIB - sum(gib for _, gib in running)
            chosen = next((job for job in waiting if job.gib <= room), None)
            if chosen is not None and len(running) < at_once:
                waiting.remove(chosen)
                process = context.Process(
                    target=measure_job, args=(chosen, out, lock, deadline_s, alive, cpu)
                )
                process.start()
                running.append((process, chosen.gib))
            else:
                time.sleep(0.2)
            alive.value = len(running)
        for process, _ in [*running, (first, 0.0)]:
            process.join(max(0.0, deadline_s - time.time()))
            if process.is_alive():
                process.kill()
                process.join()
    write_row(out, {"what": "end", "seconds": time.time() - started_s, "left": len(waiting)})


def main() -> None:
    """Measure, and say how much was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=320.0)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument(
        "--families", action="store_true", help="a few layers of other families than Llama"
    )
    parser.add_argument("--only", help="shape:kind of one job")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="models that are there")
    parser.add_argument("--part", default="0/1", help="which jobs: 1/4 is every fourth from 1 on")
    args = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or the check itself spoils forks
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in [os.getcwd(), *sys.path[:1]] if p)
    cache = tempfile.mkdtemp(prefix="rackless-compiled-")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/triton")
    chosen = TINY if args.cpu else FAMILIES if args.families else JOBS
    jobs = [job for job in chosen if args.only in (None, named(job))]
    first, stride = map(int, args.part.split("/"))
    jobs = jobs[first::stride]
    measure_all(jobs, str(args.out), args.seconds, args.at_once, cpu=args.cpu)
    lines = [json.loads(line) for line in args.out.read_text().splitlines()]
    for what in ("row", "failed", "no time"):
        print(f"{what}: {sum(line['what'] == what for line in lines)}", flush=True)


def named(job: Job) -> str:
    """Return what `--only` calls a job."""
    return f"{job.shape}:{job.kind}"


if __name__ == "__main__":
    main()
