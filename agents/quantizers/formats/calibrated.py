"""AWQ and GPTQ, mostly by gptqmodel: 4 or 8 bits whose rounding is fitted to texts.

AWQ (Lin et al. 2023, arXiv:2306.00978) is written in its classic layout, groups of 128 with a zero
point, which vLLM, TGI and Transformers load; gptqmodel writes it with `sym=False`. GPTQ (Frantar et
al. 2022, arXiv:2210.17323) is symmetric.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agents.contract import formats
from agents.contract.formats import Method
from agents.errors import ExpectedError
from agents.quantizers.formats import autoawq
from agents.quantizers.formats.by_gptqmodel import SCRATCH, Gptqmodel, QuantizedLayers
from agents.quantizers.formats.registry import WriteRequest
from agents.quantizers.job.texts import split_blocks


def write(request: WriteRequest) -> dict[str, Path]:
    """Write the quantized model.

    Raises:
        ExpectedError: the layers' sizes cannot be divided into groups, or the engine fails.
    """
    request.begin()
    job, tokenizer = request.job, request.tokenizer
    group = choose_group(request.model, job.method)
    num_layers = _read_config(request.model)["num_hidden_layers"]
    # Absolute, since the working folder changes below.
    model, folder = request.model.absolute(), request.folder.absolute()
    layers = QuantizedLayers(request.progress, num_layers)
    rows = split_blocks(request.calibration) if job.method == "awq" else request.calibration
    with _working_in(folder / SCRATCH):
        if job.engine == "autoawq":
            autoawq.quantize(model, folder, group, rows, tokenizer, layers.tell)
        else:
            work = Gptqmodel(
                job=job, model=model, folder=folder, group=group, rows=rows,
                tokenizer=tokenizer, layers=layers,
            )  # fmt: skip
            work.do()
    return {}


def _read_config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
    return config


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Keep files that an engine leaves in the working folder in a new one, deleted at the end."""
    folder.mkdir()
    before = Path.cwd()
    # This affects the whole process, which is safe since each job has its own.
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def choose_group(model: Path, method: Method) -> int:
    """Return the largest group that divides the inputs of all linear layers.

    Raises:
        ExpectedError: no group does, or AWQ cannot divide the outputs.
    """
    try:
        return formats.choose_group(_read_config(model), method)
    except ValueError as error:
        reason = str(error)
        if not reason.startswith(method):
            reason = reason[0].upper() + reason[1:]
        raise ExpectedError(f"{reason}.", "Use nf4 or gguf") from error
