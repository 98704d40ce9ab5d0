"""AWQ and GPTQ, mostly by gptqmodel: 4 or 8 bits whose rounding is fitted to texts.

AWQ (Lin et al. 2023, arXiv:2306.00978) is written in its classic layout, groups of 128 with a zero
point, which vLLM, TGI and Transformers load: gptqmodel writes that one with `sym=False`. GPTQ
(Frantar et al. 2022, arXiv:2210.17323) is symmetric. gptqmodel works through the model layer by
layer, so that no more than a few of them are on the GPU at once. Its kernels in plain PyTorch pack
the result: the faster ones are compiled at their first use, which takes minutes and a compiler
that few PCs have, and serve a model that runs rather than one that is made.
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
from agents.quantizers.work import Progress

GROUPS = (128, 64, 32)
"""Weights that share a scale; the first that divides every layer's input is taken."""
_AWQ_ROWS = 64
"""AWQ's search for clipping takes the outputs of a layer in blocks of so many."""
_LEAST_CORES = 8
_ROWS_AT_ONCE = 8


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
    layers = _Layers(progress, _count_layers(model))
    if job.engine == "autoawq":
        autoawq.quantize(model, folder, group, calibration, tokenizer, layers.tell)
        return
    let_few_cores_work()
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    is_awq = job.method == "awq"
    bits = int(job.types[0][0]) if job.types else 4
    settings: dict[str, Any] = {"bits": bits, "group_size": group}
    if is_awq:
        settings |= {"sym": False, "quant_method": "awq", "format": "gemm"}
    plain = BACKEND.AWQ_TORCH if is_awq else BACKEND.GPTQ_TORCH
    rows = [{"input_ids": list(row), "attention_mask": [1] * len(row)} for row in calibration]
    model, folder = model.absolute(), folder.absolute()
    scratch = folder / ".scratch"
    scratch.mkdir()
    with _working_in(scratch):  # gptqmodel keeps its log and the layers that it has done in "."
        quantized = GPTQModel.load(
            str(model), QuantizeConfig(**settings), device=job.device, backend=plain
        )
        quantized.layer_callback = layers
        quantized.quantize(
            calibration=rows, batch_size=_ROWS_AT_ONCE, tokenizer=tokenizer, backend=plain
        )
        quantized.save(str(folder))
    shutil.rmtree(scratch)


class _Layers:
    """Hears from an engine when a layer is done."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done: set[int] = set()

    def layer_complete(self, *, layer_idx: int, submodule_finalized: bool) -> None:
        if submodule_finalized and layer_idx not in self._done:
            self._done.add(layer_idx)
            self.tell(len(self._done), self._total)

    def tell(self, done: int, total: int) -> None:
        """Tell of so many layers."""
        text = f"Quantized {done} of {total} layers"
        self._progress.tell(text, done=done, total=total)


def _count_layers(model: Path) -> int:
    return int(json.loads((model / "config.json").read_bytes())["num_hidden_layers"])


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def let_few_cores_work() -> None:
    """Let gptqmodel be imported on a PC with few cores, where its pools of threads are too small.

    It gives each pool a share of `os.cpu_count()` and refuses a pool of one.
    """
    if (os.cpu_count() or 1) < _LEAST_CORES:
        os.cpu_count = lambda: _LEAST_CORES


def choose_group(model: Path, method: Method) -> int:
    """Return the largest group that divides the inputs of all linear layers.

    Raises:
        UserError: none does, or AWQ cannot divide the outputs.
    """
    config = json.loads((model / "config.json").read_bytes())
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
