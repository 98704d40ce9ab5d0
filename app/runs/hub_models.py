"""Bring a model of the hub from the cache of one PC to the nodes that would each download it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from agents.contract.hub import HubSnapshot, SnapshotPlace, find_snapshot, read_snapshot
from app.errors import RacklessError
from app.library.bundles import Source, make_bundle, safe_name
from app.library.configs import is_hub_id
from app.presentation.result_text import say_transfers
from app.runs.node_pool import OnMessage
from app.runs.services import Services
from app.text import show_list


async def spread_hub_model(
    services: Services, nodes: Sequence[str], model: Source, report: OnMessage
) -> None:
    """Show a model of the hub, which a node or this PC has fetched, in the caches of all nodes.

    It only saves downloads: whoever lacks the model afterwards fetches it itself.

    Args:
        services: stores and nodes.
        nodes: nodes that need the model.
        model: source of the model; nothing happens unless it is a hub id.
        report: called with a sentence on each stage.
    """
    if model.destination is not None or not is_hub_id(model.value):
        return
    try:
        await _spread(services, nodes, model.value, report)
    except RacklessError as error:
        report(f"{model.value} is not copied between nodes, so each fetches it: {error}")


async def _spread(services: Services, nodes: Sequence[str], model: str, report: OnMessage) -> None:
    found = dict(
        zip(
            nodes,
            await asyncio.gather(
                *(services.pool.agent(node).hub_snapshot(model) for node in nodes)
            ),
            strict=True,
        )
    )
    lacking = [node for node, snapshot in found.items() if snapshot is None]
    giver = next((node for node, snapshot in found.items() if snapshot is not None), None)
    own = await asyncio.to_thread(read_snapshot, model, os.environ) if giver is None else None
    snapshot = own if giver is None else found[giver]
    if not lacking or snapshot is None:
        return
    if giver is not None:
        report(f"{giver} has {model}: copying it to {show_list(lacking)}")
        place = _place(model, snapshot)
        await services.pool.agent(giver).hub_offer(place)
        progress = say_transfers(report, f"copying {model}")
        for note in await services.pool.copy(giver, lacking, place.folder, progress):
            report(note)
    else:
        report(f"this PC has {model}: copying it to {show_list(lacking)}")
        place = await _send_own(services, lacking, model, snapshot, report)
    await asyncio.gather(*(services.pool.agent(node).hub_show(place) for node in lacking))


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
    # As artifacts are: every byte, since the hub's tools compare hashes.
    bundle = await asyncio.to_thread(make_bundle, "artifacts", model, root, paths, services.hashes)
    wanted = {node: [bundle] for node in lacking}
    for note in await services.pool.share(wanted, say_transfers(report, f"copying {model}")):
        report(note)
    await asyncio.gather(*(services.pool.push(node, bundle) for node in lacking))
    return SnapshotPlace(model=model, snapshot=snapshot, folder=bundle.destination or "")
