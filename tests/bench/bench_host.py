"""What the host costs: launching a layer, ours beside eager Transformers with PEFT.

First, with models of a quarter of their width and 128 tokens per micro-batch, so that the card has
next to nothing to do: milliseconds of host time per layer and micro-batch, forward and backward,
over rows of unlike length that nothing replays. Then, with `--slow`, the trainer as it is started
for a run on conversations, each layer slowed by a sleep on the device to what an RTX 4070 takes for
the full width: its rate as a share of the ideal, which is the sum of the sleeps for real tokens.

    python3 -m tests.bench.bench_host                              # host time, five shapes
    python3 -m tests.bench.bench_host --slow --only 'llama*'       # share of the ideal
    python3 -m tests.bench.bench_host --cpu                        # tiny, to try it
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.engines.chat_rows import draw_lengths, make_rows, write_rows
from tests.bench.engines.engine_probe import TrainingParts, count_calls, run_probed
from tests.bench.engines.engine_shapes import CHAT_SHAPES, SHAPES, Size, list_values, save_model
from tests.bench.engines.fresh_process import Emit, FreshProcess, first_line, run_ahead, run_fresh
from tests.bench.engines.our_training import (
    RunFailed,
    StartedRun,
    make_spec,
    read_card,
    run_trainer,
    summarize,
)
from tests.bench.engines.peer_training import PeerJob, train_peer

MICRO_TOKENS = 128
GOAL, GOAL_SLOW = 1.0, 0.97
SLOW_FLOPS_PER_S = 25e12
"""Reached by an RTX 4070 in bf16 products."""
SLOW_LIMIT, SLOW_MEAN, SLOW_STEP_TOKENS = 1024, 300, 8192
_TURNS = 3


def save_in_process(emit: Emit, folder: Path, shape: str, layers: int, size: Size) -> None:
    """Save a model."""
    device = "cpu" if size == "tiny" else "cuda:0"
    save_model(folder, shape, layers=layers, size=size, device=device)


def time_host(parts: TrainingParts) -> None:
    """Report milliseconds per micro-batch of our engine, without replays."""
    executor, strategy = parts.executor, parts.strategy
    executor.drop_graphs()
    executor.replayer, executor.is_repeating = None, False
    counts = count_calls(parts.state.model.module.get_input_embeddings())
    next(counts)
    seconds, micro_batches = 0.0, 0
    for step in range(1, _TURNS + 2):
        batch = strategy.choose_batch(step)
        started = parts.wait()
        executor.add_gradients(batch.mine)
        took_s, count = parts.wait() - started, next(counts)
        if step > 1:  # sizes that were not seen before may compile
            seconds, micro_batches = seconds + took_s, micro_batches + count
    ms = 1000 * seconds / micro_batches
    parts.report(ms=ms, micro_batches=micro_batches, compiled=executor.layers.compiled)


class HostTable:
    """Measures host time, shape by shape: first PEFT's, whose process saves the model, too."""

    def __init__(self, layers: int, root: Path, *, cpu: bool) -> None:
        self._layers = layers
        self._root = root
        self._size: Size = "tiny" if cpu else "narrow"
        self._device = "cpu" if cpu else "cuda:0"
        self._num_rows = 64 if cpu else 512
        self._seconds = 0.1 if cpu else 2.0
        self._lengths = draw_lengths(self._num_rows, mean=45, sigma=0.6, most=MICRO_TOKENS)

    def measure(self, cells: list[tuple[str, str]]) -> None:
        """Print a line for each shape and kind."""
        begins = [begin for cell in cells for begin in (self._begin_peft, self._begin_ours)]
        begun = (partial(begin, *cells[place // 2]) for place, begin in enumerate(begins))
        found: dict[str, float] = {}
        for place, process in enumerate(run_ahead(begun)):
            if isinstance(process, FreshProcess):
                found = self._finish_peft(process)
            else:
                show_host(*cells[place // 2], self._layers, found | self._finish_ours(process))

    def _folder(self, shape: str) -> Path:
        return self._root / f"{shape}-{self._size}-{self._layers}"

    def _begin_peft(self, shape: str, kind: str) -> FreshProcess:
        job = PeerJob(
            engine="peft", shape=shape, kind=kind, lengths=tuple(self._lengths),
            limit=MICRO_TOKENS, step_tokens=sum(self._lengths) // 2, layers=self._layers,
            size=self._size, recompute=("none",), at_once=(1,), seconds=self._seconds,
            device=self._device, folder=str(self._folder(shape)),
        )  # fmt: skip
        return FreshProcess(train_peer, job, warm=job.warm)

    def _begin_ours(self, shape: str, kind: str) -> StartedRun:
        home = self._root / f"home-{shape}-{kind}"
        home.mkdir()
        spec = make_spec(
            kind, SHAPES[shape].targets, sequence_tokens=MICRO_TOKENS, max_steps=2,
            batch_sequences=self._num_rows // 2, recompute="none",
        )  # fmt: skip
        words = list_values(shape, size=self._size)["vocab_size"]
        rows = write_rows(home / "rows.jsonl", make_rows(self._lengths, words))
        target = partial(run_probed, probe=time_host, micro_tokens=MICRO_TOKENS, slow_s=0.0)
        folder = self._folder(shape)
        return StartedRun(home, "host", spec, folder, rows, self._device, target=target)

    def _finish_peft(self, process: FreshProcess) -> dict[str, float]:
        found = {}
        for report in process.reports():
            if "error" in report:
                print(f"  peft: {first_line(report)}", flush=True)
            else:
                found["peft"] = 1000 * report["micro_batch_s"] / self._layers
        return found

    def _finish_ours(self, run: StartedRun) -> dict[str, float]:
        try:
            lines = run.finish()
        except RunFailed as error:
            print(f"  ours failed: {error}", flush=True)
            return {}
        for line in lines:
            if line["kind"] == "warning":
                print(f"  event: {line['message'][:160]}", flush=True)
        (probed,) = [line for line in lines if line["kind"] == "probe"]
        return {"ours": probed["ms"] / self._layers}


def show_host(shape: str, kind: str, layers: int, found: dict[str, float]) -> None:
    """Print a line."""
    said = [f"{name} {found[name]:.3f} ms" for name in ("ours", "peft") if name in found]
    if len(said) == 2:
        said.append(f"{found['ours'] / found['peft']:.2f} of peft (goal below {GOAL})")
    print(f"= {shape} {kind}, {layers} layers, per layer and micro-batch: {'; '.join(said)}",
          flush=True)  # fmt: skip


def count_layer_parameters(shape: str) -> int:
    """Return the parameters of a decoder layer at full width that a token is multiplied with.

    >>> count_layer_parameters("llama-3.2-3b")
    100663296
    """
    values = SHAPES[shape].values
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    width = values.get("head_dim", hidden // heads)
    attention = 2 * heads * width + 2 * values["num_key_value_heads"] * width
    return int(hidden * (attention + 3 * values["intermediate_size"]))


def measure_slow(
    shape: str, kind: str, layers: int, mode: str, root: Path, *, cpu: bool
) -> dict[str, Any]:
    """Return the figures of a run with slow layers, and its share of the ideal.

    Raises:
        RunFailed: there are none.
    """
    size: Size = "tiny" if cpu else "narrow"
    limit, mean, step_tokens = (64, 24, 128) if cpu else (SLOW_LIMIT, SLOW_MEAN, SLOW_STEP_TOKENS)
    steps, skipped = (3, 1) if cpu else (14, 6)
    folder = root / f"{shape}-{size}-{layers}"
    for report in run_fresh(save_in_process, folder, shape, layers, size):
        print(f"  not made: {first_line(report)}", flush=True)
    home = root / f"home-{shape}-{kind}-{mode}"
    home.mkdir()
    lengths = draw_lengths(1024, mean=mean, sigma=0.8, most=limit)
    true_mean = limit if mode == "packed" else sum(lengths) / len(lengths)
    batch = max(1, round(step_tokens / true_mean))
    spec = make_spec(
        kind, SHAPES[shape].targets, sequence_tokens=limit, packing=mode == "packed",
        max_steps=steps, batch_sequences=batch,
    )  # fmt: skip
    words = list_values(shape, size=size)["vocab_size"]
    rows = write_rows(home / "rows.jsonl", make_rows(lengths, words))
    slow_s = 2 * count_layer_parameters(shape) / SLOW_FLOPS_PER_S
    target = partial(run_probed, probe=None, micro_tokens=None, slow_s=slow_s)
    device = "cpu" if cpu else "cuda:0"
    lines = run_trainer(home, "slow", spec, folder, rows, device, target=target)
    found = summarize(lines, skipped)
    ideal_per_s = 1 / (2 * layers * slow_s)
    return {**found, "share": found["tokens_per_s"] / ideal_per_s}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*:lora", help="patterns of SHAPE:KIND, commas between")
    parser.add_argument("--layers", type=int, help="24, or 12 with --slow")
    parser.add_argument("--slow", action="store_true", help="share of the ideal of a slow card")
    parser.add_argument("--modes", default="unpacked,packed", help="of --slow")
    parser.add_argument("--cpu", action="store_true", help="tiny models, to try it")
    args = parser.parse_args()
    layers = args.layers or (2 if args.cpu else 12 if args.slow else 24)
    if not args.cpu:
        read_card()
    patterns = args.only.split(",")
    cells = [(shape, kind) for shape in CHAT_SHAPES for kind in ("lora", "qlora")
             if any(fnmatch(f"{shape}:{kind}", one) for one in patterns)]  # fmt: skip
    root = Path(tempfile.mkdtemp(prefix="rackless-bench-"))
    if not args.slow:
        HostTable(layers, root, cpu=args.cpu).measure(cells)
    for shape, kind in cells if args.slow else ():
        for mode in args.modes.split(","):
            try:
                slow = measure_slow(shape, kind, layers, mode, root, cpu=args.cpu)
            except RunFailed as error:
                print(f"= {shape} {kind} {mode}: failed: {error}", flush=True)
                continue
            print(f"= {shape} {kind} {mode}: {slow['share']:.3f} of the ideal "
                  f"(goal {GOAL_SLOW}), {slow['tokens_per_s']:,.0f} tok/s", flush=True)  # fmt: skip
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
