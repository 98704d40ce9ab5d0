"""Quantize a merged model and prove the result: `python -m agents.quantizers.make JOB.json`.

One model is in memory at a time: the original (which answers, and leaves its distributions in a
file), the control, then what was made. The folder appears when all of it is proved; a verdict
against it does not keep it from appearing, since what to do about it is a person's choice.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agents.artifacts import MakeJob, Origin
from agents.errors import UserError
from agents.quantizers.card import write_card
from agents.quantizers.gguf import write_files
from agents.quantizers.merge import LINEAGE_FILE
from agents.quantizers.models import (
    ANSWER_TOKENS,
    choose_prompts,
    continue_prompts,
    loaded_model,
    time_answer,
)
from agents.quantizers.proof import Proof, share_of_same
from agents.quantizers.texts import Texts, read_texts
from agents.quantizers.work import Progress, appearing, locate, read_plain, run_job
from agents.state import read_json
from agents.trainer.data.tokenizer import load_tokenizer
from agents.wire import WireError, from_wire, to_wire

PROOF_FILE = "proof.json"
_LLAMA_CPP_ROWS = 12
"""It is asked for one token after the other."""
_COPIED = (".json", ".jinja", ".model", ".txt")


def make(job: MakeJob, home: Path, progress: Progress) -> None:
    """Do the job.

    Raises:
        UserError: the model, the data or the method is of no use here, or the disk is full.
    """
    model, destination = home / job.model, home / job.destination
    if not (model / "config.json").exists():
        raise UserError(f"{model} is no model of Transformers.", "Export the run again")
    tokenizer, _ = load_tokenizer(model)
    progress.tell("Reading the texts to judge by")
    texts = read_texts(job.train, job.evaluation, tokenizer)
    with appearing(destination, "the quantized model") as partial:
        proofs = _make(job, model, home, partial, texts, progress)
        _finish(job, _trace(job.origin, model), partial, proofs, texts)
    verdicts = ", ".join(f"{p.name}: {'keep' if p.keep else 'do not keep'}" for p in proofs)
    progress.tell(f"The artifact is in {destination} ({verdicts})", path=str(destination))


def _make(
    job: MakeJob, model: Path, home: Path, folder: Path, texts: Texts, progress: Progress
) -> list[Proof]:
    rows = texts.held_out if job.method != "gguf" else texts.held_out[:_LLAMA_CPP_ROWS]
    kept = folder / ".logits"
    first = _look_at_original(model, job.device, rows, kept, progress)
    if job.method == "gguf":
        stem = folder / (re.sub(r"[^A-Za-z0-9]+", "-", job.origin.run_name).strip("-") or "model")
        files = write_files(model, stem, job.types, home / job.tools, progress)
        proofs = [_prove_gguf(kind, path, first, rows, progress) for kind, path in files.items()]
    else:
        proofs = [_make_folder(job, model, folder, first, texts, progress)]
    kept.unlink()
    return proofs


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """What is remembered of the model that the artifact is made of."""

    reference: Any
    control: Any
    answers: list[list[int]]
    size_bytes: int
    num_words: int


def _look_at_original(
    model: Path, device: str, rows: Sequence[Sequence[int]], kept: Path, progress: Progress
) -> Original:
    from agents.quantizers.compare import ModelPredictor, measure, remember
    from agents.quantizers.control import round_weights

    progress.tell("Measuring the original")
    with loaded_model(model, device) as original:
        reference = remember(ModelPredictor(original), rows, kept)
        answers = continue_prompts(original, choose_prompts(rows))
        progress.tell("Measuring the control: weights rounded to 4 bits")
        round_weights(original)
        control = measure(ModelPredictor(original), rows, reference)
        num_words = int(original.get_output_embeddings().weight.shape[0])
    size_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return Original(
        reference=reference,
        control=control,
        answers=answers,
        size_bytes=size_bytes,
        num_words=num_words,
    )


def _make_folder(
    job: MakeJob, model: Path, folder: Path, first: Original, texts: Texts, progress: Progress
) -> Proof:
    """Make a model that Transformers loads."""
    from agents.quantizers import calibrated, nf4
    from agents.quantizers.compare import ModelPredictor, measure

    rows = texts.held_out
    name = " ".join((job.method, *job.types))
    progress.tell(f"Quantizing to {name}")
    if job.method == "nf4":
        nf4.quantize(model, folder, job.device)
    else:
        bits = int(job.types[0][0]) if job.types else 4
        tokenizer, _ = load_tokenizer(model)
        calibrated.quantize(
            job.method, bits, model, folder, job.device, texts.calibration, tokenizer
        )
    _copy_rest(model, folder)
    progress.tell("Loading the result in Transformers and measuring it")
    with loaded_model(folder, job.device) as quantized:
        distance = measure(ModelPredictor(quantized), rows, first.reference)
        answers = continue_prompts(quantized, choose_prompts(rows))
        first_token_s, tokens_per_s = time_answer(quantized, choose_prompts(rows)[0])
    return Proof(
        name=name,
        distance=distance,
        original_perplexity=first.reference.perplexity,
        control=first.control,
        same_answers=share_of_same(first.answers, answers),
        size_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        original_bytes=first.size_bytes,
        tokens_per_s=tokens_per_s,
        first_token_s=first_token_s,
        runtime=f"Transformers {importlib.metadata.version('transformers')}",
    )


def _prove_gguf(
    kind: str, path: Path, first: Original, rows: Sequence[Sequence[int]], progress: Progress
) -> Proof:
    from agents.quantizers.compare import measure
    from agents.quantizers.llama_cpp import LlamaCpp

    progress.tell(f"Loading {kind} in llama.cpp and measuring it")
    prompts = choose_prompts(rows)
    longest = max(map(len, rows)) + ANSWER_TOKENS
    runtime = LlamaCpp(path, num_words=first.num_words, context_tokens=longest)
    distance = measure(runtime, rows, first.reference)
    answers = [runtime.answer(prompt, ANSWER_TOKENS) for prompt in prompts]
    first_token_s, tokens_per_s = runtime.time(prompts[0], ANSWER_TOKENS)
    return Proof(
        name=kind,
        distance=distance,
        original_perplexity=first.reference.perplexity,
        control=first.control,
        same_answers=share_of_same(first.answers, answers),
        size_bytes=path.stat().st_size,
        original_bytes=first.size_bytes,
        tokens_per_s=tokens_per_s,
        first_token_s=first_token_s,
        runtime=f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})",
    )


def _copy_rest(model: Path, folder: Path) -> None:
    written = {path.name for path in folder.iterdir()}
    for path in model.iterdir():
        wanted = path.suffix in _COPIED and path.name not in (LINEAGE_FILE, *written)
        if wanted and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _trace(origin: Origin, model: Path) -> Origin:
    """Return the origin with the hashes that the merge has left."""
    found = read_json(model / LINEAGE_FILE)
    known = found if isinstance(found, dict) else {}
    return replace(
        origin, base_sha256=known.get("base_sha256"), data_sha256=known.get("data_sha256")
    )


def _finish(job: MakeJob, origin: Origin, folder: Path, proofs: list[Proof], texts: Texts) -> None:
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    card = write_card(job.method, origin, proofs, texts, files)
    (folder / "README.md").write_text(card, encoding="utf-8")
    shown = [{**to_wire(proof), "keep": proof.keep, "problems": proof.problems} for proof in proofs]
    about = {"method": job.method, "origin": asdict(origin), "proofs": shown}
    (folder / PROOF_FILE).write_text(json.dumps(about, indent=1), encoding="ascii")


def read_job(path: Path) -> tuple[MakeJob, Path]:
    """Read the job file, and say where its relative paths start.

    Raises:
        UserError: it is not one.
    """
    plain, home = read_plain(path, "quantizing")
    try:
        job = from_wire(MakeJob, plain, "job")
    except (WireError, ValueError) as error:
        raise UserError(f"{path} is no quantizing job: {error}.", "Export the run again") from error
    sources = (job.train, job.evaluation)
    train, evaluation = (s and replace(s, path=locate(home, s.path)) for s in sources)
    assert train is not None
    return replace(job, train=train, evaluation=evaluation), home


def main(argv: list[str]) -> int:
    """Run one job and return the exit code."""
    usage = "python -m agents.quantizers.make JOB.json"
    return run_job(argv, usage, lambda path, progress: make(*read_job(path), progress))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
