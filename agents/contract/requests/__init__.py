"""Requests of a master to a node: one class each, shared by both sides.

A class defines everything about its request: kind on the wire, arguments, answer, deadline, and the
arguments that the answer must repeat. A master sends it with `NodeClient.ask`. On a node, a
function that names the class in `handles` answers it; it is in the file of `agents/serve/handlers`
with the same name as the file here.

Raw bytes do not travel as requests: `receive` and `send` are commands of the archive, each on its
own channel (see `agents/node/files.py`).
"""

from __future__ import annotations

import importlib
import typing
from typing import Any, ClassVar, Generic, TypeVar

from agents.contract.wire import WireError, from_wire, shorten, to_wire

Answer = TypeVar("Answer")
R = TypeVar("R", bound="NodeRequest[Any]")

QUICK_S = 30.0
"""Maximum duration of a request that only reads or changes state, in seconds."""
LOOK_S = 120.0
"""Maximum duration of examining the software of a node, in seconds."""
DELETE_S = 300.0
"""Maximum duration of deleting files, in seconds."""
HASH_S = 4 * 3600.0
"""Maximum duration of hashing a model or checkpoint, in seconds: a terabyte from a slow disk."""
ROOMS = {
    "artifact": "runs",
    "attempt": "attempts",
    "bundle": "runs",
    "change": "repairs",
    "chat": "chats",
    "checkpoint": "runs",
    "data": "jobs",
    "environment": "environment",
    "export": "exports",
    "facts": "node",
    "files": "shared",
    "gpu": "jobs",
    "hub": "hub",
    "logs": "node",
    "model": "models",
    "node": "examination",
    "packages": "environment",
    "port": "probes",
    "probe": "probes",
    "repair": "repairs",
    "run": "runs",
    "storage": "storage",
    "stream": "streams",
    "telemetry": "telemetry",
    "wheels": "environment",
}
"""Module of requests, and of handlers, by the first word of a kind; nodes import it on demand."""

_CLASSES: dict[str, type[NodeRequest[Any]]] = {}


class NodeRequest(Generic[Answer]):
    """Base class of all requests; they are frozen dataclasses whose fields are the arguments."""

    __slots__ = ()

    kind: ClassVar[str]
    """Kind on the wire, such as `attempt.stop`."""
    answer: ClassVar[Any]
    """Class of the answer, as in `NodeRequest[Answer]`; NoneType: an empty answer."""
    limit_s: ClassVar[float | None] = QUICK_S
    """Maximum duration, in seconds; None: only the loss of the link ends it."""
    is_verbatim: ClassVar[bool] = False
    """True if texts of the answer and of its progress may have several lines, such as logs."""
    flat: ClassVar[str] = ""
    """Name of the only field, if the arguments on the wire are that field's own fields; else
    empty."""
    echoes: ClassVar[tuple[str, ...]] = ()
    """Arguments that the answer repeats."""

    def __init_subclass__(cls) -> None:
        bases: tuple[Any, ...] = vars(cls)["__orig_bases__"]
        cls.answer = typing.get_args(bases[0])[0]
        # `dataclass(slots=True)` creates the class a second time, which is the final one.
        _CLASSES[cls.kind] = cls

    def deadline_s(self) -> float | None:
        """Return the maximum duration, in seconds, or None if only the loss of the link ends it."""
        return self.limit_s

    def to_args(self) -> dict[str, Any]:
        """Return the arguments on the wire."""
        args: dict[str, Any] = to_wire(getattr(self, self.flat) if self.flat else self)
        return args

    @classmethod
    def from_args(cls: type[R], args: dict[str, Any]) -> R:
        """Return the request with these arguments.

        Raises:
            WireError: an argument is missing, has the wrong type, or is not allowed.
        """
        if not cls.flat:
            return from_wire(cls, args, "args")
        inner = typing.get_type_hints(cls)[cls.flat]
        return cls(**{cls.flat: from_wire(inner, args, cls.flat)})

    def read_answer(self, result: dict[str, Any]) -> Answer:
        """Return the answer to this request.

        Raises:
            WireError: it has a wrong form, or does not repeat the request.
        """
        # An answer without data is `{}` on the wire, so there is no class to read.
        is_empty = self.answer is type(None)
        answer: Answer = typing.cast(Any, None if is_empty else from_wire(self.answer, result))
        self.check_answer(answer)
        return answer

    def check_answer(self, answer: Answer) -> None:
        """Check that an answer matches the request.

        Raises:
            WireError: it answers something else.
        """
        self.check_echo(answer)

    def check_echo(self, said: Any) -> None:
        """Check that `said` repeats this request's `echoes`.

        Raises:
            WireError: it does not.
        """
        asked = getattr(self, self.flat) if self.flat else self
        for name in self.echoes:
            found, wanted = getattr(said, name), getattr(asked, name)
            if found != wanted:
                raise WireError(f"{name} is {shorten(found)}, not {shorten(wanted)}")


def find_request(kind: str) -> type[NodeRequest[Any]] | None:
    """Return the class of this kind of request, or None if it is unknown."""
    room = ROOMS.get(kind.partition(".")[0])
    if room is None:
        return None
    # The import fills `_CLASSES`.
    importlib.import_module(f"{__name__}.{room}")
    return _CLASSES.get(kind)
