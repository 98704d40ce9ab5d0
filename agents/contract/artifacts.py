"""What the master and a node say to each other about making an artifact of a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.contract.formats import ENGINES, EXPORTS, METHODS, Engine, Method
from agents.contract.spec import DataFormat, Objective

PROOF_FILE = "proof.json"
"""In an artifact: what was measured of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """A data file with how it is read."""

    path: str
    format: DataFormat = "auto"
    objective: Objective = "sft"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where an artifact comes from."""

    base: str
    """Name of the base model."""
    data: str
    run_id: str
    run_name: str
    step: int
    base_sha256: str | None = None
    data_sha256: str | None = None
    licence: str | None = None
    """Of the base model, as its own card says it; None: it says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeJob:
    """Quantize a merged model and prove the result. Paths start at the agent's home."""

    python: str
    """Interpreter of the training environment."""
    packages: str | None = None
    """Folder with what the method needs beside that environment; None: it has it all."""
    model: str
    """Folder of the merged model."""
    method: Method
    destination: str
    origin: Origin
    train: TextSource
    evaluation: TextSource | None = None
    calibration: TextSource | None = None
    """What the rounding of AWQ and GPTQ is fitted to; None: rows of the training data."""
    types: tuple[str, ...] = ()
    """Types of the format; several where one job makes them together."""
    engine: Engine = "gptqmodel"
    """What makes AWQ; the other methods have one each."""
    device: str = "cpu"
    """Or such as `cuda:0`."""
    device_id: str = "cpu"
    """What is leased meanwhile: the GPU's uuid."""
    tools: str = "tools"
    """Folder where what is built for quantizing is kept."""

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
        if len(self.types) > 1 and not row.joins_types:
            raise ValueError(f"types has {len(self.types)}; an artifact in {self.method} has one")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagesBuild:
    """Put packages beside the training environment, without touching it."""

    python: str
    lock_sha256: str
    lock_text: str
    """A pip requirements file with exact versions, dependencies included."""
    requirements: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagesReport:
    """Where they are."""

    path: str | None = None
    """Folder relative to the agent's home; None: the environment itself has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDevice:
    """A GPU that a model may be loaded on."""

    device: str
    """Such as `cuda:0`."""
    device_id: str
    """What it is leased by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatJob:
    """Load a model and keep it for a conversation. Paths start at the agent's home."""

    chat: str
    """Names the conversation among those of the connection."""
    python: str
    packages: str | None = None
    model: str
    """Folder of Transformers, or a GGUF file."""
    checkpoint: str | None = None
    """Folder of a checkpoint whose adapter (or weights) come on top of the model; None: none."""
    in_4_bits: bool = False
    """Load the model as NF4, as QLoRA has trained on it; a CPU has the room for it whole."""
    devices: tuple[ChatDevice, ...] = ()
    """The first that no run uses is taken; where there is none, the CPU."""
    idle_s: float = 900.0
    """The model is let go of when nothing was asked for so long."""

    def __post_init__(self) -> None:
        if self.idle_s <= 0:
            raise ValueError(f"idle_s is {self.idle_s}; it must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOpened:
    """A model that is loaded and waits for questions."""

    load_s: float
    runtime: str
    """That runs the model, with its version."""
    device: str
    """Where it was loaded: `cpu`, or a GPU such as `cuda:0`."""
    note: str = ""
    """Why it is not on the GPU that was wanted; empty: it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTurn:
    """A conversation so far, which the model is to go on with."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int = 256
    temperature: float = 0.0
    """0: always the likeliest word; higher ones draw from the distribution, sharpened by it."""
    top_p: float = 1.0
    """Draw only from the likeliest words that together have this share."""

    def __post_init__(self) -> None:
        if not self.messages or self.messages[-1].role != "user":
            raise ValueError("messages ends with no question; the last one must be the user's")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """What a model said."""

    text: str
    num_tokens: int
    first_token_s: float
    """From the question to the first word; the model was loaded before."""
    tokens_per_s: float | None
    """After the first; None: there was only one."""
    runtime: str
    """That ran the model, with its version."""
    cut: bool
    """The answer had reached `max_tokens`, or the end of what the model can hold."""
    stopped: bool = False
    """Somebody has stopped it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """What became of a turn."""

    answer: ChatAnswer | None
    """None: the model is not loaded any more."""
    ended: str = ""
    """Why not, in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeJob:
    run_id: str
    step: int
    python: str
    model_path: str
    destination: str
    """Folder relative to the agent's home."""
