"""Card of an artifact: its README.md, with its origin and its measurements."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from agents.contract.formats import EXPORTS, Engine
from agents.contract.requests.exports import Origin, card_code, card_licence, card_text
from agents.quantizers.job.meter import Phase
from agents.quantizers.job.texts import Texts
from agents.quantizers.proof.verdict import Proof
from agents.state import read_json
from agents.trainer.model.causal_class import name_public_class

# Form of a base that the hub accepts; with a folder's path it refuses the whole card.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def write_card(
    method: str,
    origin: Origin,
    proofs: Sequence[Proof],
    texts: Texts,
    folder: Path,
    phases: Sequence[Phase],
    engine: Engine = "gptqmodel",
    left_wide: str | None = None,
) -> str:
    """Return the card as Markdown.

    Args:
        method: one of `agents.contract.formats.METHODS`.
        origin: origin of the artifact.
        proofs: proofs of its files.
        texts: texts of calibration and proof.
        folder: folder with the artifact's files, without this card.
        phases: measured phases of making it, including the merge.
        engine: package that made AWQ.
        left_wide: sentence on the part that stays in 16 bits; None: no large part does.
    """
    licence = card_licence(origin.licence)
    base = f"base_model: {origin.base}\n" if _HUB_ID.fullmatch(origin.base) else ""
    row = EXPORTS[method]
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    class_name = name_public_class(read_json(folder / "config.json") or {})
    library = "transformers" if row.runtime == "transformers" else method
    lines = [
        f"---\n{base}{licence}library_name: {library}\npipeline_tag: text-generation\n"
        f"tags: [rackless, {method}]\n---",
        f"# {card_text(origin.run_name)}, {method}",
        "",
        f"Made by {row.made_by.format(engine=engine)} from step {origin.step} of run "
        f"`{origin.run_id}`{_calibration(method, texts)}.",
        "",
        *_facts(origin),
        *([f"- {left_wide}"] if left_wide else []),
        "",
        "## Use",
        "",
        *_use(method, files, class_name),
        "",
        "## Measured",
        "",
        *_table(proofs),
        "",
        f"Over {proofs[0].distance.num_tokens} predicted tokens of {_source(texts)}. KL is the "
        "mean divergence of the next-token distribution from that of the original, nats per "
        "token. The control is the same model with every linear weight but the head's merely "
        "rounded to 4 bits, which a method has to beat. Same answers: share of tokens that are "
        "the same in the likeliest continuations of up to eight beginnings, until they part. Speed "
        "is that of one text at a time on the PC that made it.",
        "",
        "## Verdict",
        "",
        *_verdict(proofs),
        "",
        "## What making it took",
        "",
        *_costs(phases),
        "",
        "## Files",
        "",
        *(f"- {card_code(name)}: {size:,} bytes" for name, size in sorted(files.items())),
        "",
    ]
    return "\n".join(lines)


def _calibration(method: str, texts: Texts) -> str:
    if not EXPORTS[method].calibrated:
        return ""
    return f", calibrated with {len(texts.calibration)} rows of {texts.calibrated_with}"


def _use(method: str, files: Mapping[str, int], class_name: str) -> list[str]:
    """Return instructions for use; FOLDER stands for its folder, or its name on the hub."""
    if EXPORTS[method].runtime == "llama.cpp":
        name = min((n for n in files if n.endswith(".gguf")), key=lambda n: files[n])
        return ["```", f"llama-cli -m {shlex.quote(name)} -cnv", "```"]
    return [
        f"With `pip install transformers accelerate {EXPORTS[method].loaded_with}`:",
        "",
        "```python",
        f"from transformers import {class_name}, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {class_name}.from_pretrained("FOLDER", device_map="auto")',
        'chat = [{"role": "user", "content": "Hello"}]',
        "ids = tokenizer.apply_chat_template(",
        '    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True',
        ").to(model.device)",
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=64)[0]))",
        "```",
    ]


def _facts(origin: Origin) -> list[str]:
    return [
        f"- Base: {card_code(origin.base)}, sha256 {card_code(origin.base_sha256 or '-')}",
        f"- Trained on: {card_code(origin.data)}, sha256 {card_code(origin.data_sha256 or '-')}",
        f"- Licence of the base: {card_text(origin.licence or 'not known')}",
    ]


def _table(proofs: Sequence[Proof]) -> list[str]:
    names = ("", "bytes", "KL", "same likeliest word", "perplexity", "same answers", "tokens/s")
    first = proofs[0]
    rows = [f"| {' | '.join((*names, 'first token'))} |", f"|{'---|' * (len(names) + 1)}"]
    original = f"{first.original_bytes:,} | 0 | 1 | {first.original_perplexity:.4g} | 1"
    rows.append(f"| original | {original} | | |")
    control = first.control
    rows.append(
        f"| control | | {control.kl:.3g} | {control.top1:.4f} | {control.perplexity:.4g} | | | |"
    )
    for proof in proofs:
        distance = proof.distance
        rows.append(
            f"| {proof.name} | {proof.size_bytes:,} | {distance.kl:.3g} | {distance.top1:.4f} | "
            f"{distance.perplexity:.4g} | {proof.same_answers:.3f} | {' | '.join(_speeds(proof))} |"
        )
    return rows


def _speeds(proof: Proof) -> tuple[str, str]:
    if proof.tokens_per_s is None or proof.first_token_s is None:
        return "not measured", "not measured"
    return f"{proof.tokens_per_s:,.1f}", f"{1e3 * proof.first_token_s:,.0f} ms"


def _costs(phases: Sequence[Phase]) -> list[str]:
    rows = ["| phase | seconds | memory | GPU memory |", "|---|---|---|---|"]
    for phase in phases:
        vram = "" if phase.vram_bytes is None else f"{phase.vram_bytes / 1e9:,.2f} GB"
        rows.append(
            f"| {phase.name} | {phase.seconds:,.1f} | {phase.ram_bytes / 1e9:,.2f} GB | {vram} |"
        )
    return rows


def _verdict(proofs: Sequence[Proof]) -> list[str]:
    said = []
    for proof in proofs:
        words = "keep." if proof.keep else f"do not keep. {' '.join(proof.problems)}"
        said.append(f"- {proof.name}: {words} {_tell_runtime(proof)}")
        if proof.same_tokens is not None:
            said[-1] += f" It makes {_tell_share(proof.same_tokens)} of these texts' tokens"
            said[-1] += " as the model's tokenizer does."
    return said


def _tell_runtime(proof: Proof) -> str:
    if not proof.is_unpacked:
        return f"Loaded and answered in {proof.runtime}."
    return (
        "Neither the GPU nor the memory of the PC that made it holds it, so that it was measured "
        f"in {proof.runtime} with its weights unpacked to 16 bits on the disk. The packed files "
        "were not loaded as a whole, and their speed was not measured."
    )


def _tell_share(share: float) -> str:
    """Return a share in percent, never rounded up to all.

    >>> _tell_share(1.0), _tell_share(0.99999), _tell_share(0.5)
    ('all', '99.9 %', '50.0 %')
    """
    return "all" if share == 1 else f"{math.floor(1000 * share) / 10:.1f} %"


def _source(texts: Texts) -> str:
    if texts.held_out_from == "evaluation":
        return "the run's evaluation data"
    return "the last rows of the run's training data, which the run has seen"
