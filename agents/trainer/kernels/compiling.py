"""Check whether this machine can compile layers, and make compilation reproducible.

Triton needs the machine's C compiler for its launchers. Inductor's autotuning is disabled for
bit-equal runs: it chooses kernels by timing them, so two starts could add in different orders.
"""

from __future__ import annotations

import os
import shutil

import torch

_COMPILERS = ("gcc", "clang", "cc")
# Compiled variants of one function: kinds of layers, with and without gradients or adapter.
# Dynamo's default of 8 is too low for models with several kinds of layers.
_MAX_VARIANTS = 64


def find_obstacle(device: torch.device) -> str | None:
    """Return why layers cannot be compiled on this device, as a clause, or None if they can."""
    if device.type != "cuda":
        return "there is no GPU"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return f"{torch.cuda.get_device_name(device)} is older than what Triton supports"
    try:
        import triton  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        return f"the package triton is missing ({error})"
    if os.environ.get("CC") or any(shutil.which(name) for name in _COMPILERS):
        return None
    return "no C compiler is installed (sudo apt install build-essential)"


def fix_settings() -> None:
    """Configure the compiler. Must be called before the first compilation."""
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MAX_VARIANTS
    # A `FusedSet` keeps outputs between its layers, but not beyond the decoder layer, so a
    # recomputation need not repeat that side effect.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if hasattr(torch._inductor.config, "deterministic"):  # since torch 2.10
        torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()


def start_workers() -> None:
    """Start the processes that compile in the background; returns at once.

    Each imports torch, which takes seconds. Until they are ready, Inductor compiles one kernel
    after the other in this process. Processes that start before the weights load are ready in time.
    """
    from torch._inductor import async_compile

    start = getattr(async_compile, "maybe_warm_pool", None)  # not a public function
    if start is not None:
        start()
