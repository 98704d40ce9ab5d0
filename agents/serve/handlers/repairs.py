"""Handlers of requests about repairs: previews, and the changes of earlier ones.

Applying and undoing are a separate command (`agents/node/repair_command.py`).
"""

from __future__ import annotations

from agents.contract.repair import ChangeList, RepairPreview
from agents.contract.requests.repairs import ListChanges, PreviewRepair
from agents.node.administrator import Administrator
from agents.node.change_log import ChangeLog
from agents.node.repair import preview as preview_steps
from agents.serve.channel import Call
from agents.serve.handlers import handles


@handles(PreviewRepair)
def preview(call: Call, request: PreviewRepair) -> RepairPreview:
    """Return the changes that steps would make now."""
    return preview_steps(request.steps, Administrator(call.children))


@handles(ListChanges)
def list_changes(call: Call, request: ListChanges) -> ChangeList:
    """Return the newest changes of this node that fit into a response."""
    admin = Administrator(call.children)
    return ChangeList(changes=tuple(ChangeLog(call.home).newest()), admin=admin.way)
