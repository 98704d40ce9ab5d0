"""How fast preference pairs train by DPO, against TRL and a plain loop over PEFT.

Conversations have log-normal lengths; both of a pair count. Ours is the trainer as it is started
for a run; the peers are measured at every size and way to recompute, and the best that fits under
the cap counts.

    python3 -m tests.bench.bench_preferences                       # Qwen2.5-1.5B LoRA, 14 GiB
    python3 -m tests.bench.bench_preferences --layers 7 --engines trl,ours
    python3 -m tests.bench.bench_preferences --cpu                 # tiny, to try it
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.bench_chat import FULL, TINY, Scale, describe_ours, describe_peer, save_in_process
from tests.bench.engines.chat_rows import draw_lengths, make_pairs, write_pairs
from tests.bench.engines.engine_shapes import SHAPES, read_config, scale_cap
from tests.bench.engines.fresh_process import first_line, run_fresh
from tests.bench.engines.our_training import RunFailed, make_spec, read_card, run_trainer, summarize
from tests.bench.engines.preference_peers import PreferenceJob, train_preference_peer

GOALS = {"trl": 1.5, "peft": 1.5}
SIGMA = 0.6
PAIRS, PEER_STEPS = 16, 5


def measure_peers(args: argparse.Namespace, scale: Scale, lengths: list[int]) -> list[Any]:
    """Return what the peers reach at each of their settings, and print it."""
    rows = []
    for engine in (one for one in args.engines.split(",") if one != "ours"):
        job = PreferenceJob(
            engine=engine, shape=args.shape, kind=args.kind, lengths=tuple(lengths[:256]),
            limit=scale.limit, batch=args.pairs, steps=2 if args.cpu else PEER_STEPS,
            layers=scale.layers, size=scale.size, at_once=scale.at_once, device=scale.device,
            recompute=tuple(args.recompute.split(",")),
        )  # fmt: skip
        for report in run_fresh(train_preference_peer, job):
            if "error" in report:
                print(f"  {engine}: {first_line(report)}", flush=True)
                print(report.get("trace", "") if args.trace else "", end="", flush=True)
                continue
            rows.append(report)
            print(f"  {describe_peer(report)}", flush=True)
    return rows


def measure_ours(
    args: argparse.Namespace, scale: Scale, lengths: list[int], folder: Path, cap: float | None
) -> dict[str, Any]:
    """Return the figures of our trainer.

    Raises:
        RunFailed: there are none.
    """
    pairs = make_pairs(lengths, read_config(folder)["vocab_size"])
    rows = write_pairs(folder.parent / "pairs.jsonl", pairs)
    spec = make_spec(
        args.kind, SHAPES[args.shape].targets, objective="dpo", sequence_tokens=scale.limit,
        batch_sequences=args.pairs, max_steps=scale.steps, memory_gib=cap,
    )  # fmt: skip
    lines = run_trainer(folder.parent, "dpo", spec, folder, rows, scale.device)
    found = summarize(lines, scale.skipped)
    print(f"  ours {describe_ours(found)}", flush=True)
    return found


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=list(SHAPES))
    parser.add_argument("--kind", default="lora", choices=["lora", "qlora"])
    parser.add_argument("--cap", type=float, default=14.0, help="GiB")
    parser.add_argument("--engines", default="trl,peft,ours")
    parser.add_argument("--layers", type=int, help="depth; the cap shrinks with it")
    parser.add_argument("--limit", type=int, default=FULL.limit, help="tokens of a conversation")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of an optimizer step")
    parser.add_argument("--steps", type=int, default=FULL.steps, help="of ours")
    parser.add_argument("--at-once", default="1,2,4,8", help="pairs, of the peers")
    parser.add_argument("--recompute", default="all,none", help="of the peers")
    parser.add_argument("--cpu", action="store_true", help="tiny models, to try it")
    parser.add_argument("--trace", action="store_true", help="print where a peer failed")
    args = parser.parse_args()
    scale = replace(
        FULL, layers=args.layers, limit=args.limit, steps=args.steps,
        at_once=tuple(map(int, args.at_once.split(","))),
    )  # fmt: skip
    if args.cpu:
        scale, args.pairs = TINY, 4
    else:
        read_card()
    cap = scale_cap(args.cap, args.shape, scale.layers)
    lengths = draw_lengths(
        max(64, args.pairs * scale.steps), mean=scale.mean, sigma=SIGMA, most=scale.limit
    )
    print(f"{args.shape} {args.kind} DPO, cap {cap:.2f} GiB here, layers: {scale.layers or 'all'}")
    peers = measure_peers(args, scale, lengths)
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as root:
        folder = Path(root) / "model"
        for report in run_fresh(save_in_process, folder, args.shape, scale):
            if "error" in report:
                print(f"  not made: {first_line(report)}", flush=True)
        try:
            ours = measure_ours(args, scale, lengths, folder, None if args.cpu else cap)
        except (RunFailed, OSError) as error:
            print(f"= ours failed: {error}", flush=True)
            return
        shutil.rmtree(folder)
    for engine in dict.fromkeys(row["engine"] for row in peers):
        rates = [
            r["tokens_per_s"] for r in peers if r["engine"] == engine and r["memory_gib"] <= cap
        ]
        said = f"{ours['tokens_per_s'] / max(rates):.2f}" if rates else "does not fit;"
        print(f"= {args.shape} {args.kind} DPO: {said} of {engine} (goal {GOALS[engine]})",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
