"""The core, its protocols and the fake core take the same arguments."""

from __future__ import annotations

import inspect

import pytest

from app.core import api
from app.core.artifacts import CoreArtifacts
from app.core.chats import CoreChats
from app.core.hub import CoreHub
from app.core.library import CoreLibrary
from app.core.nodes import CoreNodes
from app.core.repairs import CoreRepairs
from app.core.runs import CoreRuns
from app.core.storage import CoreStorage
from tests.fakes.core import FakeCore

NOUNS = (
    ("nodes", api.NodesApi, CoreNodes),
    ("repairs", api.RepairsApi, CoreRepairs),
    ("storage", api.StorageApi, CoreStorage),
    ("runs", api.RunsApi, CoreRuns),
    ("artifacts", api.ArtifactsApi, CoreArtifacts),
    ("chats", api.ChatsApi, CoreChats),
    ("library", api.LibraryApi, CoreLibrary),
    ("hub", api.HubApi, CoreHub),
)


@pytest.mark.parametrize(("noun", "protocol", "real"), NOUNS)
def test_a_protocol_takes_what_the_core_and_the_fake_take(
    noun: str, protocol: type, real: type
) -> None:
    fake = type(getattr(FakeCore(), noun))
    methods = [name for name, one in vars(protocol).items() if inspect.isfunction(one)]
    public = [name for name in methods if not name.startswith("_")]
    assert public
    for name in public:
        asked, done, faked = (
            list(inspect.signature(getattr(one, name)).parameters.values())
            for one in (protocol, real, fake)
        )
        assert asked == done, f"core.{noun}.{name}"
        bare = [one.replace(annotation=one.empty) for one in asked]
        assert [one.replace(annotation=one.empty) for one in faked] == bare, f"fake {noun}.{name}"
