"""Requests about models on a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agents.contract.node import ModelRefusal
from agents.contract.requests import NodeRequest
from agents.contract.spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundConfig:
    config: dict[str, Any] | None
    """Contents of config.json; None: the model is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadConfig(NodeRequest[FoundConfig]):
    """Read the config.json of a model, from its folder or from the hub's cache."""

    kind = "model.config"
    is_verbatim = True
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRefusals:
    refusals: tuple[ModelRefusal, ...]
    """Reasons; empty: the model can be trained, or is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectModel(NodeRequest[ModelRefusals]):
    """Find out why a run cannot train the node's copy of a model."""

    kind = "model.inspect"
    model: str
    """Folder on the node, or hub id."""
    spec: RunSpec
