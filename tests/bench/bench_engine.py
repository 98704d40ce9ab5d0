"""How fast one card trains under caps of its memory, against Unsloth and Transformers with PEFT.

A Llama-2-7B of random weights, NF4 with double quantization, LoRA of rank 16 on q, k, v and o,
sequences of 2,048 tokens with a loss on every one. Ours is the trainer as it is started for a run,
with nothing set but `memory_gib`; its rate is that of whole optimizer steps of 16 sequences. The
rivals are measured at every batch size and recomputing they offer, one batch per optimizer step,
over as many sequences as ours (a card that has worked for a second only is still at a higher
clock), and the best that fits under a cap counts. Theirs are measured without the cap, by the
memory that their tensors really took, which is kinder to them.

    python3 -m tests.bench.bench_engine --folder /tmp/llama          # all engines, all caps
    python3 -m tests.bench.bench_engine --folder /tmp/llama --lora   # bf16, against the card's rate
    python3 -m tests.bench.bench_engine --folder /tmp/llama --start  # a second start's first step
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec, RunSpec
from tests.bench.bench_train import make_model, train

CAPS_GIB = "6,8,12,16,24"
TOKENS = 2048
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
STEPS, BATCH_SEQUENCES = 4, 16
SEQUENCES = {"all": (1, 2, 4, 8, 16), "none": (1, 2, 3)}
"""Tried at once by the rivals, with recomputing and without."""
QUICK = {"all": (1, 4, 8), "none": (1, 2)}
GOALS = {"unsloth": 1.1, "peft": 1.8}


def make_spec(kind: str, **changes: Any) -> RunSpec:
    """Return the run of ours."""
    settings = {
        "model": "bench",
        "data": DataSpec(train="rows.jsonl"),
        "adapter": AdapterSpec(kind=kind, rank=16, dropout=0.0, targets=TARGETS),  # type: ignore[arg-type]
        "sequence_tokens": TOKENS,
        "batch_sequences": BATCH_SEQUENCES,
        "max_steps": 2 + STEPS,
        "checkpoint": CheckpointSpec(every_minutes=None),
        **changes,
    }
    return RunSpec(**settings)


def measure_ours(
    home: Path, model: Path, kind: str, cap_gib: float | None, *, exact: bool = True
) -> dict[str, Any]:
    """Train with the real entry in an agent's home and return the figures."""
    name = f"{kind}-{cap_gib}-{exact}"
    spec = make_spec(kind, memory_gib=cap_gib, exact=exact)
    return train(home, name, spec, model, ["cuda:0"])[0]


def time_steps(step: Callable[[Any], None], sequences: int) -> dict[str, float]:
    """Return tokens per second and peak memory of `step` on random tokens."""
    import torch

    ids = torch.randint(3, 31000, (sequences, TOKENS), device="cuda")
    for _ in range(2):
        step(ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    num_steps = STEPS * BATCH_SEQUENCES // sequences
    started = time.perf_counter()
    for _ in range(num_steps):
        step(ids)
    torch.cuda.synchronize()
    rate = sequences * TOKENS * num_steps / (time.perf_counter() - started)
    return {"tokens_per_s": rate, "memory_gib": torch.cuda.max_memory_allocated() / 2**30}


def load_peft(folder: str, recompute: str) -> Any:
    """Return the model as the documents of PEFT make it."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": 0}
    )
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=recompute == "all")
    config = LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def load_unsloth(folder: str, recompute: str) -> Any:
    """Return the model as the documents of Unsloth make it."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        folder, max_seq_length=TOKENS, load_in_4bit=True, local_files_only=True
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=32,
        lora_dropout=0,
        target_modules=list(TARGETS),
        use_gradient_checkpointing="unsloth" if recompute == "all" else False,
    )
    return model.train()


def measure_rival(name: str, folder: str, recompute: str, *, quick: bool) -> None:
    """Print one JSON line for each number of sequences that fits the card."""
    model = (load_unsloth if name == "unsloth" else load_peft)(folder, recompute)
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(ids: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for sequences in (QUICK if quick else SEQUENCES)[recompute]:
        try:
            found = time_steps(step, sequences)
        except torch.OutOfMemoryError:
            break
        line = {"engine": name, "sequences": sequences, "recompute": recompute, **found}
        print("ROW " + json.dumps(line), flush=True)


def run_rival(name: str, folder: Path, recompute: str, *, quick: bool) -> list[dict[str, Any]]:
    """Measure a rival in a process of its own, and print what it reaches."""
    command = [sys.executable, "-m", "tests.bench.bench_engine", "--rival", name]
    command += ["--quick"] if quick else []
    with tempfile.TemporaryDirectory() as place:  # Unsloth writes what it compiles there
        root = str(Path(__file__).parents[2])
        environ = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))),
        }
        done = subprocess.run(
            [*command, "--recompute", recompute, "--folder", str(folder)],
            cwd=place, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not rows:
        print(f"{name} ({recompute}) could not be measured:\n{done.stderr[-1500:]}", flush=True)
    for row in rows:
        print(
            f"{row['engine']:8} {row['sequences']:2} sequences, recompute {row['recompute']:4}: "
            f"{row['tokens_per_s']:7,.0f} tokens/s, peak {row['memory_gib']:5.2f} GiB",
            flush=True,
        )
    return rows


def compare(folder: Path, rivals: list[str], caps: list[int], *, quick: bool) -> None:
    """Print what each engine reaches, and the ratios under each cap."""
    rows = []
    for name in rivals:
        for recompute in ("all", "none"):
            rows += run_rival(name, folder, recompute, quick=quick)
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as home:
        for exact in (True,) if quick else (True, False):
            for cap in caps:
                found = measure_ours(Path(home), folder, "qlora", cap, exact=exact)
                show_ratios(rows, cap, exact, found)


def show_ratios(rows: list[dict[str, Any]], cap: int, exact: bool, ours: dict[str, Any]) -> None:
    """Print ours under a cap beside the best of each rival that fits it."""
    said = [f"{cap:2} GiB, exact {exact!s:5}: ours {ours['tokens_per_s']:7,.0f} tokens/s"]
    said.append(f"peak {ours['memory_gib']:5.2f} GiB")
    for name in dict.fromkeys(row["engine"] for row in rows):
        fitting = [r for r in rows if r["engine"] == name and r["memory_gib"] <= cap]
        best = max((row["tokens_per_s"] for row in fitting), default=0.0)
        ratio = ours["tokens_per_s"] / best if best else float("inf")
        said.append(f"{name} {best:,.0f}: {ratio:.2f} (goal {GOALS[name]})")
    setting = ours["setting"]
    named = ("micro_tokens", "num_recomputed", "num_moved")
    print("; ".join(said), {key: setting[key] for key in named}, ours["warnings"] or "", flush=True)


def compare_rate(folder: Path) -> None:
    """Print what part of the card's matrix rate bf16 LoRA reaches."""
    import torch

    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as home:
        ours = measure_ours(Path(home), folder, "lora", None)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < 4:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        count += 20
    rate = 2 * 8192**3 * count / (time.perf_counter() - started)
    config = json.loads((folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    matrices = layers * (4 * hidden**2 + 3 * hidden * config["intermediate_size"])
    matrices += hidden * config["vocab_size"]
    # Two products of T x T scores forward and four backward, half of each masked.
    attention = layers * 6 * 2 * TOKENS * hidden // 2
    flops = ours["tokens_per_s"] * (4 * matrices + attention)
    print(
        f"bf16 LoRA: {ours['tokens_per_s']:,.0f} tokens/s, peak {ours['memory_gib']:.1f} GiB, "
        f"{flops / 1e12:.0f} TFLOP/s of {rate / 1e12:.0f} (8192^3): {flops / rate:.2f} (goal 0.6)"
    )


def compare_starts(folder: Path) -> None:
    """Print how much sooner a second start of the same shape reaches its first step."""
    home = Path(tempfile.mkdtemp(prefix="rackless-bench-"))
    for run_id in ("first", "second", "third"):
        spec = make_spec("qlora", memory_gib=12.0, max_steps=3)
        found = train(home, run_id, spec, folder, ["cuda:0"])[0]
        print(
            f"{run_id} start: {found['warmup_s']:.1f} s to compile and choose, "
            f"{found['import_s'] + found['start_less_import_s']:.1f} s from nothing to the first "
            f"step, {found['import_s']:.1f} s of it imports, {found['load_s']:.1f} s until training"
        )
    shutil.rmtree(home)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the model is, or goes")
    parser.add_argument("--rivals", default="unsloth,peft")
    parser.add_argument("--caps", default=CAPS_GIB, help="GiB")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--rival", help="measure one rival in this process")
    parser.add_argument("--recompute", default="all")
    parser.add_argument("--quick", action="store_true", help="fewer settings, and only exact")
    args = parser.parse_args()
    if args.rival:
        measure_rival(args.rival, str(args.folder), args.recompute, quick=args.quick)
        return
    if not (args.folder / "config.json").exists():
        make_model(args.folder, layers=32, hidden=4096, words=32000)
    if args.lora:
        compare_rate(args.folder)
    elif args.start:
        compare_starts(args.folder)
    else:
        rivals = [name for name in args.rivals.split(",") if name]
        caps = [int(cap) for cap in args.caps.split(",")]
        compare(args.folder, rivals, caps, quick=args.quick)


if __name__ == "__main__":
    main()
