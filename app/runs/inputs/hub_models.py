"""Bring a hub model to all nodes of a run, with at most one download."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TypeAlias

from agents.contract.hub import HubSnapshot, find_snapshot, read_snapshot
from agents.contract.requests.hub import (
    FetchSnapshot,
    FindSnapshot,
    OfferSnapshot,
    ShowSnapshot,
    SnapshotPlace,
)
from agents.contract.wire import to_wire
from app.errors import NodeUnreachable, RacklessError, UserError
from app.library.bundles import Source, make_bundle, safe_name
from app.library.configs import is_hub_id
from app.presentation.result_text import say_transfers
from app.progress import OnMessage, messages
from app.runs.nodes.local_program import run_program
from app.runs.services import Services
from app.text import show_list

# Complete cached snapshot of the model by node, or None.
_Found: TypeAlias = dict[str, HubSnapshot | None]


async def spread_hub_model(
    services: Services, nodes: Sequence[str], model: Source, report: OnMessage
) -> None:
    """Provide the caches of all nodes with a hub model, with at most one download.

    A node or this PC with a cached snapshot copies it to the others. Without one, the first node
    that can downloads it, else this PC.

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
    found: _Found = {}
    try:
        answers = await asyncio.gather(
            *(services.pool.agent(node).ask(FindSnapshot(model=model.value)) for node in nodes)
        )
        found.update({n: one.snapshot for n, one in zip(nodes, answers, strict=True)})
    # Not fatal: each node then downloads the model itself.
    except RacklessError as error:
        report(f"{model.value} is not copied between nodes, so each fetches it: {error}")
        return
    own = None
    if not any(found.values()):
        own = await asyncio.to_thread(read_snapshot, model.value, os.environ)
        own = own or await _download(services, found, model.value, report)
        if own is None and len(found) > 1 and not any(found.values()):
            report(f"{model.value} cannot be copied between nodes, so each fetches it")
    try:
        await _spread(services, found, own, model.value, report)
    except RacklessError as error:
        report(f"{model.value} is not copied between nodes, so each fetches it: {error}")


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
    for node in tuple(found):
        report(f"{node} downloads {model} from the hub, for all nodes of the run")
        try:
            agent, told = services.pool.agent(node), messages(_naming(node, report))
            found[node] = (await agent.ask(FetchSnapshot(model=model), told)).snapshot
            return None
        except RacklessError as error:
            refusals.append(error)
            if isinstance(error, NodeUnreachable):
                del found[node]  # if it returns in time, it downloads the model itself
            report(str(error))
    report(f"this PC downloads {model} from the hub, for all nodes of the run")
    try:
        await _download_here(services, model, report)
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


async def _download_here(services: Services, model: str, report: OnMessage) -> None:
    """Download a model into the hub's cache on this PC.

    Raises:
        UserError: it cannot be downloaded.
    """
    job = to_wire(FetchSnapshot(model=model))
    ended = await run_program(
        "agents.trainer.data.hub_fetch",
        job,
        services.paths.home,
        _naming("this PC", report),
    )
    if ended.code == 0:
        return
    if ended.failed is None:
        last = ended.last_error or "it said nothing"
        raise UserError(f"this PC: the download ended with code {ended.code}: {last}")
    message = str(ended.failed.get("message", "")).replace("this node", "this PC")
    raise UserError(f"this PC: {message}", str(ended.failed.get("hint", "")))


async def _spread(
    services: Services, found: _Found, own: HubSnapshot | None, model: str, report: OnMessage
) -> None:
    lacking = [node for node, snapshot in found.items() if snapshot is None]
    giver = next((node for node, snapshot in found.items() if snapshot is not None), None)
    snapshot = own if giver is None else found[giver]
    if not lacking or snapshot is None:
        return
    if giver is not None:
        report(f"{giver} has {model}: copying it to {show_list(lacking)}")
        place = _place(model, snapshot)
        await services.pool.agent(giver).ask(OfferSnapshot(place=place))
        progress = say_transfers(report, f"copying {model}")
        for note in await services.pool.copy(giver, lacking, place.folder, progress):
            report(note)
    else:
        report(f"this PC has {model}: copying it to {show_list(lacking)}")
        place = await _send_own(services, lacking, model, snapshot, report)
    await asyncio.gather(
        *(services.pool.agent(node).ask(ShowSnapshot(place=place)) for node in lacking)
    )


def _place(model: str, snapshot: HubSnapshot) -> SnapshotPlace:
    folder = f"models/{safe_name(model)}-{snapshot.revision[:16]}"
    return SnapshotPlace(model=model, snapshot=snapshot, folder=folder)


async def _send_own(
    services: Services,
    lacking: Sequence[str],
    model: str,
    snapshot: HubSnapshot,
    report: OnMessage,
) -> SnapshotPlace:
    """Send the snapshot in this PC's cache; return its folder on the nodes."""
    root = find_snapshot(model, os.environ)
    assert root is not None
    paths = [root / file.path for file in snapshot.files]
    # As for artifacts, every byte is kept, since the hub's tools compare hashes.
    bundle = await asyncio.to_thread(make_bundle, "artifacts", model, root, paths, services.hashes)
    wanted = {node: [bundle] for node in lacking}
    for note in await services.pool.share(wanted, say_transfers(report, f"copying {model}")):
        report(note)
    await asyncio.gather(*(services.pool.push(node, bundle) for node in lacking))
    return SnapshotPlace(model=model, snapshot=snapshot, folder=bundle.destination or "")
