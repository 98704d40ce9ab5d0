"""Our jobs beside each method's own implementation, on the same model and the same texts.

AWQ and GPTQ: gptqmodel and AutoAWQ are called as they document it, by a Python that sees nothing of
ours (`reference_quantizers`), and both results are measured over the same held-out rows, the
weights compared bit by bit. GGUF: llama.cpp's own `llama-quantize` on the same F16 file, and
its `llama-perplexity --kl-divergence` beside what `LlamaCpp` and `diverge` find at the same
places of the same texts.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.contract.requests.exports import TextSource
from agents.quantizers.formats.calibrated import choose_group
from agents.quantizers.inference.llama_cpp import LlamaCpp
from agents.quantizers.inference.models import load_model
from agents.quantizers.job.texts import Texts, read_texts
from agents.quantizers.proof.compare import ModelPredictor, diverge, measure, remember
from agents.trainer.data.tokenizer import load_tokenizer
from tests.bench.quantizing.learned_model import COMPARED_FILE
from tests.bench.quantizing.quantize_jobs import Bench, make

CASES = ("awq", "autoawq", "autoawq-released", "gptq:4-bit", "gptq:8-bit",
         "gguf:Q8_0", "gguf:Q6_K", "gguf:Q5_K_M", "gguf:Q4_K_M", "gguf:Q3_K_M")  # fmt: skip
CONTEXT_TOKENS, NUM_CHUNKS = 128, 200
_SCRIPT = Path(__file__).with_name("reference_quantizers.py")
_SAID = {
    "kl": r"Mean +KLD: +(\S+)",
    "perplexity": r"Mean PPL\(Q\) +: +(\S+)",
    "original_perplexity": r"Mean PPL\(base\) +: +(\S+)",
    "top1_percent": r"Same top p: +(\S+)",
}


def hold_against(bench: Bench, case: str, model: Path, python: str) -> dict[str, Any]:
    """Return what our job and the method's own implementation make of a model.

    Args:
        bench: that runs our job.
        case: of `CASES`.
        model: folder of Transformers with its texts.
        python: interpreter with the implementations of AWQ and GPTQ.
    """
    ours, theirs = bench.folder / "ours", bench.folder / "theirs"
    name, _, kind = case.partition(":")
    method = "awq" if name.startswith("autoawq") else name
    engine: Any = "autoawq" if name.startswith("autoawq") else "gptqmodel"
    types = (kind,) if kind else ()
    types = ("F16", kind) if method == "gguf" else types
    row = make(bench, f"ours {case}", model, method, types, engine=engine, keep=ours)
    if row.get("rc") == 0:
        if method == "gguf":
            found = _hold_gguf(bench, kind, model, ours)
        else:
            found = _hold_folder(case, model, ours, theirs, python)
        row = {"ours_s": row["seconds"], **found}
    for gone in (ours, theirs):
        shutil.rmtree(gone, ignore_errors=True)
    return {"case": f"reference {case}", **row}


def time_theirs(
    bench: Bench, case: str, kind: str, model: Path, cap_gib: float | None, python: str
) -> dict[str, Any]:
    """Return what gptqmodel takes by itself, on the rows that our job has, and as ours packs."""
    folder = bench.folder / "theirs"
    folder.mkdir()
    job = {
        "model": str(model.absolute()),
        "folder": str(folder.absolute()),
        "rows": _read(model).calibration,
        "group": choose_group(model, "gptq"),
        "device": bench.device,
        "cap_gib": cap_gib,
    }
    path = bench.folder / "theirs.json"
    path.write_text(json.dumps(job))
    row, _ = bench.run(case, ["-I", str(_SCRIPT), kind, str(path)], python)
    row["cap_gib"] = cap_gib
    if row.get("rc") == 0:
        row["theirs_took"] = json.loads((folder / "took.json").read_bytes())
    row["bytes"] = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
    shutil.rmtree(folder)
    return row


def _read(model: Path) -> Texts:
    train, held_out = (TextSource(path=str(model / f"{one}.jsonl")) for one in ("train", "eval"))
    return read_texts([train], held_out, load_tokenizer(model)[0])


def _hold_folder(case: str, model: Path, ours: Path, theirs: Path, python: str) -> dict[str, Any]:
    texts = _read(model)
    theirs.mkdir()
    job = {
        "model": str(model.absolute()),
        "folder": str(theirs.absolute()),
        "rows": texts.calibration,
        "group": choose_group(model, "gptq"),
    }
    path = theirs / "job.json"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [python, "-I", str(_SCRIPT), case, str(path)], cwd=theirs, capture_output=True, check=False
    )
    if done.returncode:
        return {"rc": done.returncode, "stderr": done.stderr.decode("utf-8", "replace")[-1500:]}
    reference = remember(
        ModelPredictor(load_model(model, "cpu")), texts.held_out, theirs / "logits"
    )
    for one in model.glob("tokenizer*"):
        shutil.copyfile(one, theirs / one.name)
    return {
        "same_weights": compare_weights(ours, theirs),
        "original_perplexity": reference.perplexity,
        **{
            whose: asdict(
                measure(ModelPredictor(load_model(folder, "cpu")), texts.held_out, reference)
            )
            for whose, folder in (("ours", ours), ("theirs", theirs))
        },
    }


def compare_weights(first: Path, second: Path) -> float:
    """Return the share of numbers in safetensors that are the same in both folders."""
    from safetensors.torch import load_file

    same = total = 0
    one, two = (
        {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}
        for folder in (first, second)
    )
    for name in one.keys() | two.keys():
        total += (one.get(name) if name in one else two[name]).numel()
        if name in one and name in two and one[name].shape == two[name].shape:
            same += int((one[name] == two[name]).sum())
    return same / total


def _hold_gguf(bench: Bench, kind: str, model: Path, ours: Path) -> dict[str, Any]:
    (whole,) = ours.glob("*-F16.gguf")
    (made,) = ours.glob(f"*-{kind}.gguf")
    assert bench.tools is not None
    theirs = ours / "theirs.gguf"
    _call([str(bench.tools / "llama-quantize"), str(whole), str(theirs), kind])
    found: dict[str, Any] = {"same_file": theirs.read_bytes() == made.read_bytes()}
    perplexity = bench.tools / "llama-perplexity"
    if not perplexity.exists():
        return found
    base, text = ours / "base", ours / "text"
    rows = [json.loads(line)["text"] for line in (model / COMPARED_FILE).read_text().splitlines()]
    text.write_text("\n".join(rows))
    argv = [str(perplexity), "-f", str(text), "-c", str(CONTEXT_TOKENS), "-b", str(CONTEXT_TOKENS)]
    argv += ["--chunks", str(NUM_CHUNKS), "--kl-divergence-base", str(base)]
    _call([*argv, "-m", str(whole)])
    said = _call([*argv, "-m", str(made), "--kl-divergence"])
    theirs_said = {key: float(re.search(rule, said)[1]) for key, rule in _SAID.items()}  # type: ignore[index]
    chunks = read_chunks(base)
    return {**found, "theirs": theirs_said, "ours": _measure_gguf(whole, made, chunks, model)}


def read_chunks(base: Path) -> list[list[int]]:
    """Return the token ids that llama-perplexity has kept beside its distributions."""
    kept = base.read_bytes()
    context, _, count = struct.unpack_from("<Iii", kept, 8)
    ids = np.frombuffer(kept, np.int32, context * count, 20)
    return [list(map(int, row)) for row in ids.reshape(count, context)]


def _measure_gguf(
    whole: Path, made: Path, chunks: Sequence[Sequence[int]], model: Path
) -> dict[str, float]:
    """Return what we find at the places that llama-perplexity counts: each chunk's second half."""
    words = int(json.loads((model / "config.json").read_bytes())["vocab_size"])
    first, second = (
        _predict(LlamaCpp(path, num_words=words, context_tokens=CONTEXT_TOKENS), chunks)
        for path in (whole, made)
    )
    half = CONTEXT_TOKENS // 2
    targets = torch.cat([torch.tensor(list(row[half + 1 :])) for row in chunks])
    losses = [-one.gather(1, targets[:, None]).double().mean().item() for one in (first, second)]
    return {
        "kl": diverge(first, second) / len(targets),
        "perplexity": math.exp(losses[1]),
        "original_perplexity": math.exp(losses[0]),
        "top1_percent": 100 * (first.argmax(1) == second.argmax(1)).double().mean().item(),
    }


def _predict(file: LlamaCpp, chunks: Sequence[Sequence[int]]) -> torch.Tensor:
    half = CONTEXT_TOKENS // 2
    return torch.cat([file.predict(row)[half:] for row in chunks])


def _call(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        sys.exit(f"{argv[0]} failed: {said[-1500:]}")
    return said
