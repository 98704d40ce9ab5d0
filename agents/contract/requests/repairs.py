"""Requests about repairs: previews, and the changes of earlier ones.

Applying and undoing are a separate command (`agents/node/repair_command.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.repair import ChangeList, RepairPreview, RepairStep
from agents.contract.requests import LOOK_S, NodeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewRepair(NodeRequest[RepairPreview]):
    """Preview the changes that steps would make on the node now, with the texts of files."""

    kind = "repair.preview"
    limit_s = LOOK_S
    is_verbatim = True
    steps: tuple[RepairStep, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListChanges(NodeRequest[ChangeList]):
    """List the changes that repairs have made on the node, with the texts of files."""

    kind = "change.list"
    limit_s = LOOK_S
    is_verbatim = True
