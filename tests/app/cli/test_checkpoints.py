"""What `rackless checkpoints` answers to a script."""

from __future__ import annotations

import argparse
import asyncio
from types import SimpleNamespace

import pytest

from app.cli.checkpoints import _list
from app.cli.output import Output
from app.events import CheckpointSnapshot


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

    async def checkpoints(run: str, verifies: bool) -> tuple[CheckpointSnapshot, ...]:
        assert (run, verifies) == ("r1", verify)
        return (other, whole)

    core = SimpleNamespace(runs=SimpleNamespace(checkpoints=checkpoints))
    args = argparse.Namespace(run="r1", verify=verify)
    assert asyncio.run(_list(core, args, Output(False))) == code
    assert "20" in capsys.readouterr().out
