"""Whether this machine can compile layers, and what makes two compilations alike.

Triton builds small programs with the C compiler of the machine. Choices that are made by measuring
are switched off, because they would let two starts add up in different orders.
"""

from __future__ import annotations

import os
import shutil

import torch

_COMPILERS = ("gcc", "clang", "cc")
_MAX_KINDS = 64
"""Compiled forms of one function: kinds of layers, with and without gradients or adapter."""


def find_obstacle(device: torch.device) -> str | None:
    """Return why layers cannot be compiled here, as a clause; None: they can."""
    if device.type != "cuda":
        return "there is no GPU"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return f"{torch.cuda.get_device_name(device)} is older than what Triton works on"
    try:
        import triton  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        return f"the package triton is missing ({error})"
    if os.environ.get("CC") or any(shutil.which(name) for name in _COMPILERS):
        return None
    return "no C compiler is installed (sudo apt install build-essential)"


def fix_settings() -> None:
    """Fix what compiled layers depend on; to be called before anything is compiled."""
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MAX_KINDS
    # What `joined` keeps between the layers of a set is gone when the decoder layer ends.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if hasattr(torch._inductor.config, "deterministic"):  # since torch 2.10
        torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
