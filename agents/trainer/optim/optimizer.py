"""The optimizer over the flat parameters, and its state as plain tensors and numbers.

The 8-bit optimizers keep the moments in blocks of 256 values, each with a separate scale (Dettmers
et al. 2021, arXiv:2110.02861). bitsandbytes leaves tensors of fewer than 4,096 values in 32 bits.
The flat tensors are one of all matrices and one of all vectors, so that affects only the smallest
adapters, and norms and biases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agents.contract.spec import RunSpec
from agents.errors import ExpectedError
from agents.trainer.optim.flat_parameters import FlatParameters

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
# Avoids a division by zero for zero gradients; torch.nn.utils.clip_grad_norm_ adds the same.
_NORM_EPSILON = 1e-6


def make_optimizer(spec: RunSpec, flat: FlatParameters) -> torch.optim.Optimizer:
    """Return the optimizer that the spec names, over the flat parameters.

    Raises:
        ExpectedError: it needs bitsandbytes, which is not installed.
    """
    groups = flat.groups(spec.weight_decay)
    if spec.optimizer == "adamw":
        # Neither fused nor foreach: one flat tensor gains from neither, and reference results come
        # from the plain loop.
        return torch.optim.AdamW(
            groups, lr=spec.learning_rate, betas=_BETAS, eps=_EPSILON, foreach=False
        )
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise ExpectedError(
            f"optimizer: {spec.optimizer} needs the package bitsandbytes, which the training "
            f"environment of this node does not have ({error}).",
            "Use optimizer: adamw, or build the environment again with rackless nodes setup",
        ) from error
    kind = optim.AdamW8bit if spec.optimizer == "adamw_8bit" else optim.PagedAdamW8bit
    optimizer: torch.optim.Optimizer = kind(
        groups, lr=spec.learning_rate, betas=_BETAS, eps=_EPSILON
    )
    return optimizer


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step on the current stream."""
    device = optimizer.param_groups[0]["params"][0].device
    if device.type != "cuda" or isinstance(optimizer, torch.optim.AdamW):
        optimizer.step()
        return
    # bitsandbytes launches its optimizers' kernels on the default stream, regardless of the current
    # one. There they would read gradients before these are written.
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    with torch.cuda.stream(default):
        optimizer.step()
    current.wait_stream(default)


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    flat: FlatParameters,
    norm: Tensor,
    max_norm: float,
    learning_rate: float,
) -> None:
    """Clip the gradients, and take a step.

    Args:
        optimizer: optimizer over the parameters.
        flat: the parameters.
        norm: norm of the gradients of the whole model, a scalar.
        max_norm: larger gradients are scaled down to this norm.
        learning_rate: learning rate of this step.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    flat.gradients.mul_((max_norm / (norm + _NORM_EPSILON)).clamp(max=1.0))
    take_step(optimizer)


def export_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors and its plain values, both by `INDEX/NAME`.

    bitsandbytes nests its quantized state one level deeper: `INDEX/NAME/NAME`.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    _flatten(optimizer.state_dict()["state"], "", tensors, plain)
    return tensors, plain


def _flatten(
    state: dict[Any, Any], prefix: str, tensors: dict[str, Tensor], plain: dict[str, Any]
) -> None:
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            _flatten(value, f"{key}/", tensors, plain)
        elif isinstance(value, Tensor):
            tensors[key] = value
        else:
            plain[key] = value


def import_state(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], plain: dict[str, Any]
) -> None:
    """Restore the state of `export_state`."""
    state: dict[Any, Any] = {}
    for key, value in (*tensors.items(), *plain.items()):
        index, *names = key.split("/")
        place = state.setdefault(int(index), {})
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = value
    # Hyperparameters are those of the present spec, not of the checkpoint: a resume may not change
    # them, and the learning rate is set at every step.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
