"""Artifacts as exports make them, without a model in them; and some for the window."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from agents.contract.requests.exports import Origin
from agents.contract.run import FileEntry
from app.artifact import ArtifactCopy, ArtifactSnapshot, Verdict

CARD = """---
base_model: meta-llama/Llama-2-7b-hf
---
# support-chat, gguf

Made by llama.cpp from step 400 of run `support-chat-7f3a`.

## Measured

| | bytes | KL |
|---|---|---|
| original | 13,476,839,424 | 0 |
| Q4_K_M | 4,080,263,360 | 0.0098 |
"""


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
    """Return the verification of one file."""
    return {
        "name": name, "keep": True, "problems": [], "distance": {"kl": 0.001, "perplexity": 3.98},
        "control": {"kl": 0.017}, "original_perplexity": 3.97, "size_bytes": 100,
        "tokens_per_s": 61.0, "runtime": "llama.cpp b1",
    }  # fmt: skip


def past_artifacts(now_s: float) -> tuple[ArtifactSnapshot, ...]:
    """Return exports of the last days, one of them lost."""
    origin = Origin(
        base="meta-llama/Llama-2-7b-hf", data="chats.jsonl", run_id="support-chat-7f3a",
        run_name="support-chat", step=400, licence="llama2",
        base_sha256="9b1deb4d3b7d4bad9b", data_sha256="1b9d6bcdbbfd4b2d9b",
    )  # fmt: skip
    home = "/home/anna/models"
    gguf = ArtifactSnapshot(
        name="support-chat-gguf", version=1, format="gguf", types=("Q8_0", "Q4_K_M", "Q3_K_M"),
        origin=origin, size_bytes=14_540_000_000, created_s=now_s - 3600,
        files=(FileEntry(path="support-chat-Q8_0.gguf", size_bytes=7_160_000_000, sha256="a"),),
        verdicts=(_verdict("Q8_0", 0.00017), _verdict("Q4_K_M", 0.0098), _verdict("Q3_K_M", 0.041)),
        runtimes=("llama.cpp 2026.10.11549",),
        copies=(
            ArtifactCopy(
                kind="folder", place=f"{home}/support-chat-gguf", made_s=now_s - 3600,
                checked_s=now_s - 3600,
            ),
            ArtifactCopy(
                kind="node", place="beta", path="artifacts/support-chat-gguf-0f3a",
                made_s=now_s - 1800,
            ),
            ArtifactCopy(
                kind="folder", place="/media/anna/backup/support-chat", made_s=now_s - 900,
                state="missing", problem="it was moved or deleted",
            ),
        ),
    )  # fmt: skip
    awq = ArtifactSnapshot(
        name="poems-awq", version=1, format="awq", size_bytes=3_890_000_000,
        origin=Origin(
            base="org/base", data="poems.jsonl", run_id="poems-11c0", run_name="poems", step=800
        ),
        created_s=now_s - 90_000, verdicts=(_verdict("awq", 0.0061),),
        copies=(ArtifactCopy(kind="node", place="alpha", path="artifacts/p", made_s=now_s),),
    )  # fmt: skip
    merged = ArtifactSnapshot(
        name="recipes-merged", version=1, format="merged", size_bytes=13_500_000_000,
        origin=Origin(
            base="org/base", data="r.jsonl", run_id="recipes-a0d2", run_name="recipes", step=600
        ),
        created_s=now_s - 180_000,
        copies=(
            ArtifactCopy(kind="folder", place=f"{home}/recipes", made_s=now_s, state="missing"),
        ),
    )  # fmt: skip
    return gguf, awq, merged


def _verdict(name: str, kl: float) -> Verdict:
    bad = kl > 0.017
    return Verdict(
        name=name, keep=not bad, kl=kl, control_kl=0.017, perplexity=5.58 * (1 + kl),
        problems=(f"It is further from the original (KL {kl}) than rounded weights.",) * bad,
        original_perplexity=5.58, size_bytes=int(7.16e9 / (1 + 20 * kl)), tokens_per_s=47.0,
    )  # fmt: skip
