"""Handle requests about repairs: what one would do, and what earlier ones changed.

Applying and undoing is a command of its own (`agents/node/repair_command.py`).
"""

from __future__ import annotations

from agents.contract.repair import ChangeList, RepairPreview, RepairQuery
from agents.contract.wire import from_wire
from agents.node.administrator import Administrator
from agents.node.change_log import ChangeLog
from agents.node.repair import preview as preview_steps
from agents.serve.channel import Call


def preview(call: Call) -> RepairPreview:
    """Return what steps would do now."""
    query = from_wire(RepairQuery, call.args, "args")
    return preview_steps(query.steps, Administrator(call.children))


def list_changes(call: Call) -> ChangeList:
    """Return the newest changes of this node that fit into an answer."""
    admin = Administrator(call.children)
    return ChangeList(changes=tuple(ChangeLog(call.home).newest()), admin=admin.way)
