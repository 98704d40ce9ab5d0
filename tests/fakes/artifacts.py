"""Folders as exports make them, without a model in them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from agents.artifacts import Origin


def make_folder(folder: Path, origin: Origin, method: str, *types: str) -> Path:
    """Write a folder of an artifact: its card, its proof and a few bytes for weights."""
    folder.mkdir(parents=True)
    if method == "gguf":
        for kind in types:
            (folder / f"{origin.run_name}-{kind}.gguf").write_bytes(b"GGUF" + kind.encode())
    else:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(method.encode())
    if method != "merged":
        (folder / "README.md").write_text(f"# {origin.run_name}, {method}\n")
        proofs = [make_proof(kind) for kind in types or (method,)]
        about = {"method": method, "origin": asdict(origin), "proofs": proofs}
        measured = {"measured": {"peak_memory_bytes": 7}}
        (folder / "proof.json").write_text(json.dumps({**about, **measured}))
    return folder


def make_proof(name: str) -> dict[str, object]:
    """Return what a proof says of one file."""
    return {
        "name": name, "keep": True, "problems": [], "distance": {"kl": 0.001, "perplexity": 3.98},
        "control": {"kl": 0.017}, "original_perplexity": 3.97, "size_bytes": 100,
        "tokens_per_s": 61.0, "runtime": "llama.cpp b1",
    }  # fmt: skip
