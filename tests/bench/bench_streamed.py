"""Train models that are bigger than the card: frozen layers streamed from memory or from a disk.

One row of RUNS each. `capped` runs the trainer as it is started for a user, under a cap of the
card's memory: it chooses its own setting; beside it the same model without a cap, and Transformers
with PEFT and accelerate's CPU offload under the same cap. `fixed` takes the 70B shape with all
layers recomputing at given tokens at once, and times passes twice: as they are, and with copies
left out, which is the speed of layers that are there already. With `--slow` each layer is slowed by
sleeps on the device to a card of 25 TFLOP/s; 20 of the 80 layers are enough then, of which none
stays on the GPU. `disk` leaves all layers in files.

Weights are random and drawn when they are read; all streamed layers are distinct.

    python3 -m tests.bench.bench_streamed --only 13b                   # capped, ~4 minutes
    python3 -m tests.bench.bench_streamed --only 13b --parts streamed  # of it one part
    python3 -m tests.bench.bench_streamed --only 70b --slow
    python3 -m tests.bench.bench_streamed --only disk
    python3 -m tests.bench.bench_streamed --cpu                        # tiny, to try all of it
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.bench_host import count_layer_parameters
from tests.bench.engines.chat_rows import make_rows, write_rows
from tests.bench.engines.engine_probe import TrainingParts, find_rest, run_probed
from tests.bench.engines.engine_shapes import GIB, SHAPES, Size, list_values, round_depth
from tests.bench.engines.fresh_process import Emit, first_line, run_fresh
from tests.bench.engines.offloaded_peer import train_offloaded
from tests.bench.engines.our_training import RunFailed, make_spec, read_card, run_trainer, summarize
from tests.bench.engines.peer_training import PeerJob
from tests.bench.engines.random_model import keep_no_layers, save_outline, use_random_weights

GOAL_RESIDENT, GOAL_PEER, GOAL_SLOW = 0.6, 3.0, 0.95
SLOW_FLOPS_PER_S = 25e12
_ALL_LAYERS = 1 << 20
_SLOW_LAYERS = 20


@dataclass(frozen=True, kw_only=True)
class StreamedRun:
    """A model and the card that it is trained on."""

    shape: str
    cap_gib: float
    mode: str
    """`capped`, `fixed` or `disk`."""
    layers: int | None = None
    limit: int = 2048
    """Tokens of every row."""
    sizes: tuple[int, ...] = ()
    """Tokens at once; empty: the trainer's own search."""
    rows_per_step: int = 16
    steps: int = 8


RUNS = {
    "13b": StreamedRun(shape="llama-2-13b", cap_gib=8, mode="capped"),
    "32b": StreamedRun(shape="qwen2.5-32b", cap_gib=12, mode="capped", rows_per_step=8),
    "70b": StreamedRun(shape="llama-2-70b", cap_gib=11, mode="fixed", sizes=(2048, 8192)),
    "disk": StreamedRun(
        shape="llama-2-70b", cap_gib=11, mode="disk", layers=24,
        sizes=(2048, 4096, 8192, 16384),
    ),
}  # fmt: skip
PARTS = ("streamed", "resident", "peer")


def run_random(
    environ: dict[str, str], *, probe: Any, micro_tokens: int | None, slow_s: float, on_disk: bool
) -> None:
    """Be a rank whose weights are drawn when they are read.

    Args:
        environ: Of the rank.
        probe: Called after the run's last step; None: nothing is.
        micro_tokens: With all layers recomputing, instead of a search; None: search.
        slow_s: See `run_probed`.
        on_disk: Whether memory has room for no layer, rather than for all of them.
    """
    os.environ.update(environ)
    use_random_weights()
    from agents.trainer import streamed_store

    if on_disk:
        streamed_store.choose_budget = lambda num_local_ranks: 0
    else:
        # Nothing is written: the time of the disk of this machine is no part of the figures.
        keep_no_layers()
    run_probed(environ, probe, micro_tokens, slow_s, _ALL_LAYERS)


def time_sizes(parts: TrainingParts, sizes: tuple[int, ...]) -> None:
    """Report passes of each size with the copies of layers, and without them."""
    from agents.trainer.data.examples import choose_examples
    from agents.trainer.execution.setting import ExecutionSetting, apply_setting, fill_spare_memory

    rest = find_rest(parts.state.model.module)
    slow_s = rest.seconds_per_token if rest is not None else 0.0
    executor, device = parts.executor, parts.context.device
    stream = executor.layers.stream
    if stream is None:
        parts.report(what="refused", why="the card has room for the whole model")
        return
    for size in sizes:
        if rest is not None:
            rest.seconds_per_token = 0.0  # until passes are timed
        setting = ExecutionSetting(micro_tokens=size, num_recomputed=_ALL_LAYERS)
        apply_setting(executor, setting)
        part = choose_examples(parts.state.train, size)
        if not executor.try_gradients(part):
            parts.report(what="size", tokens=size, error="out of memory")
            continue
        if device.type == "cuda" and stream.reader is None and not slow_s:
            fill_spare_memory(executor, device, part, parts.strategy.make_reserve())
        before = stream.copied_bytes
        executor.try_gradients(part)
        copied_bytes = stream.copied_bytes - before
        if rest is not None:
            rest.seconds_per_token = slow_s
        times = 1 if slow_s else 2
        copied_s = time_pass(parts, part, times)
        stream.reach = lambda *args, **more: None
        without_s = time_pass(parts, part, times)
        del stream.reach
        parts.report(
            what="size",
            tokens=sum(example.num_tokens for example in part.examples),
            copied_s=copied_s,
            without_s=without_s,
            copied_bytes=copied_bytes,
            layer_bytes=stream.streamed_bytes / max(1, stream.num_layers - stream.num_resident),
            num_layers=stream.num_layers,
            num_resident=stream.num_resident,
            disk_bytes_per_s=stream.reader.bytes_per_s if stream.reader else None,
            **measure_memory(device),
        )


def time_pass(parts: TrainingParts, part: Any, times: int) -> float:
    """Return the seconds of the fastest of some forward and backward passes."""
    best = float("inf")
    for _ in range(times):
        started = parts.wait()
        if not parts.executor.try_gradients(part):
            raise RuntimeError("memory ran out in a pass that fitted before")
        best = min(best, parts.wait() - started)
    return best


def measure_memory(device: Any) -> dict[str, float]:
    """Return the peak of the GPU's memory, and the rate of its bus from pinned memory."""
    import time

    import torch

    if device.type != "cuda":
        return {}
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    there.copy_(host)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(4):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    rate = 4 * len(host) / (time.perf_counter() - started)
    peak_gib = torch.cuda.max_memory_allocated(device) / GIB
    return {"bus_bytes_per_s": rate, "peak_gib": peak_gib}


class Bench:
    """Measures runs in a folder that is removed afterwards."""

    def __init__(self, root: Path, *, cpu: bool, slow: bool) -> None:
        self._root = root
        self._cpu = cpu
        self._slow = slow
        self._size: Size = "tiny" if cpu else "full"
        self._device = "cpu" if cpu else "cuda:0"
        self._number = 0

    def measure(self, name: str, run: StreamedRun, parts: tuple[str, ...]) -> None:
        """Print the figures of a run."""
        if self._cpu:
            run = replace(
                run, layers=4, limit=64, sizes=tuple(64 * 2**n for n in range(len(run.sizes))),
                rows_per_step=4, steps=2,
            )  # fmt: skip
        elif self._slow and run.mode != "capped":
            run = replace(run, layers=min(run.layers or _SLOW_LAYERS, _SLOW_LAYERS))
        folder = self._root / f"model-{run.shape}-{run.layers}"
        for report in run_fresh(save_in_process, str(folder), run.shape, run.layers, self._size):
            print(f"  not made: {first_line(report)}", flush=True)
        try:
            if run.mode == "capped":
                self._measure_capped(name, run, folder, parts)
            else:
                self._measure_sizes(name, run, folder)
        except RunFailed as error:
            print(f"= {name}: failed: {error}", flush=True)

    def _measure_capped(
        self, name: str, run: StreamedRun, folder: Path, parts: tuple[str, ...]
    ) -> None:
        speeds: dict[str, float] = {}
        for part, parallel in (("streamed", "streamed"), ("resident", "data")):
            if part not in parts:
                continue
            cap = {"memory_gib": run.cap_gib} if part == "streamed" and not self._cpu else {}
            found = summarize(self._train(run, folder, parallel=parallel, **cap), skipped=2)
            speeds[part] = found["tokens_per_s"]
            setting = {key: one for key, one in found["setting"].items() if one is not None}
            print(f"  {name} {part}: {speeds[part]:,.0f} tok/s, peak {found['peak_gib']:.1f} GiB, "
                  f"first step after {found['to_first_step_s']:.0f} s, {setting}",
                  flush=True)  # fmt: skip
        if "peer" in parts:
            speeds["peer"] = self._measure_peer(name, run, folder)
        if {"streamed", "resident"} <= speeds.keys():
            ratio = speeds["streamed"] / speeds["resident"]
            print(f"= {name} under {run.cap_gib:g} GiB: {ratio:.2f} of resident without a cap "
                  f"(goal {GOAL_RESIDENT})", flush=True)  # fmt: skip
        if speeds.get("peer") and "streamed" in speeds:
            ratio = speeds["streamed"] / speeds["peer"]
            print(f"= {name} under {run.cap_gib:g} GiB: {ratio:.1f} times CPU offload by "
                  f"accelerate (goal {GOAL_PEER})", flush=True)  # fmt: skip

    def _measure_peer(self, name: str, run: StreamedRun, folder: Path) -> float:
        job = PeerJob(
            engine="peft", shape=run.shape, kind="qlora", limit=run.limit, layers=run.layers,
            lengths=(run.limit,) * 32, step_tokens=4 * run.limit, size=self._size,
            at_once=(1, 2, 4), seconds=0.1 if self._cpu else 2.5, device=self._device,
        )  # fmt: skip
        best = 0.0
        for report in run_fresh(train_offloaded, job, str(folder), run.cap_gib):
            if "error" in report or "refused" in report:
                why = report.get("refused") or first_line(report)
                print(f"  {name} peer: {why[:120]}", flush=True)
                continue
            best = max(best, report["tokens_per_s"])
            print(f"  {name} peer, {report['at_once']} at once: {report['tokens_per_s']:,.0f} "
                  f"tok/s, {report['layers_on_gpu']} layers on the GPU, peak "
                  f"{report['memory_gib']:.1f} GiB", flush=True)  # fmt: skip
        return best

    def _measure_sizes(self, name: str, run: StreamedRun, folder: Path) -> None:
        on_disk = run.mode == "disk"
        # A forward pass of 2 FLOP for each weight and token, and a backward pass that recomputes.
        slow_s = 3 * count_layer_parameters(run.shape) / SLOW_FLOPS_PER_S if self._slow else 0.0
        if self._cpu:
            slow_s = min(slow_s, 1e-5)
        lines = self._train(
            replace(run, steps=1, rows_per_step=max(1, run.sizes[0] // run.limit)),
            folder,
            parallel="streamed",
            probe=partial(time_sizes, sizes=run.sizes),
            micro_tokens=run.sizes[0],
            slow_s=slow_s,
            on_disk=on_disk,
            **({} if self._cpu else {"memory_gib": run.cap_gib}),
        )
        found = [line for line in lines if line["kind"] == "probe"]
        for line in found:
            if "error" in line or line["what"] == "refused":
                print(f"  {name}: {line.get('error') or line['why']}", flush=True)
                continue
            show_size(name, line, slow=self._slow)
        if on_disk:
            show_crossing(name, [line for line in found if line.get("copied_s")])

    def _train(
        self,
        run: StreamedRun,
        folder: Path,
        *,
        parallel: str,
        probe: Any = None,
        micro_tokens: int | None = None,
        slow_s: float = 0.0,
        on_disk: bool = False,
        **changes: Any,
    ) -> list[dict[str, Any]]:
        self._number += 1
        home = self._root / f"home-{self._number}"
        home.mkdir()
        num_rows = max(2 * run.rows_per_step, max(run.sizes, default=0) // run.limit)
        words = list_values(run.shape, size=self._size)["vocab_size"]
        rows = write_rows(home / "rows.jsonl", make_rows([run.limit] * num_rows, words))
        spec = make_spec(
            "qlora", SHAPES[run.shape].targets, sequence_tokens=run.limit, parallel=parallel,
            batch_sequences=run.rows_per_step, max_steps=run.steps, rebalance=False, **changes,
        )  # fmt: skip
        target = partial(
            run_random, probe=probe, micro_tokens=micro_tokens, slow_s=slow_s, on_disk=on_disk
        )
        try:
            lines = run_trainer(home, "streamed", spec, folder, rows, self._device, target=target)
            for line in lines:
                if line["kind"] == "warning":
                    print(f"    {line['message']}", flush=True)
            return lines
        finally:
            show_search(home)
            shutil.rmtree(home, ignore_errors=True)


def save_in_process(emit: Emit, folder: str, shape: str, layers: int | None, size: Size) -> None:
    """Save the outline of a model; torch shall not be imported where processes are started."""
    save_outline(Path(folder), shape, layers=layers and round_depth(shape, layers), size=size)


def show_search(home: Path) -> None:
    """Print what the trainer has measured to choose its setting."""
    for log in home.glob("runs/*/attempts/*/rank-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if "tokens at once" in line:
                print(f"    {line}", flush=True)


def show_size(name: str, line: dict[str, Any], *, slow: bool) -> None:
    """Print a line for a number of tokens at once."""
    tokens, copied_s, without_s = line["tokens"], line["copied_s"], line["without_s"]
    rates = [f"copied {line['copied_bytes'] / copied_s / 1e9:.1f} GB/s"]
    if line.get("bus_bytes_per_s"):
        rates.append(f"bus {line['bus_bytes_per_s'] / 1e9:.1f} GB/s")
    if line["disk_bytes_per_s"]:
        rates.append(f"disk {line['disk_bytes_per_s'] / 1e9:.2f} GB/s")
    goal = f" (goal {GOAL_SLOW})" if slow else ""
    print(f"= {name}{' slowed' if slow else ''}, {tokens:,} tokens at once: "
          f"{tokens / copied_s:,.0f} tok/s, {without_s / copied_s:.3f} of resident{goal}; "
          f"{line['num_resident']} of {line['num_layers']} layers stay; {', '.join(rates)}; peak "
          f"{line.get('peak_gib', 0):.1f} GiB", flush=True)  # fmt: skip


def show_crossing(name: str, lines: list[dict[str, Any]]) -> None:
    """Print from how many tokens at once compute hides the disk, beside the forecast.

    A forward pass is a third of a pass that recomputes; each layer has to be read within its own.
    """
    if not lines:
        return
    last = lines[-1]
    token_s = last["without_s"] / last["tokens"] / 3 / last["num_layers"]
    rate = last["disk_bytes_per_s"]
    expected = last["layer_bytes"] / (rate * token_s)
    hidden = [line["tokens"] for line in lines if line["without_s"] > 0.97 * line["copied_s"]]
    said = f"{hidden[0]:,}" if hidden else f"more than {last['tokens']:,}"
    print(f"= {name}: the disk reads {rate / 1e9:.2f} GB/s; compute hides it from {said} tokens at "
          f"once of the measured ones, forecast {expected:,.0f}", flush=True)  # fmt: skip


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(RUNS), help="names of RUNS, commas between")
    parser.add_argument("--parts", default=",".join(PARTS), help="of capped runs")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument(
        "--sizes", help="tokens at once, commas between, of runs that are not capped"
    )
    parser.add_argument("--slow", action="store_true", help="play a card of 25 TFLOP/s")
    parser.add_argument("--cpu", action="store_true", help="tiny models, to try it")
    args = parser.parse_args()
    if not args.cpu:
        read_card()
    root = Path(tempfile.mkdtemp(prefix="rackless-bench-"))
    bench = Bench(root, cpu=args.cpu, slow=args.slow)
    for name in args.only.split(","):
        run = RUNS[name]
        if args.layers:
            run = replace(run, layers=args.layers)
        if args.sizes and run.sizes:
            run = replace(run, sizes=tuple(map(int, args.sizes.split(","))))
        bench.measure(name, run, tuple(args.parts.split(",")))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
