"""Find what writes a format: the module of that name here, with a function `write`.

Modules are imported on use, since each brings packages that the others do without.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.requests.exports import MakeJob
from agents.quantizers.job.job import JobProgress

# One module for two formats: they differ in settings of the same package.
_MODULES = {"awq": "calibrated", "gptq": "calibrated"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    """What a module needs to write one model."""

    job: MakeJob
    """Names method, types, engine and device."""
    model: Path
    """Folder of the merged model, in the layout of Transformers."""
    folder: Path
    """Folder for the result."""
    calibration: Sequence[Sequence[int]]
    """Token ids of the texts that rounding is fitted to."""
    tokenizer: Any
    tools: Path
    """Folder where tools that are built once are kept."""
    progress: JobProgress

    def begin(self) -> None:
        """Begin the phase in which the model is quantized."""
        name = " ".join((self.job.method, *self.job.types))
        self.progress.begin("quantize", f"Quantizing to {name}")


def find_writer(method: str) -> Callable[[WriteRequest], dict[str, Path]]:
    """Return the function that writes a format.

    It returns the file of each type, or nothing where the folder as a whole is a model of
    Transformers, whose tokenizer and configuration the caller adds.
    """
    module = importlib.import_module(f"{__package__}.{_MODULES.get(method, method)}")
    write: Callable[[WriteRequest], dict[str, Path]] = module.write
    return write
