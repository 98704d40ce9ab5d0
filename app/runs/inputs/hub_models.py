"""Bring a hub model to all nodes of a run, with at most one download."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from agents.contract.hub import HubSnapshot, find_snapshot, read_snapshot
from agents.contract.requests import hub
from app.errors import NodeUnreachable, RacklessError, UserError
from app.library.bundles import Source, make_bundle, safe_name
from app.library.configs import is_hub_id
from app.presentation.result_text import say_transfers
from app.progress import OnMessage, messages
from app.runs.inputs.hub_download import download_here
from app.runs.services import Services
from app.text import show_list

# Complete snapshot of the model by node, or None.
_Found: TypeAlias = dict[str, HubSnapshot | None]


async def spread_hub_model(
    services: Services, nodes: Sequence[str], model: Source, report: OnMessage
) -> None:
    """Provide all nodes with a hub model, with at most one download.

    A node or this PC with a cached snapshot copies it to the others. Without one, the first node
    that can downloads it, else this PC. The hub says which files are genuine, else this PC's cache;
    files that only a node vouches for get a folder with the name of that node.

    Args:
        services: stores and nodes.
        nodes: nodes that need the model.
        model: source of the model; nothing happens unless it is a hub id.
        report: callback with a sentence on each stage.

    Raises:
        UserError: no PC has the model or can download it; the message has each PC's reason.
    """
    if model.destination is not None or not is_hub_id(model.value):
        return
    try:
        answers = await asyncio.gather(
            *(services.pool.agent(node).ask(hub.FindSnapshot(model=model.value)) for node in nodes)
        )
    # Not fatal: each node then downloads the model itself.
    except RacklessError as error:
        report(f"{model.value} is not copied between nodes, so each fetches it: {error}")
        return
    found: _Found = {node: one.snapshot for node, one in zip(nodes, answers, strict=True)}
    copies = [node for node, one in zip(nodes, answers, strict=True) if one.folder]
    if all(found.values()) and not copies:
        return
    own = await asyncio.to_thread(read_snapshot, model.value, os.environ)
    known = await asyncio.to_thread(services.configs.list_files, model.value) or own
    for node in copies:
        if _is_false(found[node], known):
            found[node] = None  # replaced below
    if own is None and not _list_givers(found, known):
        own = await _download(services, found, model.value, report)
        if own is None and len(found) > 1 and not any(found.values()):
            report(f"{model.value} cannot be copied between nodes, so each fetches it")
    try:
        await _spread(services, found, own, known, model.value, report)
    except RacklessError as error:
        report(f"{model.value} is not copied between nodes, so each fetches it: {error}")


async def find_path(services: Services, node: str, model: str) -> str:
    """Return the path of the agent's own copy of a hub model on a node, else the hub id."""
    if not is_hub_id(model):
        return model
    found = await services.pool.agent(node).ask(hub.FindSnapshot(model=model))
    return found.folder or model


def _is_false(snapshot: HubSnapshot | None, known: HubSnapshot | None) -> bool:
    """Return whether a node's snapshot has other files than its revision on the hub."""
    if snapshot is None or known is None or snapshot.revision != known.revision:
        return False
    return not known.vouches_for(snapshot)


def _list_givers(found: _Found, known: HubSnapshot | None) -> list[str]:
    """Return the nodes with a snapshot that may be copied, confirmed ones first."""
    having = {node: one for node, one in found.items() if one and not _is_false(one, known)}
    return sorted(having, key=lambda node: known is None or not known.vouches_for(having[node]))


async def _download(
    services: Services, found: _Found, model: str, report: OnMessage
) -> HubSnapshot | None:
    """Download a model on one node, which is added to `found`, or on this PC.

    Returns:
        This PC's snapshot; None if a node has the model, or needs no snapshot.

    Raises:
        UserError: no PC can download it.
    """
    refusals: list[RacklessError] = []  # each names its PC
    for node in [node for node, snapshot in found.items() if snapshot is None]:
        report(f"{node} downloads {model} from the hub, for all nodes of the run")
        try:
            agent, told = services.pool.agent(node), messages(_naming(node, report))
            found[node] = (await agent.ask(hub.FetchSnapshot(model=model), told)).snapshot
            return None
        except RacklessError as error:
            refusals.append(error)
            if isinstance(error, NodeUnreachable):
                del found[node]  # if it returns in time, it downloads the model itself
            report(str(error))
    report(f"this PC downloads {model} from the hub, for all nodes of the run")
    try:
        wanted = hub.FetchSnapshot(model=model)
        await download_here(wanted, services.paths.home, _naming("this PC", report))
        return await asyncio.to_thread(read_snapshot, model, os.environ)
    except UserError as error:
        refusals.append(error)
    said = "; ".join(str(error).rstrip(".") for error in refusals)
    hints = [error.hint for error in refusals if isinstance(error, UserError) and error.hint]
    raise UserError(
        f"{model} is on none of these PCs, and none of them can download it. {said}",
        f"{hints[0].rstrip('.')}, or give the folder of the model in the run file"
        if hints
        else "Give the folder of the model in the run file",
        topic="model-download",
    )


def _naming(who: str, report: OnMessage) -> OnMessage:
    return lambda text: report(f"{who}: {text}")


async def _spread(
    services: Services,
    found: _Found,
    own: HubSnapshot | None,
    known: HubSnapshot | None,
    model: str,
    report: OnMessage,
) -> None:
    for node, snapshot in found.items():
        if _is_false(snapshot, known):
            report(f"{node} has other files of {model} than the hub, so they are not copied")
    lacking = [node for node, snapshot in found.items() if snapshot is None]
    giver = next(iter(_list_givers(found, known)), None)
    snapshot = None if giver is None else found[giver]
    is_confirmed = snapshot is not None and known is not None and known.vouches_for(snapshot)
    if not is_confirmed and own is not None:
        giver, snapshot = None, own
    if not lacking or snapshot is None:
        return
    if giver is not None:
        report(f"{giver} has {model}: copying it to {show_list(lacking)}")
        if not is_confirmed:
            report(f"only {giver} vouches for these files, neither the hub nor this PC")
        place = _place(model, snapshot, "" if is_confirmed else giver)
        await services.pool.agent(giver).ask(hub.OfferSnapshot(place=place))
        progress = say_transfers(report, f"copying {model}")
        sizes = {file.path: file.size_bytes for file in snapshot.files}
        notes = await services.pool.copy(giver, lacking, place.folder, progress, sizes)
        for note in notes:
            report(note)
    else:
        report(f"this PC has {model}: copying it to {show_list(lacking)}")
        place = _place(model, snapshot)
        await _send_own(services, lacking, place, report)
    await asyncio.gather(
        *(services.pool.agent(node).ask(hub.KeepSnapshot(place=place)) for node in lacking)
    )


def _place(model: str, snapshot: HubSnapshot, giver: str = "") -> hub.SnapshotPlace:
    """Return the folder of a copy, named by the node that alone vouches for it, if any."""
    folder = f"models/{safe_name(model)}-{snapshot.revision[:16]}"
    folder += f"-from-{safe_name(giver)}" if giver else ""
    return hub.SnapshotPlace(model=model, snapshot=snapshot, folder=folder)


async def _send_own(
    services: Services, lacking: Sequence[str], place: hub.SnapshotPlace, report: OnMessage
) -> None:
    """Send the snapshot in this PC's cache."""
    root = find_snapshot(place.model, os.environ)
    assert root is not None
    paths = [root / file.path for file in place.snapshot.files]
    # As for artifacts, every byte is kept, since the node compares the hub's hashes.
    bundle = await asyncio.to_thread(
        make_bundle, "artifacts", place.model, root, paths, services.hashes
    )
    bundle = replace(bundle, destination=place.folder)
    wanted = {node: [bundle] for node in lacking}
    for note in await services.pool.share(wanted, say_transfers(report, f"copying {place.model}")):
        report(note)
    await asyncio.gather(*(services.pool.push(node, bundle) for node in lacking))
