"""Requests about chats with a model that stays loaded on a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.contract.requests import NodeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDevice:
    """GPU on which a model may be loaded."""

    device: str
    """Device in the node's own order, such as `cuda:0`."""
    device_id: str
    """Key of the lease: the GPU's uuid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOpened:
    """Answer to a ChatJob, after the model is loaded."""

    load_s: float
    runtime: str
    """Program that runs the model, with its version."""
    device: str
    """Device of the model: `cpu`, or a GPU such as `cuda:0`."""
    note: str = ""
    """Reason why it is not on the requested GPU; empty: it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatJob(NodeRequest[ChatOpened]):
    """Load a model for a chat, until it is closed, is idle, or its GPU is needed for other work.

    Paths start at the agent's home.
    """

    kind = "chat.open"
    limit_s = None
    chat: str
    """Id of the chat, unique within the connection."""
    python: str
    packages: str | None = None
    model: str
    """Model folder of Transformers, or GGUF file."""
    checkpoint: str | None = None
    """Folder of the checkpoint whose adapter or weights are applied to the model; None: no
    checkpoint."""
    in_4_bits: bool = False
    """True to load the model as NF4, as QLoRA trained it; ignored on a CPU, which has enough
    memory."""
    devices: tuple[ChatDevice, ...] = ()
    """GPUs in order of preference; the first free one is used, else the CPU."""
    idle_s: float = 900.0
    """Time without a question after which the model is unloaded, in seconds."""

    def __post_init__(self) -> None:
        if self.idle_s <= 0:
            raise ValueError(f"idle_s is {self.idle_s}; it must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTurn:
    """Conversation that the model continues."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int = 256
    temperature: float = 0.0
    """Sampling temperature; 0: always the likeliest token."""
    top_p: float = 1.0
    """Probability mass of the likeliest tokens to sample from, above 0 up to 1."""

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
    """Time from the question to the first token, without loading the model, in seconds."""
    tokens_per_s: float | None
    """Speed after the first token; None: the answer has only one token."""
    runtime: str
    """Program that ran the model, with its version."""
    cut: bool
    """True if the answer reached `max_tokens` or the end of the model's context."""
    stopped: bool = False
    """True if the user stopped it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """Result of a turn."""

    answer: ChatAnswer | None
    """Answer; None: the model is no longer loaded."""
    ended: str = ""
    """Reason why there is no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskChat(NodeRequest[ChatReply]):
    """Let a loaded model continue a conversation, streaming text as `progress` events."""

    kind = "chat.ask"
    limit_s = None
    is_verbatim = True
    chat: str
    turn: ChatTurn


@dataclass(frozen=True, kw_only=True, slots=True)
class StopChat(NodeRequest[None]):
    """Cut the current answer short."""

    kind = "chat.stop"
    chat: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseChat(NodeRequest[None]):
    """Unload a model."""

    kind = "chat.close"
    chat: str
