"""The agent's `repair` command: apply or undo repairs, in its own SSH channel.

Stdin has the work as a line of JSON, and a line with the password for sudo, which may be empty.
Stdout has lines of JSON: `said` during the work, then `changes` or `failed`. The password is not
sent over the agent's connection, because errors quote its messages.

A child in its own session does the work, so that a lost connection does not interrupt the
installation of a package. The record is on disk even if no master is connected at the end.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, BinaryIO

from agents.children import Children
from agents.contract.json_text import parse_json
from agents.contract.messages import MAX_LINE_BYTES
from agents.contract.repair import Change, RepairFailure, RepairWork
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.administrator import Administrator, NoAdmin
from agents.node.repair import apply, undo
from agents.shared.files.secrets import format_trace
from agents.state import Home, open_home

_MAX_PASSWORD_BYTES = 1024
_MAX_SAID_CHARACTERS = 500


def repair(source: BinaryIO) -> int:
    """Do the work described on `source`; return the exit code."""
    try:
        home = open_home()
        work = from_wire(RepairWork, parse_json(source.readline(MAX_LINE_BYTES)))
    except ExpectedError as error:
        return _fail(RepairFailure(message=error.message, hint=error.hint))
    except WireError as error:
        return _fail(RepairFailure(message=f"The work cannot be read: {error}."))
    password = source.readline(_MAX_PASSWORD_BYTES).rstrip(b"\r\n")
    # The parent waits for the exit code; if it is killed with the connection, the child continues.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.setsid()
    code = 1
    try:
        code = _work(home, work, password)
    finally:
        os._exit(code)  # without the exit handlers of the parent


def _work(home: Home, work: RepairWork, password: bytes) -> int:
    try:
        changes = _change(home, work, Administrator(Children(), password))
    except NoAdmin as error:
        return _fail(
            RepairFailure(
                message=error.message, hint=error.hint, reason="password" if error.again else "sudo"
            )
        )
    except ExpectedError as error:
        return _fail(RepairFailure(message=error.message, hint=error.hint))
    except Exception as error:  # noqa: BLE001 - the edge: the process ends here
        _send({"bug": format_trace(error)})
        return 1
    _send({"changes": to_wire(changes)})
    return 0


def _change(home: Home, work: RepairWork, admin: Administrator) -> list[Change]:
    if work.apply is not None:
        return [apply(home, work.apply, admin, _say)]
    return undo(home, work.undo, admin, _say) if work.undo is not None else []


def _fail(failure: RepairFailure) -> int:
    _send({"failed": to_wire(failure)})
    return 1


def _say(text: str) -> None:
    _send({"said": text[:_MAX_SAID_CHARACTERS]})


def _send(value: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except OSError:
        pass  # the connection is gone; the record is on disk
