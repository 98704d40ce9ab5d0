"""What a rank is given besides its place."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from agents.shared.login_variables import LEFT_OUT
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.launcher import choose_num_threads, rank_environ
from agents.trainer.__main__ import _log_identity
from agents.trainer.rank.attempt import RankAttempt
from tests.agents.supervisor.conftest import Node

UUIDS = ("GPU-9d4a1f6e-0f0e-4d7b-8e0a-1c2d3e4f5a6b", "GPU-0b1c2d3e-aaaa-bbbb-cccc-1c2d3e4f5a6b")


@pytest.mark.parametrize(
    ("num_cores", "num_local", "named", "expected"),
    [
        (8, 1, "", 8),
        (8, 3, "", 2),
        (2, 4, "", 1),
        (8, 1, "2", 2),
        (4, 2, "16", 2),
        (4, 1, "0", 4),
        (4, 1, "many", 4),
    ],
)
def test_threads_of_a_rank(
    monkeypatch, num_cores: int, num_local: int, named: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setenv("OMP_NUM_THREADS", named)
    assert choose_num_threads(num_local) == expected


def environ_of(node: Node, rank: int = 0, **changes: Any) -> dict[str, str]:
    intent = replace(node.intent("train", "train"), **changes)
    return rank_environ(AttemptFolder(node.home, "run-1", 1), intent, intent.ranks[rank])


def test_the_login_does_not_change_group_device_or_interpreter(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCHELASTIC_RUN_ID": "mine",
        "NCCL_PROTO": "LL",
        "GLOO_SOCKET_IFNAME": "docker0",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONOPTIMIZE": "2",
        "PYTHONWARNINGS": "error",
        "MKL_NUM_THREADS": "64",
    }
    before = environ_of(node)
    for name, value in {**odd, "NCCL_DEBUG": "INFO", "RANK": "7", "WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)
    left_out = ", ".join(sorted({*odd, "RANK", "WORLD_SIZE"}))
    assert environ_of(node) == {**before, "NCCL_DEBUG": "INFO", LEFT_OUT: left_out}
    # All nodes have this one, so the master passes it on.
    assert environ_of(node, environ={"NCCL_PROTO": "LL"})["NCCL_PROTO"] == "LL"


def test_each_rank_sees_its_own_card_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease, the sensors and torch are then about one card, however the login orders them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    ranks = tuple(
        replace(place, device=f"cuda:{place.rank}", device_id=UUIDS[place.rank])
        for place in node.intent("train", "train").ranks
    )
    for rank in (0, 1):
        environ = environ_of(node, rank, ranks=ranks)
        assert environ["CUDA_VISIBLE_DEVICES"] == ranks[rank].device_id
        assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        intent = replace(node.intent("train", "train"), ranks=ranks)
        attempt = RankAttempt(folder=node.home.path, intent=intent, rank=rank)
        # Started by hand, a rank sees all cards.
        assert attempt.device == ranks[rank].device
        with monkeypatch.context() as here:
            here.setenv("CUDA_VISIBLE_DEVICES", environ["CUDA_VISIBLE_DEVICES"])
            assert attempt.device == "cuda:0"


def test_a_rank_on_the_cpu_sees_no_card(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = environ_of(node)
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    intent = node.intent("train")
    assert RankAttempt(folder=node.home.path, intent=intent, rank=0).device == "cpu"


def test_the_log_of_a_rank_says_what_is_left_out(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    intent = node.intent("train")
    attempt = RankAttempt(folder=node.home.path, intent=intent, rank=0)
    assert environ_of(node)[LEFT_OUT] == ""
    _log_identity(attempt)
    assert "left out" not in capsys.readouterr().out
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv(LEFT_OUT, environ_of(node)[LEFT_OUT])
    _log_identity(attempt)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(
        "left out of the login's variables: PYTHONOPTIMIZE, TORCH_DISTRIBUTED_DEBUG"
    )
