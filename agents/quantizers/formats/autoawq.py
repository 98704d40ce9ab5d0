"""Quantize to AWQ with AutoAWQ 0.2.9, the package that defined the layout of AWQ checkpoints.

It is archived, and as released it silently damages models on a CPU: before each search it keeps
`weight.cpu()`, which on a CPU is the weight itself, and "restores" that. Here it keeps a copy, and
after each search the weights must have the same bits as before, or nothing is written. On a PC with
several GPUs it would use them all; this module shows it only the first.

Lin et al. 2023, arXiv:2306.00978; quantizer.py of AutoAWQ 0.2.9, `_compute_best_scale`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agents.errors import ExpectedError
from agents.quantizers.formats.patching import replaced

Tell = Callable[[int, int], None]
"""Function of the number of finished layers and of all layers."""


def quantize(
    model: Path,
    folder: Path,
    group: int,
    blocks: Sequence[Sequence[int]],
    tokenizer: Any,
    tell: Tell,
) -> None:
    """Write the quantized model into `folder`.

    Args:
        model: folder of Transformers.
        folder: folder for the result.
        group: number of weights that share a scale.
        blocks: token ids of texts, in blocks of one length.
        tokenizer: tokenizer of the model.
        tell: called after each layer.

    Raises:
        ExpectedError: AutoAWQ does not know this kind of model, or damaged its weights.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its notice that it is archived
        from awq import AutoAWQForCausalLM
        from awq.quantize import quantizer
    try:
        loaded = AutoAWQForCausalLM.from_pretrained(
            str(model), device_map="cpu", trust_remote_code=False
        )
    except TypeError as error:  # "gemma3 isn't supported yet."
        raise ExpectedError(
            f"AutoAWQ does not know this kind of model: {error}",
            "Let gptqmodel make it (--engine gptqmodel)",
        ) from error
    config = {"zero_point": True, "q_group_size": group, "w_bit": 4, "version": "GEMM"}
    with _mended(quantizer, tell):
        loaded.quantize(
            tokenizer,
            quant_config=config,
            calib_data=blocks,
            max_calib_samples=len(blocks),
            max_calib_seq_len=len(blocks[0]),
        )
    loaded.save_quantized(str(folder), safetensors=True)


@contextmanager
def _mended(quantizer: Any, tell: Tell) -> Iterator[None]:
    """Make AutoAWQ copy weights, use one GPU and report its layers."""
    search = quantizer.AwqQuantizer._compute_best_scale

    def search_on_copies(self: Any, x: Tensor, w_mean: Tensor, x_mean: Tensor, *rest: Any) -> Any:
        inspected: nn.Module = rest[0]
        with _copied_state(inspected):
            return search(self, x, w_mean, x_mean, *rest)

    def count(places: range, desc: str) -> Iterator[int]:
        for done, place in enumerate(places, 1):
            yield place
            # This progress bar counts layers; others do not.
            if desc == "AWQ":
                tell(done, len(places))

    with (
        replaced(quantizer.AwqQuantizer, "_compute_best_scale", search_on_copies),
        replaced(quantizer, "tqdm", count),
        replaced(torch.cuda, "device_count", lambda: int(torch.cuda.is_available())),
    ):
        yield


@contextmanager
def _copied_state(inspected: nn.Module) -> Iterator[None]:
    """Make `inspected.state_dict()` return copies, and compare the weights with them at the end.

    Raises:
        ExpectedError: the weights have changed.
    """
    plain = inspected.state_dict
    before = {name: value.detach().clone() for name, value in plain().items()}
    with replaced(inspected, "state_dict", lambda: dict(before)):
        yield
    del inspected.state_dict  # reveals the method of the class again
    changed = [name for name, value in plain().items() if not torch.equal(value, before[name])]
    if changed:
        raise ExpectedError(
            f"AutoAWQ damaged {changed[0]} while it looked for scales; nothing was written.",
            "Let gptqmodel make it (--engine gptqmodel)",
        )
