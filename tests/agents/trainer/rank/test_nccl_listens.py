"""NCCL's ranks meet in our store and listen on one address; needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.agents.trainer.rank.nccl_ranks import ROOT

pytestmark = pytest.mark.gpu


def test_nccl_listens_on_the_one_interface_and_outlives_the_store() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.agents.trainer.rank.nccl_ranks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
