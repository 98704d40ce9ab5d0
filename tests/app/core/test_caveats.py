"""What a run leaves as it is can be named before there is any node, and unknown is not nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from agents.contract.spec import AdapterSpec, RunSpec
from app.core.core import Core
from app.core.runs import ListCaveats
from app.planning.candidate import Caveats
from tests.app.forecasts.test_learning import CONFIG
from tests.fakes.models import write_model


def find_caveats(home: Path, *specs: RunSpec) -> list[Caveats]:
    async def ask() -> list[Caveats]:
        async with Core.open(home) as core:
            return [await core.do(ListCaveats(spec=spec)) for spec in specs]

    return asyncio.run(ask())


def test_parts_are_known_without_nodes_and_unknown_sizes_are_said(
    tmp_path: Path, spec: RunSpec
) -> None:
    write_model(Path(spec.model), **CONFIG)
    narrow = replace(spec, adapter=AdapterSpec(kind="qlora", targets=("q_proj",)))
    full = replace(spec, adapter=AdapterSpec(kind="full"))
    away = replace(spec, model="org/unknown")
    found = find_caveats(tmp_path / "master", narrow, full, away)
    assert [one.kind for one in found[0].parts or ()] == ["no_adapter", "untouched"]
    assert (found[1].parts, found[1].problem) == ((), "")
    assert found[2].parts is None
    assert "org/unknown" in found[2].problem
