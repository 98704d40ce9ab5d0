"""A rank on a GPU that survives a loss saves the last step, whether NCCL notices or hangs.

Needs two GPUs: `python -m pytest -m gpu tests/agents/trainer/rank/test_loss_on_gpus.py`.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from agents.contract.spec import CheckpointSpec
from agents.trainer.checkpoint.folder import read_checkpoint
from tests.agents.trainer.ranks import wait_until
from tests.agents.trainer.test_two_gpus import make_run, require_gpus, start

pytestmark = pytest.mark.gpu

SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Makes NCCL talk as between two PCs."""


@pytest.mark.parametrize(
    ("lost", "how", "asks", "environ"),
    [
        pytest.param(1, signal.SIGKILL, False, SOCKETS, id="nccl notices"),
        pytest.param(1, signal.SIGSTOP, True, SOCKETS, id="nccl waits for a silent node"),
        pytest.param(0, signal.SIGKILL, True, {}, id="a rank that writes no checkpoints saves"),
        pytest.param(1, signal.SIGKILL, True, {}, id="a rank on the same PC is killed"),
    ],
)
def test_survivor_saves(tmp_path, monkeypatch, lost, how, asks, environ):
    require_gpus(2)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    run = make_run(tmp_path / "run", 2, precision="fp32", compile="off")
    never = CheckpointSpec(every_minutes=None, every_steps=None, keep=3)
    run.spec = replace(run.spec, checkpoint=never, max_steps=2000)
    ranks = start(run)
    survivor = 1 - lost
    try:
        wait_until(lambda: len(run.steps(survivor)) >= 20, 150.0)
        lost_s = time.monotonic()
        os.kill(ranks[lost].pid, how)
        if asks:  # as the supervisor does
            time.sleep(1.0)
            (run.attempt_folder / "loss.json").write_text("{}")
        code = ranks[survivor].wait(60)
        print(f"ended {time.monotonic() - lost_s:.1f} s after the loss", run.journal(survivor)[-1])
        print(run.read_log(survivor)[-1500:])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert code == 3
    assert "lost its connection to" in run.journal(survivor)[-1]["message"]
    (path,) = (run.folder / "checkpoints").glob("step-*")
    saved = read_checkpoint(path)
    done = max(run.steps(survivor))
    assert (saved.manifest.at_loss, saved.manifest.step) == (True, done)
    assert saved.verify() == ""
    # One GPU goes on from it like one that was never disturbed.
    run.num_ranks = 1
    run.spec = replace(run.spec, max_steps=2000)
    (alone,) = start(run, resume_step=done)
    wait_until(lambda: len(run.steps()) >= 3, 150.0)
    alone.kill()
    alone.wait()
    resumed = run.steps()
    whole = make_run(tmp_path / "whole", 1, precision="fp32", compile="off")
    whole.spec = run.spec
    (undisturbed,) = start(whole)
    wait_until(lambda: len(whole.steps()) >= done + 3, 150.0)
    undisturbed.kill()
    undisturbed.wait()
    for step in range(done + 1, done + 4):
        assert resumed[step]["samples"] == whole.steps()[step]["samples"]
        assert resumed[step]["loss"] == pytest.approx(whole.steps()[step]["loss"], rel=1e-4)
