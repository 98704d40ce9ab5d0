"""Calibrate a node: measure each GPU in turn for about 20 seconds."""

from __future__ import annotations

from collections.abc import Mapping

from agents.contract.node import Calibration
from agents.contract.requests.jobs import CalibrationJob
from agents.contract.requests.node import ReadFacts
from app.errors import UserError
from app.nodes.client import NodeClient
from app.planning.hardware.measurement_limits import find_fault
from app.presentation.plan_text import describe_calibration
from app.progress import OnMessage, messages
from app.provisioning.environment import python_of

CPU_S = 6.0
"""Duration of a CPU's measurement, in seconds; unlike a GPU it needs no warm-up."""


async def calibrate_node(
    client: NodeClient, progress: OnMessage | None = None
) -> dict[str, Calibration]:
    """Return the measured rates by the GPU's uuid; `cpu` for a node without GPUs.

    Raises:
        UserError: the node has no training environment, or a run uses a GPU.
    """
    facts = await client.ask(ReadFacts())
    python = python_of(client.name, facts)
    jobs = [
        (gpu.name, CalibrationJob(python=python, device=f"cuda:{gpu.index}", device_id=gpu.uuid))
        for gpu in facts.gpus
    ]
    if not jobs:
        job = CalibrationJob(python=python, device="cpu", device_id="cpu", seconds=CPU_S)
        jobs = [("CPU", job)]
    found: dict[str, Calibration] = {}
    # One GPU after the other: together they would share power, cooling and the bus.
    for name, job in jobs:

        def report(text: str, name: str = name) -> None:
            if progress is not None:
                progress(f"{name}: {text}")

        found[job.device_id] = await client.ask(job, messages(report))
    return found


def refuse_faulty(
    node: str, found: Mapping[str, Calibration], num_cores: int | None
) -> dict[str, UserError]:
    """Return an error for each implausible measurement, by device."""
    return {
        device_id: UserError(
            f"the measurement of {one.card} on {node} is not used: {fault} "
            f"(measured: {describe_calibration(one)})",
            "Close other programs there, or wait until they have finished, and measure again: "
            f"rackless nodes measure {node}",
        )
        for device_id, one in found.items()
        if (fault := find_fault(one, num_cores))
    }
