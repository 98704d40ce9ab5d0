"""What the nodes say of attempts, and for how long one that is silent is awaited."""

from __future__ import annotations

import asyncio

import pytest

from agents.contract.requests.attempts import Attempts, ListAttempts
from app.errors import HostKeyChanged
from app.runs.nodes import attempt_status
from app.runs.nodes.attempt_status import list_attempts
from tests.fakes.cluster import FakeCluster


def delay(cluster: FakeCluster, name: str, delay_s: float) -> None:
    """Let a node answer late."""
    ask = cluster[name].attempt_list

    async def answer(request: ListAttempts, progress: object) -> Attempts:
        await asyncio.sleep(delay_s)
        cluster[name].reachable = True
        return await ask(request)

    cluster[name].attempt_list = answer  # type: ignore[method-assign]


async def refuse(*asked: object) -> Attempts:
    raise HostKeyChanged("refusing", "SHA256:a", "SHA256:b")


@pytest.mark.parametrize(
    ("alpha_s", "beta_s", "is_silent", "expected"),
    [
        (0.0, 60.0, True, ["alpha"]),  # a connection to a PC that is off
        (0.0, 0.01, True, ["alpha", "beta"]),
        (0.4, 0.5, True, ["alpha", "beta"]),  # slow, as the others are
        (0.0, 0.5, False, ["alpha", "beta"]),  # a first contact takes its time
    ],
)
def test_a_silent_node_delays_the_others_for_a_moment_alone(
    alpha_s: float, beta_s: float, is_silent: bool, expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attempt_status, "SILENT_WAIT_S", 0.1)
    cluster = FakeCluster("alpha", "beta", "refusing")
    delay(cluster, "alpha", alpha_s)
    delay(cluster, "beta", beta_s)
    cluster["beta"].reachable = not is_silent
    cluster["refusing"].attempt_list = refuse  # type: ignore[method-assign]
    found = asyncio.run(asyncio.wait_for(list_attempts(cluster, cluster.names()), 10))
    assert list(found) == expected
