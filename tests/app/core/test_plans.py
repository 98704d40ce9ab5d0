"""Nodes written as a cluster file by the core, and purchases for a run on them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.core.core import Core
from app.core.plans import ExportCluster, RankUpgrades
from app.core.state import CoreState
from app.library.cluster_file import read_cluster_file
from tests.fakes.core import make_node


class KnownNodes:
    """Fleet whose facts are known, so that no node is asked."""

    def __init__(self) -> None:
        self.nodes = [make_node("alpha", ("RTX 4070", 12)), make_node("beta", ("RTX 3060", 12))]

    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    def snapshots(self) -> list[object]:
        return list(self.nodes)


def test_known_nodes_are_exported_and_planned_with(tmp_path: Path) -> None:
    spec = RunSpec(
        model="Qwen/Qwen2.5-0.5B", data=DataSpec(train="-"), adapter=AdapterSpec(kind="qlora")
    )

    async def act() -> None:
        async with Core.open(tmp_path / "home") as core:
            core.fleet = KnownNodes()  # type: ignore[assignment]
            state = cast(CoreState, core)
            path = await ExportCluster(path=tmp_path / "pcs.yaml").perform(state, print)
            described = read_cluster_file(path)
            facts = {node.name: node.facts for node in KnownNodes().nodes}
            assert [node.name for node in described.nodes] == list(facts)
            for node in described.nodes:
                known = facts[node.name]
                assert known is not None
                assert [gpu.name for gpu in node.gpus] == [gpu.name for gpu in known.gpus]
            real = await RankUpgrades(spec=spec, ask_remote=False).perform(state, print)
            edited = await RankUpgrades(spec=spec, cluster=path).perform(state, print)
            assert [one.text for one in edited.found] == [one.text for one in real.found]
            assert real.useful

    asyncio.run(act())
