"""How near the setting that our search chose comes to the best of all settings.

A run trains as it is started for a user: it searches, trains, and watches its speed. After its last
step the same process times whole steps over the same rows at the setting in use, then at every
size of micro-batch, share of layers that recompute and share that offload. Settings that memory
rules out are skipped, and so are those that only recompute more than one that fits, or that offload
without making room for weights in 16 bits; the setting in use is timed again at the end.

    python3 -m tests.bench.bench_settings --only 'chat-3b*'     # names of RUNS, * matches
    python3 -m tests.bench.bench_settings --layers 8            # all ten, with fewer layers
    python3 -m tests.bench.bench_settings --cpu                 # tiny, to try it
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.bench_chat import FULL, SIGMA, TINY, Scale, save_in_process
from tests.bench.engines.chat_rows import (
    draw_lengths,
    make_pairs,
    make_rows,
    write_pairs,
    write_rows,
)
from tests.bench.engines.engine_probe import TrainingParts, run_probed
from tests.bench.engines.engine_shapes import SHAPES, list_values, scale_cap
from tests.bench.engines.fresh_process import first_line, run_fresh
from tests.bench.engines.our_training import RunFailed, make_spec, read_card, run_trainer, summarize

GOAL = 0.95
SHARES = (0.0, 0.25, 0.5, 1.0)
"""Of the layers that recompute, or offload."""
_WARM_STEPS, _TIMED_STEPS = 3, 3
_LONG_S = 12.0
"""A step that takes longer is timed once."""


@dataclass(frozen=True, kw_only=True)
class GivenRun:
    """A run whose setting is judged."""

    shape: str
    kind: str
    cap_gib: float
    limit: int = 1024
    mode: str = "unpacked"
    """`unpacked`, `packed`, `equal`, or `pairs` for DPO."""


RUNS = {
    "chat-3b-lora": GivenRun(shape="llama-3.2-3b", kind="lora", cap_gib=16),
    "chat-3b-lora-packed": GivenRun(shape="llama-3.2-3b", kind="lora", cap_gib=16, mode="packed"),
    "chat-7b-qlora": GivenRun(shape="qwen2.5-7b", kind="qlora", cap_gib=12, limit=4096),
    "chat-2b-capped-scores": GivenRun(shape="gemma-2-2b", kind="qlora", cap_gib=10, limit=3072),
    "equal-phi-lora": GivenRun(
        shape="phi-3-mini", kind="lora", cap_gib=20, limit=2048, mode="equal"
    ),
    "equal-phi-qlora": GivenRun(shape="phi-3-mini", kind="qlora", cap_gib=10, mode="equal"),
    "chat-mistral-packed": GivenRun(
        shape="mistral-7b", kind="qlora", cap_gib=12, limit=2048, mode="packed"
    ),
    "chat-1.5b-lora": GivenRun(shape="qwen2.5-1.5b", kind="lora", cap_gib=7),
    "pairs-1.5b": GivenRun(shape="qwen2.5-1.5b", kind="lora", cap_gib=14, mode="pairs"),
    "chat-3b-qlora": GivenRun(shape="llama-3.2-3b", kind="qlora", cap_gib=8, limit=4096),
}
Setting = tuple[int, int, int, bool]
"""Tokens of a micro-batch, layers that recompute, layers that offload, and whether passes are
replayed."""


def time_settings(parts: TrainingParts) -> None:
    """Report the speed of the setting in use, and of all others."""
    executor, layers = parts.executor, parts.executor.layers
    chosen = read_setting(executor)
    longest = int(parts.state.train.num_tokens.max())
    step_tokens = int(parts.strategy.choose_batch(1).num_tokens)
    parts.report(what="chosen", setting=chosen, tokens_per_s=time_steps(parts))
    sizes = [longest * 2**power for power in range(8) if longest * 2**power < 2 * step_tokens]
    for size in sizes:
        enough = layers.num_layers  # recomputing more than this only takes longer
        can_move, can_repeat = layers.offloader is not None, executor.replayer is not None
        for setting in list_settings(size, layers.num_layers, can_move, can_repeat):
            fits_alone = enough < layers.num_layers and not layers.can_dequantize
            if setting[1] > enough or (setting[2] and fits_alone):
                continue
            speed = try_setting(parts, setting)
            parts.report(what="tried", setting=setting, tokens_per_s=speed)
            if speed and not setting[2]:
                enough = setting[1]
    parts.report(what="chosen", setting=chosen, tokens_per_s=try_setting(parts, chosen))


def read_setting(executor: Any) -> Setting:
    """Return the setting in use."""
    plan = executor.layers.plan
    return executor.micro_tokens, plan.num_recomputed, plan.num_moved, executor.is_repeating


def list_settings(size: int, layers: int, can_move: bool, can_repeat: bool) -> list[Setting]:
    """Return the settings of a size, those that need the most memory first.

    >>> list_settings(512, 8, True, False)[:2], len(list_settings(512, 8, False, True))
    ([(512, 0, 0, False), (512, 0, 2, False)], 8)
    """
    found: list[Setting] = []
    for recomputed in sorted({round(share * layers) for share in SHARES}):
        moves = sorted({min(layers - recomputed, round(share * layers)) for share in SHARES})
        for moved in moves if can_move else [0]:
            found += [
                (size, recomputed, moved, repeats)
                for repeats in ((True, False) if can_repeat else (False,))
            ]
    return found


def try_setting(parts: TrainingParts, setting: Setting) -> float:
    """Return the tokens per second of a setting; 0 where memory runs out."""
    import torch

    from agents.trainer.data.examples import choose_examples
    from agents.trainer.execution.setting import ExecutionSetting, apply_setting, fill_spare_memory
    from agents.trainer.rank.device import is_out_of_memory

    executor, device = parts.executor, parts.context.device
    size, recomputed, moved, repeats = setting
    apply_setting(
        executor,
        ExecutionSetting(
            micro_tokens=size, num_recomputed=recomputed, num_moved=moved, is_repeating=repeats
        ),
    )
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        largest = choose_examples(parts.state.train, size)
        if not executor.try_gradients(largest):
            return 0.0
        fill_spare_memory(executor, device, largest, parts.strategy.make_reserve())
    try:
        speed = time_steps(parts)
    except RuntimeError as error:  # the optimizer found no memory beside the passes
        if not is_out_of_memory(error):
            raise
        return 0.0
    return speed if read_setting(executor) == setting else 0.0


def time_steps(parts: TrainingParts) -> float:
    """Return the tokens per second of the same few steps; 0 if memory ran out on the way."""
    before = read_setting(parts.executor)
    for step in range(1, 1 + _WARM_STEPS):
        started = time.perf_counter()
        parts.do_step(step)
        if read_setting(parts.executor) != before:
            return 0.0
        if time.perf_counter() - started > _LONG_S:
            break
    tokens, began = 0, time.perf_counter()
    for step in range(1 + _WARM_STEPS, 1 + _WARM_STEPS + _TIMED_STEPS):
        tokens += parts.do_step(step)
        if time.perf_counter() - began > _LONG_S:
            break
    return tokens / (time.perf_counter() - began)


def measure(name: str, run: GivenRun, scale: Scale, root: Path) -> list[dict[str, Any]]:
    """Train a given run and return its journal.

    Raises:
        RunFailed: the run did not end well.
    """
    folder = root / f"{run.shape}-{scale.layers}"
    for report in run_fresh(save_in_process, folder, run.shape, scale):
        if "error" in report:
            raise RunFailed(first_line(report))
    home = root / name
    home.mkdir()
    lengths = draw_lengths(scale.steps * 256, mean=scale.mean, sigma=SIGMA, most=scale.limit)
    if run.mode == "equal":
        lengths = [scale.limit] * len(lengths)
    words = list_values(run.shape, size=scale.size)["vocab_size"]
    mean = scale.limit if run.mode == "packed" else sum(lengths) / len(lengths)
    pairs = 2 if run.mode == "pairs" else 1
    if run.mode == "pairs":
        rows = write_pairs(home / "rows.jsonl", make_pairs(lengths[:512], words))
    else:
        rows = write_rows(home / "rows.jsonl", make_rows(lengths, words))
    on_gpu = scale.device != "cpu"
    spec = make_spec(
        run.kind, SHAPES[run.shape].targets, sequence_tokens=scale.limit,
        packing=run.mode == "packed", objective="dpo" if run.mode == "pairs" else "sft",
        batch_sequences=max(1, round(scale.step_tokens / mean / pairs)), max_steps=scale.steps,
        memory_gib=scale_cap(run.cap_gib, run.shape, scale.layers) if on_gpu else None,
    )  # fmt: skip
    target = partial(run_probed, probe=time_settings, micro_tokens=None, slow_s=0.0)
    return run_trainer(
        home, "settings", spec, folder, rows, scale.device, target=target, limit_s=580.0
    )


def show(name: str, lines: list[dict[str, Any]], skipped: int) -> float:
    """Print what was measured; return the chosen setting's share of the best."""
    found = summarize(lines, skipped)
    probed = [line for line in lines if line["kind"] == "probe"]
    tried = [line for line in probed if line["what"] == "tried"]
    for line in tried:
        speed = line["tokens_per_s"]
        said = f"{speed:8,.0f} tok/s" if speed else "does not fit"
        print(f"  micro-batch, recomputed, offloaded {line['setting']}: {said}", flush=True)
    mine = [line["tokens_per_s"] for line in probed if line["what"] == "chosen"]
    chosen, best = sum(mine) / len(mine), max(line["tokens_per_s"] for line in tried)
    share = chosen / max(best, chosen)
    print(
        f"= {name}: chosen {probed[0]['setting']} {chosen:,.0f} tok/s (in the run "
        f"{found['tokens_per_s']:,.0f}), best of {len(tried)} others {best:,.0f}: {share:.3f} of "
        f"the best (goal {GOAL})",
        flush=True,
    )
    return share


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="patterns of names, commas between")
    parser.add_argument("--layers", type=int, help="depth; caps shrink with it")
    parser.add_argument("--cpu", action="store_true", help="tiny models, to try it")
    args = parser.parse_args()
    if not args.cpu:
        read_card()
    patterns = args.only.split(",")
    shares = []
    root = Path(tempfile.mkdtemp(prefix="rackless-bench-"))
    for name, run in RUNS.items():
        if not any(fnmatch(name, one) for one in patterns):
            continue
        scale = TINY if args.cpu else replace(FULL, layers=args.layers, limit=run.limit)
        try:
            shares.append(show(name, measure(name, run, scale, root), scale.skipped))
        except RunFailed as error:
            print(f"= {name}: failed: {error}", flush=True)
        shutil.rmtree(root / name, ignore_errors=True)
    shutil.rmtree(root)
    if shares:
        print(f"{len(shares)} runs, lowest {min(shares):.3f} of the best (goal {GOAL})")


if __name__ == "__main__":
    main()
