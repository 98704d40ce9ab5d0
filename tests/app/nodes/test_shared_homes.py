"""Nodes with one folder of the agent are found by marks, whatever their paths are."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.contract.node import NodeFacts
from agents.contract.requests.node import ReadFacts
from agents.contract.requests.storage import FindMarks, FoundMarks, MarkHome
from agents.node import home_marks
from agents.state import Home
from app.core.nodes import SetUpNode
from app.errors import NodeUnreachable, UserError
from app.nodes.shared_homes import find_shared_homes, require_own_homes
from tests.fakes.cluster import make_facts
from tests.fakes.requests import FakeAgent, Report, answers


@dataclass
class Agent(FakeAgent):
    """Agent with a real folder."""

    path: Path
    is_lost: bool = False

    @answers(MarkHome)
    async def mark(self, request: MarkHome, progress: Report = None) -> None:
        if self.is_lost:
            raise NodeUnreachable("lost")
        home_marks.mark_home(Home(self.path), request.mark, removes=request.removes)

    @answers(FindMarks)
    async def find(self, request: FindMarks, progress: Report = None) -> FoundMarks:
        return FoundMarks(marks=home_marks.find_marks(Home(self.path), request.marks))


@pytest.fixture
def agents(tmp_path: Path) -> dict[str, Agent]:
    """Four nodes: `a` and `c` have one folder, and the disk of `d` is a clone of b's."""
    share, own, clone = (tmp_path / name for name in ("share", "own", "clone"))
    for folder in (share, own, clone):
        folder.mkdir()
        (folder / "home-id").write_text(("1" if folder == share else "2") * 32)
    (tmp_path / "mounted").symlink_to(share)
    places = {"a": share, "b": own, "c": tmp_path / "mounted", "d": clone}
    return {name: Agent(path) for name, path in places.items()}


def facts_of(agents: dict[str, Agent], **changes: Any) -> dict[str, Any]:
    return {
        name: make_facts(
            home_id=home_marks.read_home_id(Home(agent.path)), agent_home=str(agent.path), **changes
        )
        for name, agent in agents.items()
    }


async def test_only_nodes_with_one_folder_are_a_group(agents: dict[str, Agent]) -> None:
    assert await find_shared_homes(agents, facts_of(agents)) == (("a", "c"),)
    left = {name: os.listdir(agent.path) for name, agent in agents.items()}
    assert left == {key: ["home-id"] for key in agents}


async def test_all_nodes_on_one_share_are_one_group(agents: dict[str, Agent]) -> None:
    for agent in agents.values():
        agent.path = agents["a"].path
    assert await find_shared_homes(agents, facts_of(agents)) == (("a", "b", "c", "d"),)


async def test_a_node_that_cannot_write_is_not_compared(agents: dict[str, Agent]) -> None:
    agents["c"].is_lost = True
    # Its own mark is missing, but it finds that of the other one.
    assert await find_shared_homes(agents, facts_of(agents)) == (("c", "a"),)
    agents["a"].is_lost = True
    assert await find_shared_homes(agents, facts_of(agents)) == ()


async def test_a_start_says_what_to_set(agents: dict[str, Agent]) -> None:
    with pytest.raises(UserError, match="a and c have one folder for the agent") as refused:
        await require_own_homes(agents, facts_of(agents))
    assert refused.value.hint.startswith("On c, set RACKLESS_AGENT_HOME to a folder on its own")
    assert refused.value.topic == "shared-home"
    del agents["c"]
    facts = facts_of(agents)
    await require_own_homes(agents, facts)
    # The other PC may be no node of this master.
    facts["b"] = replace(facts["b"], recorder="elsewhere")
    with pytest.raises(UserError, match="another PC uses the agent's folder of b"):
        await require_own_homes(agents, facts)


async def test_no_environment_is_built_in_the_folder_of_another_node(
    agents: dict[str, Agent],
) -> None:
    facts = facts_of(agents)

    class OwnFacts(Agent):
        @answers(ReadFacts)
        async def read(self, request: ReadFacts, progress: Report = None) -> NodeFacts:
            return facts["c"]

    clients = {**agents, "c": OwnFacts(agents["c"].path)}
    snapshots = [SimpleNamespace(name=name, facts=facts[name]) for name in ("a", "b")]
    fleet = SimpleNamespace(
        client=clients.__getitem__, snapshots=lambda: snapshots, names=lambda: tuple(clients)
    )
    core: Any = SimpleNamespace(fleet=fleet)
    with pytest.raises(UserError, match="a and c have one folder for the agent"):
        await SetUpNode(name="c").perform(core, lambda told: None)
