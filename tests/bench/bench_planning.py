"""What a GPU's memory and time really are, to hold the planner's forecasts against.

Models of random weights in the shapes of 1B to 13B, made on the GPU, with the trainer's own parts:
flat buffers, compiled layers that keep, move or recompute, fused linear layers and DoRA, experts,
the loss in chunks, 4-bit weights, its optimizers. Each row is a whole step of the trainer's loop
(see `planning_measure`); it tells what was in memory when, and how long it took. Several models
are loaded and compiled at once by processes of their own, but only one of them computes a row at a
time. A GPU of 80 GB has room for all of them.

    python3 -m tests.bench.bench_planning --out rows.jsonl --seconds 300
    python3 -m tests.bench.planning.planning_table rows.jsonl  # forecasts beside them
    ... --families --seconds 200    # a few layers of Gemma, Qwen3.5, Granite 4, gpt-oss, ...
    ... --part 0/4 --at-once 2      # a quarter of the models, for one of four GPUs: true times
    python3 -m tests.bench.bench_planning --out rows.jsonl --cpu     # tiny shapes, to try it
"""

from __future__ import annotations

import argparse
import fcntl
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

from tests.bench.planning.planning_jobs import FAMILIES, JOBS, TINY, Job
from tests.bench.planning.planning_measure import Bench, Meter, prepare_process
from tests.bench.planning.planning_model import make_base

GPU_GIB = 46.0
"""Memory of the models that are there at once; a row's activations take the rest of 80 GB."""
AT_ONCE = 5
"""Models; while more of them compile, a PC of 16 cores is slow to launch kernels."""
LAST_ROW_S = 6.0


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


def measure_job(job: Job, out: str, lock: str, deadline_s: float, alive: Any, cpu: bool) -> None:
    """Load a model and write its rows, until there is no time left."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    device = torch.device("cpu" if cpu else "cuda:0")
    said = {key: value for key, value in asdict(job).items() if key not in ("rows", "gib")}
    try:
        prepare_process(device)
        _measure_rows(job, device, said, out, lock, deadline_s, alive)
    except Exception:  # noqa: BLE001 - whatever happens to one model, the others go on
        write_row(out, {**said, "what": "failed", "error": traceback.format_exc()[-3000:]})


def _measure_rows(
    job: Job, device: Any, said: dict[str, Any], out: str, lock: str, deadline_s: float, alive: Any
) -> None:
    from agents.trainer import prepare  # noqa: F401 - all slow imports, before the GPU is asked for
    from agents.trainer.rank.device import on_own_stream

    started = time.time()
    with alone(lock):  # filling a model keeps the GPU busy, which would slow a row
        waited_s = time.time() - started
        base = make_base(job, device)  # on the default stream, like the trainer
    bench = Bench(job, base, device)
    loaded_s = time.time() - started
    with on_own_stream(device):
        head = {**said, "what": "job", "waited_s": waited_s, "load_s": loaded_s}
        head |= {**bench.compile(), **bench.sizes}
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
                {"what": "row", **said, **asdict(wanted), **found, **bench.sizes,
                 "took_s": took_s, "at_once": alive.value,
                 "compiled": bench.executor.layers.compiled, "warnings": bench.warnings},
            )  # fmt: skip


def calibrate_first(out: str, lock: str, deadline_s: float, cpu: bool) -> None:
    """Write what the node's own measurement says of this card, and what a bare process holds."""

    from agents.contract.requests.jobs import CalibrationJob
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
        write_row(out, {"what": "calibration", **asdict(found), **held, **_describe_pc(cpu=cpu)})


def _describe_pc(*, cpu: bool) -> dict[str, Any]:
    """Return what forecasts need to know of the card, and the versions."""
    import torch
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if not cpu:
        card = torch.cuda.get_device_properties(0)
        found |= {
            "name": card.name,
            "total_bytes": card.total_memory,
            "capability": [card.major, card.minor],
            "num_multiprocessors": card.multi_processor_count,
        }
    return found


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
    parser.add_argument("--seconds", type=float, default=300.0)
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
    os.environ.setdefault("OMP_NUM_THREADS", "1" if args.cpu else "2")
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
