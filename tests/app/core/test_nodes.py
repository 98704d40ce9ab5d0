"""A measurement that cannot be believed is told with its reason, and no plan learns of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agents.contract.node import Calibration, NodeFacts
from agents.contract.requests.jobs import CalibrationJob
from app.core.nodes import CalibrateNode
from app.errors import UserError
from app.forecasts.planner import describe_nodes
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.cluster import make_facts as plain_facts

GOOD = Calibration(card="CPU", matrix_flops_per_s=1e11, memory_bytes_per_s=2e10, spread=0.02)


def measure(services: Services, cluster: FakeCluster, found: Calibration) -> Any:
    """Run the action of a person on a node that measures this."""
    node = cluster["alpha"]
    node.facts_now = replace(node.facts_now, gpus=(), num_cores=8)

    async def calibrate(job: CalibrationJob, progress: Any = None) -> Calibration:
        return found

    node.calibrate = calibrate  # type: ignore[method-assign, assignment]
    fleet = SimpleNamespace(client=lambda name: node)
    core = cast(Any, SimpleNamespace(fleet=fleet, services=services))
    return asyncio.run(CalibrateNode(name="alpha").perform(core, lambda event: None))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster("alpha")


@pytest.fixture
def services(tmp_path: Path, cluster: FakeCluster) -> Services:
    return make_services(tmp_path / "home", cluster)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"other_load": 0.7}, "other programs used 70% of the CPU meanwhile"),
        ({"spread": 0.9}, "its repetitions differ by 90%"),
        ({"matrix_flops_per_s": 3e9}, "it gave 0.003 TFLOP/s"),
    ],
)
def test_a_measurement_of_a_busy_pc_is_told_and_not_stored(
    changes: dict[str, float], words: str, services: Services, cluster: FakeCluster
) -> None:
    with pytest.raises(UserError, match="is not used") as caught:
        measure(services, cluster, replace(GOOD, **changes))  # type: ignore[arg-type]
    assert words in caught.value.message
    assert "rackless nodes measure alpha" in caught.value.hint
    assert services.planning.calibrations() == {}


def test_a_measurement_of_a_free_pc_is_stored(services: Services, cluster: FakeCluster) -> None:
    assert measure(services, cluster, GOOD) == (GOOD,)
    assert services.planning.calibrations() == {("alpha", "cpu"): GOOD}


def test_a_measurement_of_an_earlier_version_that_cannot_be_so_is_ignored(
    services: Services,
) -> None:
    facts: dict[str, NodeFacts] = {"alpha": replace(plain_facts(), gpus=(), num_cores=8)}
    for flops, is_used in ((3e9, False), (1e11, True)):
        found = replace(GOOD, matrix_flops_per_s=flops)
        services.planning.save_calibration("alpha", "cpu", found)
        (node,) = describe_nodes(services.planning, facts).nodes
        assert node.gpus[0].calibration == (found if is_used else None)
