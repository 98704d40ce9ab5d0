"""Handlers of requests about models on this node: their config, and reasons against training."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.contract.hub import find_snapshot
from agents.contract.node import ModelRefusal
from agents.contract.requests.models import FoundConfig, InspectModel, ModelRefusals, ReadConfig
from agents.errors import ExpectedError
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.shared.models.config import find_config

if TYPE_CHECKING:
    from agents.shared.models.folder import ModelFolder


@handles(ReadConfig)
def read_config(call: Call, request: ReadConfig) -> FoundConfig:
    """Return a model's config, from its folder or from the hub's cache on this node."""
    # Imported on use, here and below, since most connections start faster without it.
    from agents.node.hub_snapshots import find_copy

    try:
        config = find_config(request.model, os.environ)
        copied = find_copy(call.home, request.model) if config is None else None
        if copied is not None:
            config = find_config(copied.folder, os.environ)
        return FoundConfig(config=_without_infinity(config))
    except ValueError as error:
        raise ExpectedError(
            f"The model {request.model} cannot be used: {error}.", "Fetch it again"
        ) from error


def _without_infinity(value: Any) -> Any:
    """Return a config without infinities, which JSON lacks and configs of Mamba contain."""
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@handles(InspectModel)
def inspect_model(call: Call, request: InspectModel) -> ModelRefusals:
    """Return why a run cannot train this node's copy of a model; nothing if it has no copy."""
    from agents.node.hub_snapshots import find_copy
    from agents.shared.models.fit import find_refusals

    found = _inspect(request.model)
    copied = find_copy(call.home, request.model) if found is None else None
    if copied is not None:
        found = _inspect(copied.folder)
    refusals: tuple[ModelRefusal, ...] = ()
    if found is not None:
        refusals = find_refusals(request.model, found, request.spec)
    return ModelRefusals(refusals=refusals)


def _inspect(model: str) -> ModelFolder | None:
    from agents.shared.models.folder import inspect_model as inspect_folder

    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return inspect_folder(folder)
    # Not a hub id; and it must not lead out of the cache.
    if folder.is_absolute() or model.count("/") > 1 or ".." in model:
        return None
    fetched = find_snapshot(model, os.environ)
    # The run downloads missing files, so only present ones are judged.
    if fetched is None or not fetched.is_dir():
        return None
    found = inspect_folder(fetched, parts="config")
    return found if found.config else None
