"""Send the first two lines of a served agent: the nonce, then `hello`.

They are sent before the message classes are imported, which takes a third of the start: the master
can read `hello` and send its first request meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from agents.contract.version import PROTOCOL_VERSION
from agents.errors import ExpectedError
from agents.state import Home, archive_path, boot_id, open_home


def greet(nonce: str) -> tuple[Home, int] | None:
    """Send nonce and hello to the real stdout; return the home and a duplicate of that stdout.

    From then on `sys.stdout` and descriptor 1 point to stderr. Return None if `fatal` was sent.
    """
    # Before any other import can print, since only messages may reach the master.
    out = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # Shells may print greetings first; the nonce marks the beginning of the agent's output.
    os.write(out, f"RACKLESS {nonce}\n".encode("ascii", "replace"))
    try:
        home = open_home()
    except ExpectedError as error:
        fault = {"kind": "user", "message": error.message, "hint": error.hint, "traceback": ""}
        _write_event(out, "fatal", fault)
        return None
    _write_event(out, "hello", describe_agent(home))
    return home, out


def describe_agent(home: Home) -> dict[str, Any]:
    """Return the wire form of a Hello."""
    return {
        "version": PROTOCOL_VERSION,
        "archive_sha256": read_archive_sha256(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "hostname": os.uname().nodename,
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "agent_home": str(home.path),
    }


def read_archive_sha256() -> str:
    """Return the archive's hash, which is its file name; empty: it runs from source."""
    name = os.path.basename(archive_path())[: -len(".zip")]
    is_hash = len(name) == 64 and all(letter in "0123456789abcdef" for letter in name)
    return name if is_hash else ""


def _write_event(out: int, kind: str, data: dict[str, Any]) -> None:
    # By hand, because importing the classes of messages would delay `hello`.
    event = {"type": "event", "kind": kind, "data": data, "request_id": None}
    os.write(out, json.dumps(event).encode("ascii") + b"\n")
