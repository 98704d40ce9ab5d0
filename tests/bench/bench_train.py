"""How fast the trainer starts and trains, with the real entry and nothing around it.

Makes a Llama of random weights (or takes the demo's), starts one process per rank as the supervisor
does, and reads the journals: seconds to import, to load and to the first step; then tokens per
second, share of time waiting for other ranks, and peak memory, over the steps after the first two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec, RunSpec
from agents.contract.wire import to_wire
from tests.agents.trainer.ranks import DEMO, free_port, read_journal

ROOT = Path(__file__).parents[2]
SKIPPED_STEPS = 2
# Phases that may begin the work on speed: with a search, with a kept setting, on a CPU.
_TUNING = ("tuning", "compiling", "warmup")


def make_model(folder: Path, layers: int, hidden: int, words: int) -> Path:
    """Save a Llama of random weights with the demo's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "model" / name, folder / name)
    return folder


def make_rows(path: Path, num_tokens: int) -> Path:
    """Write rows of at least `num_tokens` tokens, to be cut to just that."""
    text = "The river Venna runs through Tolmar. " * (num_tokens // 4)
    rows = [json.dumps({"text": f"{number}. {text}"}) + "\n" for number in range(64)]
    path.write_text("".join(rows), encoding="ascii")
    return path


def run_ranks(folder: Path, intent: AttemptIntent, threads: int) -> float:
    """Run the attempt in `folder`; return its wall time of day at the start."""
    folder.mkdir(parents=True)
    (folder / "intent.json").write_text(json.dumps(to_wire(intent)))
    environ = {
        **os.environ,
        "RACKLESS_ATTEMPT_DIR": str(folder),
        "WORLD_SIZE": str(len(intent.ranks)),
        "LOCAL_WORLD_SIZE": str(len(intent.ranks)),
        "MASTER_ADDR": intent.master_address,
        "MASTER_PORT": str(intent.master_port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "agents.trainer"],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
        )
        for rank in range(len(intent.ranks))
    ]
    for number, rank in enumerate(ranks):
        if rank.wait() != 0:
            sys.exit((folder / f"rank-{number}.log").read_text()[-4000:])
    return float((folder / "intent.json").stat().st_mtime)


def summarize(lines: list[dict[str, Any]], started_s: float) -> dict[str, Any]:
    """Return the figures of one rank from its journal."""
    phases = {line["phase"]: line["time_s"] for line in reversed(lines) if line["kind"] == "phase"}
    steps = [line for line in lines if line["kind"] == "step"]
    late = steps[SKIPPED_STEPS:] or steps
    step_s = sum(line["step_s"] for line in late)
    return {
        "import_s": phases["imported"] - started_s,
        "load_s": phases["training"] - phases["imported"],
        "warmup_s": phases["training"] - min(phases.get(name, math.inf) for name in _TUNING),
        "first_step_s": steps[0]["step_s"],
        "start_less_import_s": steps[0]["time_s"] - phases["imported"],
        "median_step_s": statistics.median(line["step_s"] for line in late),
        "tokens_per_s": sum(line["tokens"] for line in late) / step_s,
        "global_tokens_per_s": sum(line["global_tokens"] for line in late) / step_s,
        "waiting": sum(line["wait_s"] for line in late) / step_s,
        "setting": next((drop_kind(line) for line in lines if line["kind"] == "setting"), None),
        "memory_gib": max(line["memory_bytes"] + line["memory_unpacked_bytes"] for line in late)
        / 2**30,
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "last_loss_hex": steps[-1]["loss_hex"],
        "warnings": [line["message"] for line in lines if line["kind"] == "warning"],
    }


def train(
    home: Path, run_id: str, spec: RunSpec, model: Path, devices: list[str], threads: int = 1
) -> list[dict[str, Any]]:
    """Train in an agent's home with one rank for each device; return the figures of each rank."""
    rows = home / "rows.jsonl"
    intent = AttemptIntent(
        run_id=run_id,
        attempt=1,
        node="here",
        spec=spec,
        python=sys.executable,
        ranks=tuple(
            RankPlacement(rank=r, local_rank=r, node="here", device=device, device_id=device)
            for r, device in enumerate(devices)
        ),
        master_address="127.0.0.1",
        master_port=free_port(),
        address="127.0.0.1",
        model_path=str(model),
        train_path=str(rows if rows.exists() else make_rows(rows, spec.sequence_tokens)),
        num_threads=threads,
    )
    folder = home / "runs" / run_id / "attempts" / "1"
    started_s = run_ranks(folder, intent, threads)
    journals = [read_journal(folder, rank) for rank in range(len(devices))]
    return [{"rank": r, **summarize(lines, started_s)} for r, lines in enumerate(journals)]


def drop_kind(line: dict[str, Any]) -> dict[str, Any]:
    """Return what a record says beside its kind and time."""
    return {key: value for key, value in line.items() if key not in ("kind", "time_s")}


def main() -> None:
    """Measure one setting and print a JSON line per rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--layers", type=int, help="random Llama of so many layers; else the demo's"
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--kind", default="lora")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--targets", default="all-linear", help="or names with commas between")
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the model here between measurements")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="rackless-bench-"))
    model = args.folder or (home / "model" if args.layers else DEMO / "model")
    if args.layers and not (model / "config.json").exists():
        make_model(model, args.layers, args.hidden, args.words)
    targets = args.targets if args.targets == "all-linear" else tuple(args.targets.split(","))
    spec = RunSpec(
        model="bench",
        data=DataSpec(train="rows.jsonl"),
        adapter=AdapterSpec(kind=args.kind, dropout=args.dropout, targets=targets),
        sequence_tokens=args.sequence,
        batch_sequences=args.batch,
        max_steps=args.steps,
        memory_gib=args.memory_gib,
        compile=args.compile,
        checkpoint=CheckpointSpec(every_minutes=None),
    )
    devices = [f"cuda:{r}" if args.device == "cuda" else "cpu" for r in range(args.ranks)]
    for line in train(home, "bench", spec, model, devices, args.threads):
        print(json.dumps(line))
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
