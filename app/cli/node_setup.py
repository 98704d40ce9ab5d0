"""Set a node up from the terminal, and ask where a lock has to be made for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.cli.output import Output, can_ask, confirm
from app.errors import UnshippedLock

if TYPE_CHECKING:
    from agents.contract.node import EnvironmentReport
    from app.core.action import CoreApi


async def set_up(
    core: CoreApi, name: str, python: str | None, accept_index: bool, out: Output
) -> EnvironmentReport:
    """Set a node up; ask before hashes are taken that Rackless does not ship.

    Raises:
        UnshippedLock: nobody has agreed to that.
    """
    from app.core.nodes import SetUpNode

    try:
        return await core.do(
            SetUpNode(name=name, python=python, accept_index=accept_index), out.report
        )
    except UnshippedLock as error:
        # Never asked with --json: a program reads the output, and passes --accept-index.
        if out.as_json or not can_ask():
            raise
        out.note(f"{error.message}.")
        if not confirm(error.question):
            raise
        return await core.do(SetUpNode(name=name, python=python, accept_index=True), out.report)
