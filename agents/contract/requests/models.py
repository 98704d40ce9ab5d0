"""Requests about models that lie on a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agents.contract.node import ModelRefusal
from agents.contract.requests import NodeRequest
from agents.contract.spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundConfig:
    config: dict[str, Any] | None
    """None: the model is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadConfig(NodeRequest[FoundConfig]):
    """Read the config.json of a model, from its folder or from the hub's cache."""

    kind = "model.config"
    is_verbatim = True
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRefusals:
    refusals: tuple[ModelRefusal, ...]
    """Empty: the model can be trained, or is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectModel(NodeRequest[ModelRefusals]):
    """Find out why the node's copy of a model cannot be trained by a run."""

    kind = "model.inspect"
    model: str
    """Folder on the node, or hub id."""
    spec: RunSpec
