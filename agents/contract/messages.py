"""Envelopes of the messages between the master and a node.

One message is one line of JSON, in one of three envelopes: Request (master to node), Response
(exactly one per request) and Event (node to master, unsolicited or following a request). The
requests, with their arguments and answers, are the classes of `agents.contract.requests`. `None`
means "not known" everywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from agents.contract.json_text import parse_json
from agents.contract.version import PROTOCOL_VERSION as PROTOCOL_VERSION
from agents.contract.wire import WireError as WireError
from agents.contract.wire import from_wire as from_wire
from agents.contract.wire import replace_surrogates, shorten
from agents.contract.wire import to_wire as to_wire

MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line, enforced by both sides, in bytes; stream chunks stay well below."""
STREAM_CHUNK_BYTES = 192 * 1024
"""Maximum size of a piece of a log or journal in one message, before base64, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteError:
    kind: str
    """Kind: `user` (the world's fault), `unknown_request`, `bad_request`, `bug`, `disconnected`."""
    message: str
    """Sentence that says what failed, and where."""
    hint: str = ""
    """Advice on what to do next."""
    traceback: str = ""
    topic: str = ""
    """Section of the master's troubleshooting page; empty: no section, or an older agent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    id: int
    kind: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    id: int
    result: dict[str, Any] | None = None
    error: RemoteError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    request_id: int | None = None
    """Id of the request that the event belongs to; None: no request."""


Message = Request | Response | Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Data of an event of kind `progress`: the state of a slow request."""

    message: str
    """Sentence for the user."""
    phase: str = ""
    """Part of the work, such as `merge` or `proof`; empty: none named, or an older agent."""


_TYPES: dict[str, type[Request] | type[Response] | type[Event]] = {
    "request": Request,
    "response": Response,
    "event": Event,
}


def encode(message: Message) -> bytes:
    """Return one line, newline included.

    Raises:
        WireError: the line would be longer than MAX_LINE_BYTES, or has a number that JSON has not.
    """
    body = to_wire(message)
    body["type"] = type(message).__name__.lower()
    text = _write(body)
    # Names of files may hold bytes that are no text; the rest of the message still counts.
    if "\\ud" in text:
        text = _write(replace_surrogates(body))
    line = text.encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise WireError(f"a message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    return line


def _write(body: Any) -> str:
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise WireError(f"a message cannot be written: {error}") from error


def decode(line: bytes) -> Message:
    """Read one line back.

    Raises:
        WireError: it is too long, not JSON, or not one of the three envelopes.
    """
    if len(line) > MAX_LINE_BYTES:
        raise WireError(f"a line of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    body = parse_json(line)
    kind = body.get("type") if isinstance(body, dict) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        raise WireError(f"not a message: {shorten(line)}")
    return from_wire(_TYPES[kind], body)


# ---------------------------------------------------------------- who a node is


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The agent's first event, `hello`, after the line with the nonce."""

    version: int
    archive_sha256: str
    python: str
    """Version of the python3 that runs the agent, such as `3.11.7`."""
    hostname: str
    pid: int
    boot_id: str
    agent_home: str
