"""Apply repairs to a node and undo them, through a command of the agent on a separate channel.

A password for sudo is written to that channel and nowhere else: it is in no message, argument,
environment, file or log, here or on the node. A repair that has begun continues if the connection
is lost, and is in the node's log of changes afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from agents.contract.json_text import read_said
from agents.contract.messages import WireError, from_wire, to_wire
from agents.contract.repair import (
    Change,
    RepairFailure,
    RepairOrder,
    RepairPreview,
    RepairWork,
    UndoOrder,
)
from agents.contract.wire import shorten
from app.errors import AdminRefused, AgentBug, BadAnswer, UserError
from app.nodes.client import NodeClient
from app.nodes.transport.process import Process
from app.progress import OnMessage
from app.provisioning.repairs import Repair, ask_administrator
from app.text import one_line

MAX_PASSWORD_BYTES = 1000
"""Maximum length of a password, in bytes."""
# Maximum length of a line from the node, in bytes; commands may print much.
_MAX_LINE_BYTES = 8 << 20
# Time for the start of the agent and for sudo, in addition to that of the steps, in seconds.
_MARGIN_S = 300.0
_UNDO_S = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class _Changes:
    changes: tuple[Change, ...]


async def apply_repair(
    client: NodeClient,
    repair: Repair,
    shown: RepairPreview,
    *,
    by: str,
    password: str = "",
    progress: OnMessage | None = None,
) -> Change:
    """Apply a repair as shown; return the record, which has the problem if a step failed.

    Args:
        client: client of the node.
        repair: repair whose steps the agent takes.
        shown: its preview; a file that has changed since then is not edited.
        by: name of the requester, for the log of changes.
        password: login user's password for sudo; empty if none is needed.
        progress: callback with each sentence and the output of the commands.

    Raises:
        AdminRefused: sudo did not take the password, or may not be used; nothing was changed.
        UserError: it cannot be applied there; nothing was changed.
    """
    order = RepairOrder(
        repair=repair.id,
        title=repair.title,
        by=by,
        steps=repair.steps,
        expected=tuple(step.sha256 for step in shown.steps),
        needs_restart=repair.needs_restart,
    )
    # Each step has its own limit, so the whole repair has their sum.
    limit_s = sum(step.timeout_s for step in repair.steps) + _MARGIN_S
    try:
        (change,) = await _work(client, RepairWork(apply=order), password, limit_s, progress)
    except AdminRefused as error:
        if not error.again:
            error.reword(error.message, ask_administrator(repair))
        raise
    return change


async def undo_changes(
    client: NodeClient,
    numbers: Sequence[int] = (),
    *,
    password: str = "",
    progress: OnMessage | None = None,
) -> tuple[Change, ...]:
    """Undo changes, the newest first, and return their records; without numbers, undo all.

    Raises:
        AdminRefused: sudo did not take the password, or may not be used; nothing was changed.
        UserError: there is no such change, or it cannot be undone; nothing was changed.
    """
    work = RepairWork(undo=UndoOrder(numbers=tuple(numbers)))
    return await _work(client, work, password, _UNDO_S, progress)


async def _work(
    client: NodeClient, work: RepairWork, password: str, limit_s: float, progress: OnMessage | None
) -> tuple[Change, ...]:
    # A newline would end the password early and pass the rest as another line.
    secret = password.encode("utf-8")
    if len(secret) > MAX_PASSWORD_BYTES or any(sign in password for sign in "\r\n\0"):
        raise UserError(
            f"a password for sudo has at most {MAX_PASSWORD_BYTES} bytes and is one line",
            "Type it again",
        )
    process = await client.open_command("repair")
    try:
        async with asyncio.timeout(limit_s):
            # A command that has ended says why on its output.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await process.write(json.dumps(to_wire(work)).encode("ascii") + b"\n")
                # On stdin: arguments and variables of a process can be read by other users.
                await process.write(secret + b"\n")
            process.write_eof()
            return await _listen(client.name, process, progress)
    except TimeoutError as error:
        raise UserError(
            f"{client.name} did not finish within {limit_s:.0f} s; it may still be working",
            f"Later, list its changes: rackless nodes changes {client.name}",
            where=client.name,
        ) from error
    finally:
        # Only the reporting command ends here; the repair is a separate process and continues.
        await process.close()


async def _listen(name: str, process: Process, progress: OnMessage | None) -> tuple[Change, ...]:
    # Lines of progress, then one line with the result.
    async for line in _lines(name, process):
        said = read_said(line)
        if progress is not None and isinstance(said.get("said"), str):
            progress(one_line(said["said"]))
        if "changes" in said:
            found: _Changes = _read(_Changes, said, name)
            return found.changes
        if "failed" in said:
            raise _refusal(name, _read(RepairFailure, said["failed"], name))
        if "bug" in said:
            raise AgentBug(f"{name}: a repair failed because of an error in Rackless", said["bug"])
    raise UserError(
        f"{name} ended the repair without a result: "
        f"{one_line(process.stderr_text())[-400:] or 'it gave no reason'}",
        f"List its changes: rackless nodes changes {name}",
        where=name,
    )


async def _lines(name: str, process: Process) -> AsyncIterator[bytes]:
    rest = b""
    while data := await process.read():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > _MAX_LINE_BYTES:
            raise BadAnswer(
                f"{name} sent a line of more than {_MAX_LINE_BYTES} bytes during a repair",
                "Check that PC",
                where=name,
            )


def _refusal(name: str, failure: RepairFailure) -> UserError:
    message, hint = f"{name}: {one_line(failure.message)}", one_line(failure.hint)
    if failure.reason:
        again = failure.reason == "password"
        hint = "Type it again" if again else hint
        return AdminRefused(message, hint, where=name, again=again)
    return UserError(message, hint, where=name)


def _read(cls: type[Any], value: Any, name: str) -> Any:
    try:
        return from_wire(cls, value)
    except WireError as error:
        raise BadAnswer(
            f"{name} reported a repair in a wrong form: {shorten(str(error))}",
            f"List its changes: rackless nodes changes {name}",
            where=name,
        ) from error
