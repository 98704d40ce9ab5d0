"""Handle requests about hardware, the hub token and model configs of a node."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.contract.examination import Examination, RouteQuery, Routes
from agents.contract.hub import HubModel, SnapshotPlace, find_snapshot, read_snapshot
from agents.contract.node import GpuUse, ModelRefusal, NodeFacts, TokenWish
from agents.contract.spec import RunSpec
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.node import hub_snapshots, hub_token
from agents.node.environment import read_adopted
from agents.node.facts import read_facts as read_node_facts
from agents.serve.channel import Call
from agents.shared.models.config import find_config
from agents.supervisor.leases import find_holder

if TYPE_CHECKING:
    from agents.shared.models.folder import ModelFolder


@dataclass(frozen=True)
class ModelArgs:
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectArgs:
    model: str
    """Folder on this node, or hub id."""
    spec: RunSpec


def read_facts(call: Call) -> NodeFacts:
    """Return the node's facts, its training environment, and the work on each device."""
    facts = read_node_facts(call.home)
    # A node without a GPU trains on its CPU, which is leased in the same way.
    devices = [gpu.uuid for gpu in facts.gpus] or ["cpu"]
    holders = {device: find_holder(call.home, device) for device in devices}
    return replace(
        facts,
        environment=read_adopted(call.home),
        gpu_uses=tuple(
            GpuUse(uuid=uuid, name=found.name, run_id=found.run_id)
            for uuid, found in holders.items()
            if found is not None
        ),
    )


def examine(call: Call) -> Examination:
    """Return what the check asks of this node beyond its facts."""
    from agents.node.examination.examine import examine as examine_node

    return examine_node(call.home.path)


def find_routes(call: Call) -> Routes:
    """Return the way by which packets leave this node to each address."""
    from agents.node.examination.network import find_routes as find_ways

    return find_ways(from_wire(RouteQuery, call.args, "args").addresses)


def wake_other(call: Call) -> dict[str, Any]:
    """Send the packet that wakes another PC of this node's network."""
    from agents.contract.wake import WakeTarget, send_magic_packet

    return {"value": send_magic_packet(from_wire(WakeTarget, call.args, "args"))}


def update_token(call: Call) -> dict[str, Any]:
    """Find, keep or forget the hub's token on this node."""
    wish = from_wire(TokenWish, call.args, "args")
    if wish.deed == "keep":
        place = hub_token.keep_token(os.environ, wish.token)
    elif wish.deed == "forget":
        place = hub_token.forget_token(os.environ, wish.digest)
    else:
        place = hub_token.find_token(os.environ, wish.digest)
    return {"place": place}


def find_hub_snapshot(call: Call) -> dict[str, Any]:
    """Return what the hub's cache on this node has of a model; None: not the whole of it."""
    model = from_wire(HubModel, call.args, "args").model
    return {"snapshot": read_snapshot(model, os.environ)}


def offer_hub_snapshot(call: Call) -> dict[str, Any]:
    """Make a folder of a snapshot in the cache, for other nodes."""
    place = from_wire(SnapshotPlace, call.args, "args")
    hub_snapshots.offer_snapshot(call.home, place.model, place.snapshot, place.folder)
    return {}


def show_hub_snapshot(call: Call) -> dict[str, Any]:
    """Show a folder as a snapshot in the cache."""
    place = from_wire(SnapshotPlace, call.args, "args")
    hub_snapshots.show_snapshot(call.home, place.model, place.snapshot, place.folder)
    return {}


def read_model_config(call: Call) -> dict[str, Any]:
    """Return a model's config, from its folder or from the hub's cache on this node."""
    model = from_wire(ModelArgs, call.args, "args").model
    try:
        return {"config": _without_infinity(find_config(model, os.environ))}
    except ValueError as error:
        raise ExpectedError(
            f"The model {model} cannot be used: {error}.", "Fetch it again"
        ) from error


def _without_infinity(value: Any) -> Any:
    """Return a config for a message, which has no Infinity; Mamba's configs do."""
    if isinstance(value, dict):
        return {key: _without_infinity(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_infinity(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def inspect_model(call: Call) -> dict[str, Any]:
    """Return why this node's copy of a model cannot be trained by a run; nothing if it has none."""
    # Imported on use, here and below: most connections do not need it and answer sooner.
    from agents.shared.models.fit import find_refusals

    args = from_wire(InspectArgs, call.args, "args")
    found = _look_at(args.model)
    refusals: tuple[ModelRefusal, ...] = ()
    if found is not None:
        refusals = find_refusals(args.model, found, args.spec)
    return {"refusals": to_wire(refusals)}


def _look_at(model: str) -> ModelFolder | None:
    from agents.shared.models.folder import inspect_model as inspect_folder

    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return inspect_folder(folder)
    if folder.is_absolute() or model.count("/") > 1 or ".." in model:
        return None
    fetched = find_snapshot(model, os.environ)
    # What is missing there is fetched by the run: only what is there already can be wrong.
    if fetched is None or not fetched.is_dir():
        return None
    found = inspect_folder(fetched, parts="config")
    return found if found.config else None
