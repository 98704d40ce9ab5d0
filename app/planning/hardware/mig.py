"""Describe GPUs in MIG mode, on which Rackless does not train.

A slice has no power, clock and temperature of its own, CUDA shows a process one slice only, and
NCCL does not join slices of one GPU. So a rank gets whole GPUs.
"""

from __future__ import annotations

from agents.contract.node import MigGpu
from app.text import show_list


def describe_mig(gpu: MigGpu) -> str:
    """Return why a GPU in MIG mode is not used, as a sentence without a full stop.

    >>> describe_mig(MigGpu(index=0, name="NVIDIA A100", slices=("NVIDIA A100 MIG 1g.5gb",)))
    'GPU 0 (NVIDIA A100) is divided by MIG into 1g.5gb, and Rackless trains on whole GPUs only'
    >>> describe_mig(MigGpu(index=1, name="NVIDIA A100"))
    'GPU 1 (NVIDIA A100) is in MIG mode without slices, so no program can use it'
    """
    card = f"GPU {gpu.index} ({gpu.name})"
    if not gpu.slices:
        return f"{card} is in MIG mode without slices, so no program can use it"
    names = show_list([name.rpartition(" MIG ")[2] for name in gpu.slices])
    return f"{card} is divided by MIG into {names}, and Rackless trains on whole GPUs only"


def say_turn_off(gpu: MigGpu) -> str:
    """Return how to make a GPU whole again, as an imperative without a full stop."""
    return (
        f"End the programs that use it and turn MIG off there: sudo nvidia-smi -i {gpu.index} "
        "-mig 0; or leave it out"
    )
