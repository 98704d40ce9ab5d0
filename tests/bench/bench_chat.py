"""How fast conversations of unlike length train, against Unsloth and Transformers with PEFT.

Rows have log-normal lengths (mean 300 tokens before they are cut to `--limit`); about 60 % of their
tokens are learned. All rates count real tokens of whole optimizer steps. Ours is the trainer as it
is started for a run, with nothing set but `memory_gib`: it searches by itself, reads the rows
through its data path, and its rate is that of the journal's steps after the first few. The peers
are measured at every size and way to recompute that fits the card, and the best that fits under a
cap counts; their memory is what their tensors took, which is kinder to them.

    python3 -m tests.bench.bench_chat --only 'llama-3.2-3b:lora:16'      # SHAPE:KIND:CAP, * matches
    python3 -m tests.bench.bench_chat --only '*:qlora:12' --layers 8     # a quarter of the depth
    python3 -m tests.bench.bench_chat --only 'mistral-7b:qlora:14' --caps 14 --dora --goal 2
    python3 -m tests.bench.bench_chat --only 'qwen3*' --caps 16,24 --layers 8 --goal 2
    python3 -m tests.bench.bench_chat --cpu                              # tiny, to try it

With fewer layers the cap shrinks with the layers, for all engines alike, and the rates are those of
the shorter model. The peers' logits do not shrink, so a tight cap then favours ours: for ratios
that count under tight caps, take all layers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from agents.contract.spec import RunSpec
from tests.bench.engines.chat_rows import draw_lengths, make_rows, write_rows
from tests.bench.engines.engine_shapes import (
    CHAT_SHAPES,
    GIB,
    SHAPES,
    Size,
    list_values,
    round_depth,
    save_model,
    scale_cap,
)
from tests.bench.engines.fresh_process import Emit, FreshProcess, first_line, run_ahead, run_fresh
from tests.bench.engines.our_training import (
    Card,
    RunFailed,
    StartedRun,
    forecast,
    make_spec,
    read_card,
    summarize,
)
from tests.bench.engines.peer_training import PeerJob, train_peer

CAPS_GIB = "8,12,16,24"
MODES = ("unpacked", "packed", "equal")
GOAL, GOAL_PACKED, GOAL_UNLIKE = 1.3, 1.0, 0.85
MEAN, SIGMA = 300, 0.8
_MOST_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of a measurement."""

    size: Size
    device: str
    layers: int | None
    limit: int
    """Most tokens of a sequence."""
    mean: int
    step_tokens: int
    steps: int
    skipped: int
    at_once: tuple[int, ...]
    seconds: float


FULL = Scale(
    size="full", device="cuda:0", layers=None, limit=1024, mean=MEAN, step_tokens=16384, steps=16,
    skipped=6, at_once=(1, 2, 4, 8, 16), seconds=2.0,
)  # fmt: skip
TINY = Scale(
    size="tiny", device="cpu", layers=2, limit=96, mean=40, step_tokens=192, steps=3, skipped=1,
    at_once=(2,), seconds=0.05,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table."""

    shape: str
    kind: str
    cap_gib: int

    @property
    def name(self) -> str:
        """Name that `--only` matches."""
        return f"{self.shape}:{self.kind}:{self.cap_gib}"


def list_cells(caps: list[int], only: str) -> list[Cell]:
    """Return the cells that match one of the patterns, those of a model together.

    A pattern that begins with `*` means the five shapes of the chat table.
    """
    patterns = only.split(",")
    named = [one for one in patterns if not one.startswith("*")]
    return [
        cell
        for shape in SHAPES
        for kind in ("lora", "qlora")
        for cap in caps
        if (cell := Cell(shape=shape, kind=kind, cap_gib=cap))
        and any(fnmatch(cell.name, one) for one in (patterns if shape in CHAT_SHAPES else named))
    ]


def save_in_process(emit: Emit, folder: Path, shape: str, scale: Scale) -> None:
    """Save a model where the card is free."""
    started = time.perf_counter()
    save_model(folder, shape, layers=scale.layers, size=scale.size, device=scale.device)
    emit({"seconds": time.perf_counter() - started})


class Table:
    """Measures cells and prints their lines."""

    def __init__(self, args: argparse.Namespace, scale: Scale, card: Card | None) -> None:
        self._args = args
        self._scale = scale
        self._card = card
        self._lengths = draw_lengths(_MOST_ROWS, mean=scale.mean, sigma=SIGMA, most=scale.limit)

    def measure_peers(self, shape: str, kind: str, folder: Path) -> list[dict[str, Any]]:
        """Return what the peers reach at each of their settings."""
        args, scale, rows = self._args, self._scale, []
        job = PeerJob(
            engine="peft", shape=shape, kind=kind, lengths=tuple(self._lengths[:512]),
            limit=scale.limit, step_tokens=scale.step_tokens, layers=scale.layers,
            size=scale.size, dora=args.dora, experts=args.experts, at_once=scale.at_once,
            recompute=tuple(args.recompute.split(",")), most_gib=self._largest_cap(shape),
            seconds=scale.seconds, device=scale.device, folder=str(folder),
            attention=args.attention,
        )  # fmt: skip
        # Unsloth patches classes for one way to recompute; each gets a process of its own.
        jobs = [job, *(replace(job, engine="unsloth", recompute=(one,)) for one in job.recompute)]
        jobs = [one for one in jobs if one.engine in args.engines.split(",")]
        begun = (partial(FreshProcess, train_peer, one, warm=one.warm) for one in jobs)
        for one, process in zip(jobs, run_ahead(begun), strict=True):
            for report in process.reports():
                if "error" in report:
                    print(f"  {one.engine}: {first_line(report)}", flush=True)
                    if args.trace:
                        print(report.get("trace", ""), flush=True)
                    continue
                rows.append(report)
                print(f"  {describe_peer(report)}", flush=True)
        return rows

    def _largest_cap(self, shape: str) -> float:
        caps = map(int, self._args.caps.split(","))
        return max(scale_cap(cap, shape, self._scale.layers) for cap in caps)

    def start_ours(self, cell: Cell, mode: str, home: Path, folder: Path) -> StartedRun:
        """Start our trainer on unpacked, packed or equal rows."""
        scale, lengths = self._scale, self._list_lengths(mode)
        spec = self._make_spec(cell, mode, lengths)
        num_rows = spec.batch_sequences * scale.steps
        if mode == "packed":
            num_rows = num_rows * scale.limit * len(lengths) // sum(lengths)
        words = list_values(cell.shape, size=scale.size)["vocab_size"]
        chosen = make_rows(lengths[: max(16, num_rows)], words)
        run_id = f"{cell.cap_gib}-{mode}"
        rows = write_rows(home / f"{run_id}.jsonl", chosen)
        return StartedRun(home, run_id, spec, folder, rows, scale.device)

    def finish_ours(self, run: StartedRun, mode: str, folder: Path) -> dict[str, Any]:
        """Return the figures of a run.

        Raises:
            RunFailed: there are none.
        """
        found = summarize(run.finish(), self._scale.skipped)
        if self._card is not None:
            lengths = self._list_lengths(mode)
            try:
                found["forecast"] = forecast(
                    run.spec, folder, lengths, self._card, found["setting"]
                )
            except Exception as error:  # noqa: BLE001 - the rate is still worth a line
                print(f"  no forecast: {type(error).__name__}: {error}", flush=True)
        print(f"  ours {mode:8} {describe_ours(found)}", flush=True)
        return found

    def _list_lengths(self, mode: str) -> list[int]:
        return [self._scale.limit] * len(self._lengths) if mode == "equal" else self._lengths

    def _make_spec(self, cell: Cell, mode: str, lengths: list[int]) -> RunSpec:
        scale = self._scale
        mean = scale.limit if mode == "packed" else sum(lengths) / len(lengths)
        cap = scale_cap(cell.cap_gib, cell.shape, scale.layers) if self._card else None
        return make_spec(
            cell.kind, SHAPES[cell.shape].targets, dora=self._args.dora,
            experts=self._args.experts,
            sequence_tokens=scale.limit, packing=mode == "packed",
            batch_sequences=max(1, round(scale.step_tokens / mean)), max_steps=scale.steps,
            memory_gib=cap,
        )  # fmt: skip

    def compare(
        self, cells: list[Cell], peers: list[dict[str, Any]], home: Path, folder: Path
    ) -> Iterator[dict[str, Any]]:
        """Measure ours under each cap, print the ratios that matter, and yield all figures."""
        args, scale = self._args, self._scale
        tasks = [(cell, mode) for cell in cells for mode in args.modes.split(",")]
        begun = (partial(self.start_ours, *task, home, folder) for task in tasks)
        ours: dict[Cell, dict[str, Any]] = {cell: {} for cell in cells}
        for (cell, mode), run in zip(tasks, run_ahead(begun), strict=True):
            try:
                ours[cell][mode] = self.finish_ours(run, mode, folder)
            except RunFailed as error:
                print(f"  ours {mode:8} failed: {error}", flush=True)
            if mode != tasks[-1][1]:
                continue
            cap = scale_cap(cell.cap_gib, cell.shape, scale.layers)
            fitting = [row for row in peers if row["memory_gib"] <= cap]
            best = max(fitting, key=lambda row: row["tokens_per_s"], default=None)
            print(describe_cell(cell, cap, ours[cell], best, args.goal), flush=True)
            if best is None and peers:
                least = min(peers, key=lambda row: row["memory_gib"])
                print(f"  the smallest of the peers: {describe_peer(least)}", flush=True)
            yield {"cell": cell.name, "layers": scale.layers, "cap_gib": cap, "best_peer": best,
                   "ours": ours[cell], "peers": peers}  # fmt: skip


def describe_peer(row: dict[str, Any]) -> str:
    """Return a line on one setting of a peer."""
    return (
        f"{row['engine']:8} {row['at_once']:2} at once, recompute {row['recompute']:4} "
        f"{row['tokens_per_s']:8,.0f} tok/s, peak {row['memory_gib']:5.2f} GiB"
    )


def describe_ours(found: dict[str, Any]) -> str:
    """Return a line on one run of ours."""
    said = f"{found['tokens_per_s']:8,.0f} tok/s, peak {found['peak_gib']:5.2f} GiB"
    known = found.get("forecast", {})
    if "needed_gib" in known and found["needed_gib"]:
        error = known["needed_gib"] / found["needed_gib"] - 1
        said += f" (needed {found['needed_gib']:.2f}, forecast {error:+.1%})"
    said += f"; step {found['step_s']:.3f} s"
    if "step_s" in known:
        said += f" (forecast {known['step_s'] / found['step_s'] - 1:+.0%})"
    setting = found["setting"]
    chosen = ", ".join(
        f"{key} {setting[key]}" for key in ("micro_tokens", "num_recomputed", "num_moved")
        if key in setting
    )  # fmt: skip
    if found["believed_tokens_per_s"]:
        said += f"; best speed in the search {found['believed_tokens_per_s']:,.0f}"
    said += f"; {chosen}; {found['to_first_step_s']:.0f} s from imports to the first step"
    return said + "".join(f"\n    event: {text[:160]}" for text in found["events"])


def describe_cell(
    cell: Cell, cap_gib: float, ours: dict[str, Any], best: dict[str, Any] | None, goal: float
) -> str:
    """Return the line of a cell: each figure as a ratio, with its goal."""
    rates = {mode: found["tokens_per_s"] for mode, found in ours.items()}
    said = [f"{cell.name} (cap {cap_gib:.2f} GiB here)"]
    chat = max((rates[mode] for mode in ("unpacked", "packed") if mode in rates), default=None)
    if chat is None:
        said.append("ours: none")
    elif best is None:
        said.append(f"ours {chat:,.0f} tok/s, no peer fits")
    else:
        for mode in ("unpacked", "packed"):
            if mode in rates:
                ratio = rates[mode] / best["tokens_per_s"]
                said.append(f"{mode} {ratio:.2f} of {best['engine']} (goal {goal})")
    if "packed" in rates and "unpacked" in rates:
        ratio = rates["packed"] / rates["unpacked"]
        said.append(f"packed / unpacked {ratio:.2f} (goal {GOAL_PACKED})")
    for mode in ("unpacked", "packed"):
        if mode in rates and "equal" in rates:
            ratio = rates[mode] / rates["equal"]
            said.append(f"{mode} / equal rows {ratio:.2f} (goal {GOAL_UNLIKE})")
    return "= " + "; ".join(said)


def count_weights_gib(shape: str, kind: str) -> float:
    """Return about how much the base model's weights take at full depth, for a quick refusal."""
    from app.planning.shape.model_shape import read_shape

    values = {**SHAPES[shape].values, "model_type": _MODEL_TYPES.get(shape, "llama")}
    known = read_shape(values)
    share = 0.3 if kind == "qlora" else 1.0
    matrices = 1 if values["tie_word_embeddings"] else 2
    outside = matrices * values["vocab_size"] * values["hidden_size"]
    return 2 * (outside + share * (known.num_parameters - outside)) / GIB


_MODEL_TYPES = {"qwen3-30b-a3b": "qwen3_moe", "gemma-2-2b": "gemma2"}


def run(args: argparse.Namespace) -> None:
    """Measure the cells, those of one model and kind together."""
    scale = TINY if args.cpu else replace(
        FULL, layers=args.layers, limit=args.limit, steps=args.steps, seconds=args.seconds,
        at_once=tuple(map(int, args.at_once.split(","))),
    )  # fmt: skip
    card = None if args.cpu else read_card()
    caps = [int(cap) for cap in args.caps.split(",")]
    table = Table(args, scale, card)
    cells = list_cells(caps, args.only)
    root = Path(tempfile.mkdtemp(prefix="rackless-bench-"))
    for shape, kind in dict.fromkeys((cell.shape, cell.kind) for cell in cells):
        mine = [cell for cell in cells if (cell.shape, cell.kind) == (shape, kind)]
        for cell in [one for one in mine if count_weights_gib(shape, kind) > one.cap_gib]:
            print(f"= {cell.name}: the weights alone are larger than the cap", flush=True)
            mine.remove(cell)
        if not mine:
            continue
        depth = f"{round_depth(shape, scale.layers)} of {round_depth(shape, None)} layers"
        print(f"{shape} {kind}, {depth}", flush=True)
        folder = root / shape
        engines = args.engines.split(",")
        if "peft" not in engines:  # whose process saves the model, too
            for report in run_fresh(save_in_process, folder, shape, scale):
                if "error" in report:
                    print(f"  not made: {first_line(report)}", flush=True)
        peers = table.measure_peers(shape, kind, folder)
        if "ours" not in engines or not (folder / "saved").exists():
            continue
        home = root / f"home-{shape}-{kind}"
        home.mkdir()
        for found in table.compare(mine, peers, home, folder):
            if args.out:
                with args.out.open("a", encoding="ascii") as file:
                    file.write(json.dumps(found) + "\n")
        shutil.rmtree(home)
        if not any(cell.shape == shape for cell in cells[cells.index(mine[-1]) + 1 :]):
            shutil.rmtree(folder)
    shutil.rmtree(root)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="patterns of SHAPE:KIND:CAP, commas between")
    parser.add_argument("--caps", default=CAPS_GIB, help="GiB")
    parser.add_argument("--engines", default="peft,unsloth,ours")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--layers", type=int, help="depth; caps shrink with it")
    parser.add_argument("--limit", type=int, default=FULL.limit, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=FULL.steps)
    parser.add_argument("--seconds", type=float, default=FULL.seconds, help="of a peer's setting")
    parser.add_argument("--at-once", default="1,2,4,8,16", help="sequences, of the peers")
    parser.add_argument("--recompute", default="all,none", help="of the peers")
    parser.add_argument("--attention", default="", help="of PEFT's model, as flex_attention")
    parser.add_argument("--goal", type=float, default=GOAL, help="ratio to the better peer")
    parser.add_argument("--dora", action="store_true", help="in all engines")
    parser.add_argument("--experts", action="store_true", help="adapters on experts, too")
    parser.add_argument("--cpu", action="store_true", help="tiny models, to try it")
    parser.add_argument("--trace", action="store_true", help="print where a peer failed")
    parser.add_argument("--out", type=Path, help="file for a JSON line per cell")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
