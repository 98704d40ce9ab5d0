"""The model that an artifact is made of: measured once, and remembered for other formats of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from agents.contract.wire import WireError, from_wire, to_wire
from agents.quantizers.inference.models import (
    choose_prompts,
    continue_prompts,
    give_back,
    load_model,
    weigh,
)
from agents.quantizers.job.job import JobProgress, appearing
from agents.quantizers.proof.compare import (
    Distance,
    ModelPredictor,
    Predictor,
    ReferenceOutputs,
    measure,
    remember,
)
from agents.quantizers.proof.rtn_baseline import round_weights
from agents.quantizers.proof.verdict import Proof, share_of_same
from agents.state import read_json

_Found = TypeVar("_Found")
LOGITS_FILE, _ABOUT_FILE = "logits", "about.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """What is remembered of the model that the artifact is made of."""

    rows: Sequence[Sequence[int]]
    """Held-out token ids."""
    reference: ReferenceOutputs
    control: Distance
    answers: list[list[int]]
    size_bytes: int
    num_words: int

    @property
    def prompts(self) -> list[list[int]]:
        """What was answered."""
        return choose_prompts(self.rows)

    def write(self, folder: Path) -> None:
        """Leave what is remembered beside the distributions."""
        about = {
            "perplexity": self.reference.perplexity,
            "num_tokens": self.reference.num_tokens,
            "num_logits": self.reference.num_words,
            "control": to_wire(self.control),
            "answers": self.answers,
            "size_bytes": self.size_bytes,
            "num_words": self.num_words,
        }
        (folder / _ABOUT_FILE).write_text(json.dumps(about), encoding="ascii")

    def prove(
        self,
        name: str,
        predictor: Predictor,
        answers: list[list[int]],
        times: tuple[float, float] | None,
        size_bytes: int,
        runtime: str,
    ) -> Proof:
        """Return the proof of what was made.

        Args:
            name: of type or method.
            predictor: of what was made.
            answers: to `prompts`.
            times: seconds to the first token, and tokens per second; None: not measured.
            size_bytes: of what was made.
            runtime: program that loaded it.
        """
        first_token_s, tokens_per_s = times or (None, None)
        return Proof(
            name=name,
            distance=measure(predictor, self.rows, self.reference),
            original_perplexity=self.reference.perplexity,
            control=self.control,
            same_answers=share_of_same(self.answers, answers),
            size_bytes=size_bytes,
            original_bytes=self.size_bytes,
            tokens_per_s=tokens_per_s,
            first_token_s=first_token_s,
            runtime=runtime,
        )


def look_at_original(
    model: Path, device: str, rows: Sequence[Sequence[int]], place: Path, progress: JobProgress
) -> Original:
    """Measure the original, and leave what is remembered of it in a new folder `place`."""
    progress.begin("original", "Measuring the original")
    at_once = answers_at_once(device)

    def look(original: Any) -> Original:
        return _look(original, model, rows, place, progress, at_once=at_once)

    found = measure_from_files(model, device, look)
    give_back()
    return found


def measure_from_files(model: Path, device: str, look: Callable[[Any], _Found]) -> _Found:
    """Return what `look` finds of a model, whose weights may come for each pass.

    Args:
        model: folder of plain weights.
        device: device of the job; if others have taken its memory meanwhile, the CPU does it.
        look: measures the loaded model.
    """
    try:
        return look(load_model(model, device, may_stream=True))
    except torch.OutOfMemoryError:
        pass  # the model goes with the error, hence not here
    return look(load_model(model, "cpu", may_stream=True))


def answers_at_once(device: str) -> bool:
    """Tell whether a job on a device answers prompts together, of the original as of the result.

    A GPU takes as long for eight tokens as for one; a processor nearly eight times as long.
    """
    return device != "cpu"


def _look(
    original: Any,
    model: Path,
    rows: Sequence[Sequence[int]],
    place: Path,
    progress: JobProgress,
    *,
    at_once: bool,
) -> Original:
    with appearing(place, "what is remembered of the original") as partial:
        reference = remember(ModelPredictor(original), rows, partial / LOGITS_FILE)
        answers = continue_prompts(original, choose_prompts(rows), at_once=at_once)
        progress.begin("control", "Measuring the control: weights rounded to 4 bits")
        # Destroys the original in memory, so everything else about it is measured before.
        round_weights(original)
        found = Original(
            rows=rows,
            # The folder is renamed from `partial` to `place` at the end of the block.
            reference=replace(reference, logits=place / LOGITS_FILE),
            control=measure(ModelPredictor(original), rows, reference),
            answers=answers,
            size_bytes=weigh(model),
            num_words=int(original.get_output_embeddings().weight.shape[0]),
        )
        found.write(partial)
    return found


def recall(folder: Path, rows: Sequence[Sequence[int]]) -> Original | None:
    """Return what an earlier job has left in a folder; None: nothing that is whole."""
    about = read_json(folder / _ABOUT_FILE) or {}
    try:
        reference = ReferenceOutputs(
            logits=folder / LOGITS_FILE,
            num_words=about["num_logits"],
            perplexity=about["perplexity"],
            num_tokens=about["num_tokens"],
        )
        # float16: 2 bytes each. Any other size means that the file is damaged.
        if reference.logits.stat().st_size != 2 * reference.num_tokens * reference.num_words:
            return None
        return Original(
            rows=rows,
            reference=reference,
            control=from_wire(Distance, about["control"]),
            answers=about["answers"],
            size_bytes=about["size_bytes"],
            num_words=about["num_words"],
        )
    except (OSError, TypeError, KeyError, WireError):
        return None
