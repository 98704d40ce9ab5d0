"""Measure what a node trains on, one GPU after the other, each for about 20 seconds."""

from __future__ import annotations

from agents.contract.node import Calibration, CalibrationJob
from app.nodes.client import NodeClient, OnMessage
from app.provisioning.environment import python_of

CPU_S = 6.0
"""A processor is as fast after seconds as after minutes."""


async def calibrate_node(
    client: NodeClient, progress: OnMessage | None = None
) -> dict[str, Calibration]:
    """Return what each GPU of the node reached, by its uuid; of a node without, its `cpu`.

    Raises:
        UserError: it has no training environment, or a run uses a GPU.
    """
    facts = await client.facts()
    python = python_of(client.name, facts)
    jobs = [
        (gpu.name, CalibrationJob(python=python, device=f"cuda:{gpu.index}", device_id=gpu.uuid))
        for gpu in facts.gpus
    ]
    if not jobs:
        job = CalibrationJob(python=python, device="cpu", device_id="cpu", seconds=CPU_S)
        jobs = [("CPU", job)]
    found: dict[str, Calibration] = {}
    for name, job in jobs:

        def tell(text: str, name: str = name) -> None:
            if progress is not None:
                progress(f"{name}: {text}")

        found[job.device_id] = await client.calibrate(job, tell)
    return found
