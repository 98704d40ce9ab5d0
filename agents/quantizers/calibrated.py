"""AWQ and GPTQ, mostly by gptqmodel: 4 or 8 bits whose rounding is fitted to texts.

AWQ (Lin et al. 2023, arXiv:2306.00978) is written in its classic layout, groups of 128 with a zero
point, which vLLM, TGI and Transformers load: gptqmodel writes that one with `sym=False`. GPTQ
(Frantar et al. 2022, arXiv:2210.17323) is symmetric.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agents.artifacts import MakeJob, Method
from agents.errors import UserError
from agents.quantizers import autoawq
from agents.quantizers.by_gptqmodel import SCRATCH, Gptqmodel, Layers
from agents.quantizers.texts import split_blocks
from agents.quantizers.work import Progress

GROUPS = (128, 64, 32)
"""Weights that share a scale; the first that divides every layer's input is taken."""
_SIZES = {"hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"}
"""That every transformer of our time has in its configuration; GPT-2 and Mamba have others."""
_AWQ_ROWS = 64
"""AWQ's search for clipping takes the outputs of a layer in blocks of so many."""


def quantize(
    job: MakeJob,
    model: Path,
    folder: Path,
    calibration: Sequence[Sequence[int]],
    tokenizer: Any,
    progress: Progress,
) -> None:
    """Write the quantized model into `folder`.

    Args:
        job: names method, type, engine and device.
        model: folder of Transformers.
        folder: where it goes.
        calibration: token ids of texts.
        tokenizer: of the model.
        progress: hears of each layer.

    Raises:
        UserError: the layers' sizes cannot be divided into groups, or the engine cannot do it.
    """
    group = choose_group(model, job.method)
    num_layers = _read_sizes(model, job.method)["num_hidden_layers"]
    model, folder = model.absolute(), folder.absolute()
    layers = Layers(progress, num_layers)
    rows = split_blocks(calibration) if job.method == "awq" else calibration
    with _working_in(folder / SCRATCH):
        if job.engine == "autoawq":
            autoawq.quantize(model, folder, group, rows, tokenizer, layers.tell)
        else:
            work = Gptqmodel(
                job=job, model=model, folder=folder, group=group, rows=rows,
                tokenizer=tokenizer, layers=layers,
            )  # fmt: skip
            work.do()


def _read_sizes(model: Path, method: Method) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
    if not config.keys() >= _SIZES:
        raise UserError(
            f"{method} is not made of this kind of model ({config.get('model_type')}), whose "
            "layers are built otherwise.",
            "Use nf4 or gguf",
        )
    return config


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Let what an engine leaves in the working folder lie in a new one, which goes at the end."""
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def choose_group(model: Path, method: Method) -> int:
    """Return the largest group that divides the inputs of all linear layers.

    Raises:
        UserError: none does, or AWQ cannot divide the outputs.
    """
    config = _read_sizes(model, method)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads") or heads
    inputs = (hidden, heads * width, config["intermediate_size"])
    outputs = (hidden, heads * width, keys * width, config["intermediate_size"])
    groups = [group for group in GROUPS if all(size % group == 0 for size in inputs)]
    if not groups:
        raise UserError(
            f"The layers of this model have {', '.join(map(str, sorted(set(inputs))))} inputs; "
            f"{method} needs multiples of {GROUPS[-1]}.",
            "Use nf4 or gguf",
        )
    odd = [size for size in outputs if size % _AWQ_ROWS]
    if method == "awq" and odd:
        raise UserError(
            f"A layer of this model has {odd[0]} outputs; awq needs multiples of {_AWQ_ROWS}.",
            "Use gptq, nf4 or gguf",
        )
    return groups[0]
