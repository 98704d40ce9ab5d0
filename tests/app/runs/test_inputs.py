"""A run's model and data reach its nodes, or it is said why not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import RunSpec
from app.errors import NodeUnreachable, UserError
from app.library.data import find_data
from app.runs.inputs import send
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster


def test_data_that_was_edited_and_is_on_no_node_is_named(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(spec.data.train)
    source = find_data(str(path), "data.train", services.hashes)

    async def refuse(*args: Any) -> str:
        raise UserError("alpha: chats.jsonl arrived damaged", "Send it again")

    monkeypatch.setattr(cluster, "push", refuse)
    with pytest.raises(UserError, match="arrived damaged"):
        asyncio.run(send(services, "alpha", source))
    path.write_text('{"text": "hello again"}\n')
    with pytest.raises(UserError) as refused:
        asyncio.run(send(services, "alpha", source))
    assert refused.value.message == (
        f"{path} has changed since the run started, and alpha has no earlier copy"
    )
    path.unlink()
    with pytest.raises(UserError, match="arrived damaged"):
        asyncio.run(send(services, "alpha", source))


def test_a_node_that_goes_away_is_not_said_to_lack_what_was_edited(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(spec.data.train)
    source = find_data(str(path), "data.train", services.hashes)
    path.write_text('{"text": "hello again"}\n')

    async def lose(*args: Any) -> str:
        raise NodeUnreachable("alpha cannot be reached")

    monkeypatch.setattr(cluster, "push", lose)
    with pytest.raises(NodeUnreachable, match="alpha cannot be reached"):
        asyncio.run(send(services, "alpha", source))
