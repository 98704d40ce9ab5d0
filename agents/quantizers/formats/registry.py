"""Find the writer of a format: the function `write` in the module of that name here.

Modules are imported on use, since each needs packages that the others do not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.requests.exports import MakeJob
from agents.quantizers.job.job import JobProgress

# One module for two formats, which differ in settings of the same package.
_MODULES = {"awq": "calibrated", "gptq": "calibrated"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    """Inputs for writing one model."""

    job: MakeJob
    """Method, types, engine and device."""
    model: Path
    """Folder of the merged model, in the layout of Transformers."""
    folder: Path
    """Folder for the result."""
    calibration: Sequence[Sequence[int]]
    """Token ids of the texts that the rounding is fitted to."""
    tokenizer: Any
    tools: Path
    """Folder of tools that are built once."""
    progress: JobProgress

    def begin(self) -> None:
        """Begin the phase of quantizing."""
        name = " ".join((self.job.method, *self.job.types))
        self.progress.begin("quantize", f"Quantizing to {name}")


def find_writer(method: str) -> Callable[[WriteRequest], dict[str, Path]]:
    """Return the function that writes a format.

    It returns the file of each type, or nothing if the folder as a whole is a model of
    Transformers, to which the caller adds tokenizer and configuration.
    """
    module = importlib.import_module(f"{__package__}.{_MODULES.get(method, method)}")
    write: Callable[[WriteRequest], dict[str, Path]] = module.write
    return write
