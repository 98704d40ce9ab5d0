"""What `rackless checkpoints` answers to a script."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from app.cli.checkpoints import _list
from app.cli.kit.output import Output
from app.core.action import Report
from app.core.runs import FindCheckpoints
from app.events import CheckpointSnapshot
from tests.fakes.core import FakeCore


@pytest.mark.parametrize(
    ("verify", "verified", "code"),
    [(True, True, 0), (True, False, 1), (True, None, 0), (False, False, 0)],
)
def test_exit_code_tells_damage_where_it_was_asked_for(
    verify: bool, verified: bool | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = CheckpointSnapshot(
        run_id="r1", step=10, created_s=0.0, size_bytes=1, nodes=("alpha",), verified=True
    )
    other = CheckpointSnapshot(
        run_id="r1", step=20, created_s=0.0, size_bytes=1, nodes=("alpha",), verified=verified
    )

    async def checkpoints(
        action: FindCheckpoints, report: Report
    ) -> tuple[CheckpointSnapshot, ...]:
        assert (action.run_id, action.verify) == ("r1", verify)
        return (other, whole)

    core = FakeCore()
    core.answers[FindCheckpoints] = checkpoints
    args = argparse.Namespace(run="r1", verify=verify)
    assert asyncio.run(_list(core, args, Output(False))) == code
    assert "20" in capsys.readouterr().out
