"""Requests for artifacts of trained models: merging a checkpoint and quantizing the result."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agents.contract.formats import ENGINES, EXPORTS, METHODS, Engine, Method
from agents.contract.names import MAX_STEP, check_inside, check_name, check_number
from agents.contract.objectives import DataFormat, Objective
from agents.contract.requests import NodeRequest
from agents.contract.run import FileEntry
from agents.contract.spec import Encoding

PROOF_FILE = "proof.json"
"""File of an artifact with its measured quality."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Data file, and how to read it."""

    path: str
    format: DataFormat = "auto"
    objective: Objective = "sft"
    columns: tuple[str, ...] = ()
    """Entries of `data.columns`."""
    encoding: Encoding = "utf-8"
    split: str | None = None
    """Name of the split to read; None: the training split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Provenance of an artifact."""

    base: str
    """Hub id or folder of the base model."""
    data: str
    run_id: str
    run_name: str
    step: int
    base_sha256: str | None = None
    data_sha256: str | None = None
    licence: str | None = None
    """Licence in the card of the base model; None: the card names no licence."""


_MARKDOWN = re.compile(r"([\\`*_<>\[\]#|!&~])")
_LICENCE = re.compile(r"[A-Za-z0-9][\w.+-]{0,95}")


def card_text(text: str) -> str:
    """Return a name as plain text of a card: on one line, without Markdown or HTML.

    >>> print(card_text("poems <img src=x>\\n---"))
    poems \\<img src=x\\> ---
    """
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def card_code(text: str) -> str:
    """Return a name, path or hash as code in a card.

    >>> card_code("x` <b>")
    "`x' <b>`"
    """
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def card_licence(licence: str | None) -> str:
    """Return the line about the licence at the top of a card, or an empty text.

    >>> card_licence("mit"), card_licence("mit\\nbase_model: x"), card_licence(None)
    ('license: mit\\n', '', '')
    """
    return f"license: {licence}\n" if licence and _LICENCE.fullmatch(licence) else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFiles:
    path: str
    """Folder on the node, relative to the agent's home."""
    files: tuple[FileEntry, ...] = ()

    def check_foreign(self) -> None:
        check_inside(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeJob(NodeRequest[ExportedFiles]):
    """Quantize a merged model and prove the result. Paths start at the agent's home."""

    kind = "export.made"
    limit_s = None
    python: str
    """Interpreter of the training environment."""
    packages: str | None = None
    """Folder with additional packages; None: the training environment suffices."""
    model: str
    """Folder of the merged model."""
    method: Method
    destination: str
    origin: Origin
    train: TextSource
    evaluation: TextSource | None = None
    calibration: TextSource | None = None
    """Texts for the calibration of AWQ and GPTQ; None: rows of the training data."""
    more: tuple[TextSource, ...] = ()
    """Further sources of the training data."""
    types: tuple[str, ...] = ()
    """Types of the format; several if one job makes them together."""
    engine: Engine = "gptqmodel"
    """Package that makes AWQ; other formats have one package each."""
    device: str = "cpu"
    """Device in the node's own order, such as `cpu` or `cuda:0`."""
    device_id: str = "cpu"
    """Key of the lease: the GPU's uuid, or `cpu`."""
    tools: str = "tools"
    """Folder for tools that are built once, such as llama.cpp's quantizer."""

    def check_foreign(self) -> None:
        for path in (self.packages, self.tools):
            if path is not None:
                check_inside(path)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method}; it must be one of {', '.join(METHODS)}")
        row = EXPORTS[self.method]
        known = row.types
        unknown = [kind for kind in self.types if kind not in known]
        if unknown:
            raise ValueError(
                f"types has {unknown[0]}; {self.method} has {', '.join(known) or 'none'}"
            )
        if bool(known) != bool(self.types):
            raise ValueError(
                f"types is {self.types}; {self.method} needs {'one' if known else 'none'}"
            )
        if self.engine not in ENGINES:
            raise ValueError(f"engine is {self.engine}; it must be {' or '.join(ENGINES)}")
        if self.engine not in row.engines:
            raise ValueError(f"engine is {self.engine}, which does not make {self.method}")
        # Only GGUF shares work between types: the smaller ones are made from one F16 file.
        if len(self.types) > 1 and not row.joins_types:
            raise ValueError(f"types has {len(self.types)}; an artifact in {self.method} has one")


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeJob(NodeRequest[ExportedFiles]):
    """Merge a checkpoint's adapter into its model."""

    kind = "export.merged"
    limit_s = None
    run_id: str
    step: int
    python: str
    model_path: str
    destination: str
    """Folder relative to the agent's home."""

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("step", self.step, 0, MAX_STEP)
