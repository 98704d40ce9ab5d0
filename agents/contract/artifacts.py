"""Messages about making artifacts of trained models, and about chats with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.contract.formats import ENGINES, EXPORTS, METHODS, Engine, Method
from agents.contract.names import MAX_STEP, check_inside, check_name, check_number
from agents.contract.objectives import DataFormat, Objective

PROOF_FILE = "proof.json"
"""File of an artifact with its measured quality."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """A data file and how to read it."""

    path: str
    format: DataFormat = "auto"
    objective: Objective = "sft"


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
    """Licence in the card of the base model; None: the card names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeJob:
    """Quantize a merged model and prove the result. Paths start at the agent's home."""

    python: str
    """Interpreter of the training environment."""
    packages: str | None = None
    """Folder with packages beside that environment; None: the environment has them all."""
    model: str
    """Folder of the merged model."""
    method: Method
    destination: str
    origin: Origin
    train: TextSource
    evaluation: TextSource | None = None
    calibration: TextSource | None = None
    """Texts that AWQ and GPTQ are fitted to; None: rows of the training data."""
    types: tuple[str, ...] = ()
    """Types of the format; several where one job makes them together."""
    engine: Engine = "gptqmodel"
    """Package that makes AWQ; the other formats have one each."""
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
        # Only GGUF shares work between types: the smaller ones are made of one F16 file.
        if len(self.types) > 1 and not row.joins_types:
            raise ValueError(f"types has {len(self.types)}; an artifact in {self.method} has one")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagesBuild:
    """Request to install packages beside the training environment, which stays untouched."""

    python: str
    lock_sha256: str
    lock_text: str
    """A lock: exact versions with the hashes of their files, dependencies included."""
    requirements: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagesReport:
    """Result of a PackagesBuild."""

    path: str | None = None
    """Folder relative to the agent's home; None: the environment itself has the packages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDevice:
    """A GPU on which a model may be loaded."""

    device: str
    """Device in the node's own order, such as `cuda:0`."""
    device_id: str
    """Key of the lease: the GPU's uuid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatJob:
    """Request to load a model for a conversation. Paths start at the agent's home."""

    chat: str
    """Id of the conversation, unique within the connection."""
    python: str
    packages: str | None = None
    model: str
    """Folder of Transformers, or GGUF file."""
    checkpoint: str | None = None
    """Folder of the checkpoint whose adapter or weights are applied to the model; None: none."""
    in_4_bits: bool = False
    """Whether to load the model as NF4, as QLoRA trained it; ignored on a CPU, which has the
    room."""
    devices: tuple[ChatDevice, ...] = ()
    """GPUs in order of preference: the first free one is used, else the CPU."""
    idle_s: float = 900.0
    """Seconds without a question after which the model is unloaded."""

    def __post_init__(self) -> None:
        if self.idle_s <= 0:
            raise ValueError(f"idle_s is {self.idle_s}; it must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOpened:
    """Answer to a ChatJob: the model is loaded."""

    load_s: float
    runtime: str
    """Program that runs the model, with its version."""
    device: str
    """Device of the model: `cpu`, or a GPU such as `cuda:0`."""
    note: str = ""
    """Reason why it is not on the requested GPU; empty: it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTurn:
    """A conversation that the model continues."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int = 256
    temperature: float = 0.0
    """Sampling temperature; 0: always the likeliest token."""
    top_p: float = 1.0
    """Probability mass of the likeliest tokens to sample from, above 0 to 1."""

    def __post_init__(self) -> None:
        if not self.messages or self.messages[-1].role != "user":
            raise ValueError("the last of messages is not a question; it must be of the role user")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """Answer of a model."""

    text: str
    num_tokens: int
    first_token_s: float
    """Seconds from the question to the first token, without loading the model."""
    tokens_per_s: float | None
    """Speed after the first token; None: there was only one."""
    runtime: str
    """Program that ran the model, with its version."""
    cut: bool
    """Whether the answer reached `max_tokens` or the end of the model's context."""
    stopped: bool = False
    """Whether the user stopped it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """Result of a turn."""

    answer: ChatAnswer | None
    """Answer; None: the model is no longer loaded."""
    ended: str = ""
    """Reason why there is no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeJob:
    run_id: str
    step: int
    python: str
    model_path: str
    destination: str
    """Folder relative to the agent's home."""

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("step", self.step, 0, MAX_STEP)
