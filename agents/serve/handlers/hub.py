"""Handlers of requests about the Hugging Face hub: cache, download, token."""

from __future__ import annotations

import os

from agents.contract.hub import read_snapshot
from agents.contract.requests.hub import (
    CacheListing,
    FetchData,
    FetchSnapshot,
    FindSnapshot,
    FoundSnapshot,
    FoundToken,
    KeepSnapshot,
    ListCached,
    OfferSnapshot,
    TokenWish,
)
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.node import hub_snapshots, hub_token
from agents.node.environment import read_adopted
from agents.node.files import job_folder
from agents.program import command
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.serve.programs import run_program
from agents.state import write_json


@handles(TokenWish)
def update_token(call: Call, request: TokenWish) -> FoundToken:
    """Find, keep or forget the hub's token on this node."""
    if request.deed == "keep":
        place = hub_token.keep_token(os.environ, request.token)
    elif request.deed == "forget":
        place = hub_token.forget_token(os.environ, request.digest)
    else:
        place = hub_token.find_token(os.environ, request.digest)
    return FoundToken(place=place)


@handles(FindSnapshot)
def find(call: Call, request: FindSnapshot) -> FoundSnapshot:
    """Return the complete snapshot of a model in the hub's cache or in an own copy, or None."""
    return hub_snapshots.find_snapshot(call.home, request.model)


@handles(FetchSnapshot)
def fetch(call: Call, request: FetchSnapshot) -> FoundSnapshot:
    """Download a model of the hub into this node's cache; return the cache's snapshot.

    Raises:
        ExpectedError: there is no training environment, or the model cannot be downloaded.
    """
    _download(call, request, request.model)
    return FoundSnapshot(snapshot=read_snapshot(request.model, os.environ))


@handles(FetchData)
def fetch_data(call: Call, request: FetchData) -> None:
    """Download the files of a data set into this node's cache.

    Raises:
        ExpectedError: there is no training environment, or the data cannot be downloaded.
    """
    _download(call, request, request.data)


def _download(call: Call, request: FetchSnapshot | FetchData, name: str) -> None:
    adopted = read_adopted(call.home)
    if adopted is None or adopted.python is None:
        raise ExpectedError("There is no training environment on this node to download with.")
    # huggingface_hub is a package of the training environment, so a program of it downloads.
    with job_folder(call.home) as folder:
        job_file = folder / "job.json"
        write_json(job_file, to_wire(request))
        argv = command(adopted.python, "agents.trainer.data.hub_fetch", str(job_file))
        run_program(call, argv, f"The download of {name}")


@handles(ListCached)
def list_cached(call: Call, request: ListCached) -> CacheListing:
    """Return the models and data sets in the hub's cache, and the agent's own copies of models."""
    return hub_snapshots.list_cached(call.home)


@handles(OfferSnapshot)
def offer(call: Call, request: OfferSnapshot) -> None:
    """Export a snapshot as a folder that other nodes can copy."""
    hub_snapshots.offer_snapshot(call.home, request.place)


@handles(KeepSnapshot)
def keep(call: Call, request: KeepSnapshot) -> FoundSnapshot:
    """Verify a copied folder and use it for its model."""
    return hub_snapshots.keep_copy(call.home, request.place)
