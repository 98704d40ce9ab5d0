"""The original of an artifact and its control: measured once, and cached for other formats.

The control is round to nearest, which a quantizer has to beat: every linear weight except the
head's is rounded to 4 bits in groups of 128 with a zero point, without calibration. A method with a
larger distance from the original has damaged it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

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
from agents.quantizers.proof.verdict import Proof, share_of_same
from agents.state import read_json

# ------------------------------------------------------------------- control

BITS = 4
GROUP = 128


def round_weights(model: Any, bits: int = BITS, group: int = GROUP) -> int:
    """Round the linear weights of `model` in place; return their number.

    The head is not rounded, as in every compared method. Streamed weights (see `models.load_model`)
    are rounded each time they arrive on the device.
    """
    head = model.get_output_embeddings()
    count = 0
    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, nn.Linear) or module is head:
                continue
            if module.weight.is_meta:
                add_hook_to_module(module, _Rounding(bits, group), append=True)
            else:
                module.weight.copy_(round_to_nearest(module.weight, bits, group))
            count += 1
    return count


class _Rounding(ModelHook):
    def __init__(self, bits: int, group: int) -> None:
        self._bits, self._group = bits, group

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Not in place, since on a CPU a streamed weight shares memory with its source.
        module.weight.data = round_to_nearest(module.weight.data, self._bits, self._group)
        return args, kwargs


def round_to_nearest(weight_OI: Tensor, bits: int = BITS, group: int = GROUP) -> Tensor:
    """Return weights (O, I) rounded to integers of `bits` with a zero point per group.

    A row whose length is not a multiple of `group` has a shorter last group.

    >>> round_to_nearest(torch.tensor([[0.0, 1.0, 7.4, 15.0]])).tolist()
    [[0.0, 1.0, 7.0, 15.0]]
    """
    parts = [_round(part_OG, bits) for part_OG in weight_OI.float().split(group, dim=1)]
    return torch.cat(parts, dim=1).to(weight_OI.dtype)


def _round(part_OG: Tensor, bits: int) -> Tensor:
    most = 2**bits - 1
    # The range always includes 0, so that zero weights stay exactly 0.
    low_O1 = part_OG.amin(dim=1, keepdim=True).clamp(max=0)
    high_O1 = part_OG.amax(dim=1, keepdim=True).clamp(min=0)
    scale_O1 = ((high_O1 - low_O1) / most).clamp(min=torch.finfo(torch.float32).tiny)
    zero_O1 = (-low_O1 / scale_O1).round()
    whole_OG = (part_OG / scale_O1 + zero_O1).round().clamp(0, most)
    return (whole_OG - zero_O1) * scale_O1


# ------------------------------------------------------------------- original

_Found = TypeVar("_Found")
LOGITS_FILE, _ABOUT_FILE = "logits", "about.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """Measurements of the original of an artifact."""

    rows: Sequence[Sequence[int]]
    """Held-out token ids."""
    reference: ReferenceOutputs
    control: Distance
    answers: list[list[int]]
    size_bytes: int
    num_words: int

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of the answers."""
        return choose_prompts(self.rows)

    def write(self, folder: Path) -> None:
        """Write the measurements next to the distributions."""
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
        """Return the proof of a result.

        Args:
            name: type or method.
            predictor: predictor of the result.
            answers: answers of the result to `prompts`.
            times: seconds to the first token, and tokens per second; None: not measured.
            size_bytes: size of the result.
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
    """Evaluate the original and cache its distributions in a new folder `place`."""
    progress.begin("original", "Measuring the original")
    at_once = answers_at_once(device)

    def look(original: Any) -> Original:
        return _look(original, model, rows, place, progress, at_once=at_once)

    found = measure_from_files(model, device, look)
    give_back()
    return found


def measure_from_files(model: Path, device: str, look: Callable[[Any], _Found]) -> _Found:
    """Return the result of `look` for a model whose weights may be streamed for each pass.

    Args:
        model: folder of plain weights.
        device: device of the job; the CPU is used if its memory runs out.
        look: function that measures the loaded model.
    """
    try:
        return look(load_model(model, device, may_stream=True))
    except torch.OutOfMemoryError:
        pass  # retried outside: the error still refers to the model
    return look(load_model(model, "cpu", may_stream=True))


def answers_at_once(device: str) -> bool:
    """Return whether a job on this device answers prompts together, for original and result.

    A GPU needs as long for eight tokens as for one; a CPU nearly eight times as long.
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
    with appearing(place, "the cache of the original") as partial:
        reference = remember(ModelPredictor(original), rows, partial / LOGITS_FILE)
        answers = continue_prompts(original, choose_prompts(rows), at_once=at_once)
        progress.begin("control", "Measuring the control: weights rounded to 4 bits")
        # This changes the original in memory, so everything else is measured before.
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
    """Return the measurements that an earlier job has left in a folder, or None."""
    about = read_json(folder / _ABOUT_FILE) or {}
    try:
        reference = ReferenceOutputs(
            logits=folder / LOGITS_FILE,
            num_words=about["num_logits"],
            perplexity=about["perplexity"],
            num_tokens=about["num_tokens"],
        )
        # float16 has 2 bytes; any other size means that the file is damaged.
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
