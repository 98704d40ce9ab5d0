"""Quantize a merged model and prove the result: `agents.program agents.quantizers.make JOB.json`.

One model is in memory at a time: the original (which answers, and leaves its distributions in a
file), the baseline, then the result. The folder appears after everything is measured, even with a
bad verdict, since the user decides about it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agents.contract.formats import EXPORTS
from agents.contract.requests.exports import PROOF_FILE, MakeJob
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.quantizers.formats import calibrated
from agents.quantizers.formats.registry import WriteRequest, find_writer
from agents.quantizers.inference.llama_cpp import LlamaCpp, name_runtime
from agents.quantizers.inference.models import ANSWER_TOKENS, weigh
from agents.quantizers.job.job import (
    JobProgress,
    appearing,
    copy_companions,
    locate,
    partial_of,
    read_plain,
    run_job,
)
from agents.quantizers.job.meter import Phase, weigh_folder
from agents.quantizers.job.reuse import LINEAGE_FILE, MOST_REFERENCE_BYTES, find_reference, using
from agents.quantizers.job.texts import MOST_TOKENS, Texts, read_texts
from agents.quantizers.proof.card import write_card
from agents.quantizers.proof.folder_proof import expect_room, prove_folder
from agents.quantizers.proof.reference_model import Original, look_at_original, recall
from agents.quantizers.proof.verdict import Proof, find_lost_tokens, share_of_same_tokens
from agents.shared.models.export_support import find_left_wide, find_refusal, suggest
from agents.state import read_json
from agents.trainer.data.stops import GENERATION_FILE
from agents.trainer.data.tokenizer import load_tokenizer

_LLAMA_CPP_ROWS, _FEWEST_ROWS = 12, 2

# Size of the original up to which llama.cpp is judged by all rows. Larger models get fewer rows: it
# predicts one token at a time, each in the time of reading all weights.
_LLAMA_CPP_BYTES = 1 << 30


def make(job: MakeJob, home: Path, progress: JobProgress) -> None:
    """Quantize and prove one model.

    Raises:
        ExpectedError: the model, the data or the format cannot be used here, or the disk is full.
    """
    model, destination = home / job.model, home / job.destination
    if not (model / "config.json").exists():
        raise ExpectedError(f"{model} is not a model of Transformers.", "Export the run again")
    # Refuse before measuring the original, which takes long.
    if reason := find_refusal(read_json(model / "config.json") or {}, job.method, job.engine):
        raise ExpectedError(f"{reason}.", suggest(job.method, job.engine))
    if EXPORTS[job.method].calibrated:
        calibrated.choose_group(model, job.method)
    if EXPORTS[job.method].runtime == "transformers":
        expect_room(job, model, destination)
    try:
        with using(model):
            proofs = _make_folder(job, model, destination, home, progress)
    finally:
        progress.end()
    verdicts = ", ".join(f"{p.name}: {'keep' if p.keep else 'do not keep'}" for p in proofs)
    progress.tell(f"The artifact is in {destination} ({verdicts})", path=str(destination))


def _make_folder(
    job: MakeJob, model: Path, destination: Path, home: Path, progress: JobProgress
) -> list[Proof]:
    progress.begin("texts", "Reading the texts to judge by", partial_of(destination))
    tokenizer, _ = load_tokenizer(model)
    most = count_tokens(model)
    train = (job.train, *job.more)
    texts = read_texts(train, job.evaluation, tokenizer, job.calibration, most)
    with appearing(destination, "the quantized model") as partial:
        proofs = _make(job, model, home, partial, texts, tokenizer, progress)
        left_wide = find_left_wide(read_json(model / "config.json") or {}, job.method)
        _finish(job, _read_lineage(model), left_wide, partial, proofs, texts, progress.end())
    return proofs


def _make(
    job: MakeJob,
    model: Path,
    home: Path,
    folder: Path,
    texts: Texts,
    tokenizer: Any,
    progress: JobProgress,
) -> list[Proof]:
    rows = texts.held_out
    if EXPORTS[job.method].runtime == "llama.cpp":
        rows = rows[: count_rows(weigh(model))]
    place, stays = find_reference(model, rows, folder)
    if stays:
        progress.count(place)
    # Only models merged by Rackless have an identity; others are measured again.
    first = recall(place, rows) if stays else None
    if first is None:
        first = look_at_original(model, job.device, rows, place, progress)
    else:
        progress.tell("The original was measured here before; its distributions are still there")
    request = WriteRequest(
        job=job,
        model=model,
        folder=folder,
        calibration=texts.calibration,
        tokenizer=tokenizer,
        tools=home / job.tools,
        progress=progress,
    )
    files = find_writer(job.method)(request)
    if files:
        proofs = [
            _prove_gguf(kind, path, first, tokenizer, progress) for kind, path in files.items()
        ]
    else:
        # The merged model names all ids at which it stops; a package may have written others.
        if (model / GENERATION_FILE).exists():
            (folder / GENERATION_FILE).unlink(missing_ok=True)
        # The lineage identifies the merged weights, which the result does not have.
        copy_companions(model, folder, leave=(LINEAGE_FILE,))
        proofs = [prove_folder(job, folder, first, progress)]
    if not stays or weigh_folder(place) > MOST_REFERENCE_BYTES:
        shutil.rmtree(place)
    return proofs


def count_tokens(model: Path) -> int:
    """Return the maximum tokens of a row; llama.cpp refuses more than the model's context."""
    config = read_json(model / "config.json")
    about = config if isinstance(config, dict) else {}
    text = about.get("text_config")
    most = (text if isinstance(text, dict) else about).get("max_position_embeddings")
    return min(MOST_TOKENS, most) if isinstance(most, int) and most > 1 else MOST_TOKENS


def count_rows(size_bytes: int) -> int:
    """Return the number of rows with which llama.cpp is judged.

    >>> count_rows(1 << 30), count_rows(6 << 30), count_rows(140 << 30)
    (12, 2, 2)
    """
    return max(_FEWEST_ROWS, min(_LLAMA_CPP_ROWS, _LLAMA_CPP_ROWS * _LLAMA_CPP_BYTES // size_bytes))


def _prove_gguf(
    kind: str, path: Path, first: Original, tokenizer: Any, progress: JobProgress
) -> Proof:
    progress.begin("proof", f"Loading {kind} in llama.cpp and measuring it")
    # llama.cpp reserves its context on loading, so request only what these rows need.
    longest = max(map(len, first.rows)) + ANSWER_TOKENS
    made = LlamaCpp(path, num_words=first.num_words, context_tokens=longest)
    proof = first.prove(
        kind,
        made,
        [made.answer(prompt, ANSWER_TOKENS) for prompt in first.prompts],
        made.time(first.prompts[0], ANSWER_TOKENS),
        path.stat().st_size,
        name_runtime(),
    )
    return replace(
        proof,
        same_tokens=share_of_same_tokens(first.rows, tokenizer, made.split),
        lost_tokens=find_lost_tokens(first.rows, tokenizer, made.split),
    )


def _read_lineage(model: Path) -> dict[str, Any]:
    """Return the record of the merge: hashes and measured phases."""
    found = read_json(model / LINEAGE_FILE)
    return found if isinstance(found, dict) else {}


def _finish(
    job: MakeJob,
    lineage: dict[str, Any],
    left_wide: str | None,
    folder: Path,
    proofs: list[Proof],
    texts: Texts,
    measured: list[Phase],
) -> None:
    base, data = lineage.get("base_sha256"), lineage.get("data_sha256")
    origin = replace(job.origin, base_sha256=base, data_sha256=data)
    merging = (lineage.get("measured") or {}).get("phases") or []
    phases = [*(from_wire(Phase, phase) for phase in merging), *measured]
    card = write_card(job.method, origin, proofs, texts, folder, phases, job.engine, left_wide)
    (folder / "README.md").write_text(card, encoding="utf-8")
    # `keep` and `problems` are properties, which `to_wire` omits.
    shown = [{**to_wire(proof), "keep": proof.keep, "problems": proof.problems} for proof in proofs]
    about = {
        "method": job.method,
        "origin": asdict(origin),
        "proofs": shown,
        "left_wide": left_wide,
        "measured": {"phases": [asdict(phase) for phase in phases]},
    }
    (folder / PROOF_FILE).write_text(json.dumps(about, indent=1), encoding="ascii")


def read_job(path: Path) -> tuple[MakeJob, Path]:
    """Return the job of a file, and the folder where its relative paths start.

    Raises:
        ExpectedError: it is not a quantizing job.
    """
    plain, home = read_plain(path, "quantizing")
    try:
        job = from_wire(MakeJob, plain, "job")
    except (WireError, ValueError) as error:
        raise ExpectedError(
            f"{path} is not a quantizing job: {error}.", "Export the run again"
        ) from error
    sources = (job.train, job.evaluation, job.calibration)
    train, evaluation, own = (s and replace(s, path=locate(home, s.path)) for s in sources)
    assert train is not None
    more = tuple(replace(one, path=locate(home, one.path)) for one in job.more)
    return replace(job, train=train, more=more, evaluation=evaluation, calibration=own), home


def main(argv: list[str]) -> int:
    """Run one job and return the exit code."""
    usage = "python -m agents.program agents.quantizers.make JOB.json"
    return run_job(argv, usage, lambda path, progress: make(*read_job(path), progress))
