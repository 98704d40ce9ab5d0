"""What a checkpoint holds: trained values, optimizer state, and where the run stands.

Only safetensors and JSON, so that loading one can never run code. Every file is a function of the
run alone, not of the rank or node that writes it: copies on several nodes are equal byte by byte.
The adapter's two files are PEFT's own, so that plain Transformers and PEFT load it as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agents.errors import UserError
from agents.spec import RunSpec
from agents.trainer.checkpoint import Checkpoint
from agents.trainer.flat import FlatParameters, Layout
from agents.trainer.model import TrainedModel
from agents.trainer.optimizer import export_state, import_state
from agents.trainer.precision import LossScale
from agents.wire import WireError, from_wire, to_wire

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FULL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
CARRIED_FILE = "carried.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands: all that its next step depends on, besides the tensors."""

    step: int
    total_steps: int
    spec: RunSpec
    devices: tuple[tuple[str, str], ...]
    """Node and device of each rank."""
    shares: tuple[float, ...]
    micro_tokens: tuple[int, ...]
    """Largest micro-batch of each rank, in padded tokens."""
    num_recomputed: tuple[int, ...]
    """How many layers of each rank compute activations a second time to save memory."""
    tokens_seen: int
    plain_template: bool
    """The tokenizer had no chat template: the merged model gets the plain one."""
    loss_scale: LossScale = field(default_factory=LossScale)
    optimizer: dict[str, Any]
    """The part of the optimizer's state that is not tensors."""
    layout: Layout = "sorted"
    """Order of the parameters in the optimizer's tensors; the default is that of older ones."""


class HostCopy:
    """The trained values and the optimizer's state in host memory, ready to be written.

    The buffers are allocated by the first copy, pinned where the state is on a GPU, and used again
    by all later ones: the host holds the state once.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        """The parameters by name."""
        self.optimizer: dict[str, Tensor] = {}
        self.plain: dict[str, Any] = {}
        """The part of the optimizer's state that is not tensors."""
        self.carried: dict[str, Tensor] = {}
        """What the compression of gradients goes on with."""
        self._buffers: dict[str, Tensor] = {}

    def take(
        self,
        flat: FlatParameters,
        optimizer: torch.optim.Optimizer,
        carried: dict[str, Tensor] | None = None,
    ) -> None:
        """Copy the state as it is now; returns when all of it has arrived."""
        whole = self._fetch("", flat.values)
        self.values, start = {}, 0
        for name, view in flat.views.items():
            self.values[name] = whole[start : start + view.numel()].view_as(view)
            start += view.numel()
        tensors, self.plain = export_state(optimizer)
        self.optimizer = {name: self._fetch(name, tensor) for name, tensor in tensors.items()}
        self.carried = {
            name: self._fetch(f"carried/{name}", tensor) for name, tensor in (carried or {}).items()
        }
        if flat.values.is_cuda:
            torch.cuda.synchronize(flat.values.device)

    def _fetch(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)


def write_snapshot(
    folder: Path, *, model: TrainedModel, copy: HostCopy, progress: Progress
) -> None:
    """Write every file of a checkpoint but its manifest."""
    metadata = {"format": "pt"}
    name = FULL_FILE if model.lora is None else ADAPTER_FILE
    save_file(copy.values, folder / name, metadata=metadata)
    save_file(copy.optimizer, folder / OPTIMIZER_FILE, metadata=metadata)
    if copy.carried:
        save_file(copy.carried, folder / CARRIED_FILE, metadata=metadata)
    if model.lora is not None:
        _write_json(folder / ADAPTER_CONFIG, adapter_config(model, progress.spec))
    _write_json(folder / STATE_FILE, to_wire(progress))


def adapter_config(model: TrainedModel, spec: RunSpec) -> dict[str, Any]:
    """Return PEFT's description of the adapter, the same on every node."""
    assert model.lora is not None
    plain = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in model.lora.to_dict().items()
    }
    plain["base_model_name_or_path"] = spec.model
    plain["inference_mode"] = True
    return plain


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="ascii")


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Return where the run stood.

    Raises:
        UserError: the file is not one of ours, or of a version that is not understood.
    """
    try:
        return from_wire(Progress, json.loads((checkpoint.path / STATE_FILE).read_bytes()))
    except (OSError, ValueError, WireError) as error:
        raise UserError(
            f"{checkpoint.path / STATE_FILE} cannot be read: {error}.",
            "Resume from another checkpoint: rackless checkpoints lists them",
        ) from error


def load_snapshot(
    checkpoint: Checkpoint, *, flat: FlatParameters, optimizer: torch.optim.Optimizer
) -> None:
    """Put the checkpoint's values and optimizer state back.

    Raises:
        UserError: it belongs to other parameters.
    """
    full = checkpoint.path / FULL_FILE
    values = read_tensors(full if full.exists() else checkpoint.path / ADAPTER_FILE)
    shapes = {name: tuple(view.shape) for name, view in flat.views.items()}
    found = {name: tuple(value.shape) for name, value in values.items()}
    if shapes != found:
        odd = sorted(set(shapes.items()) ^ set(found.items()))[0]
        raise UserError(
            f"{checkpoint.path} holds other parameters than this run trains, such as {odd[0]}.",
            "Resume with the model and the adapter settings of that run",
        )
    for name, view in flat.views.items():
        view.copy_(values[name])
    plain = read_progress(checkpoint).optimizer
    import_state(optimizer, read_tensors(checkpoint.path / OPTIMIZER_FILE), plain)


def read_carried(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return what the compression of gradients had left over; nothing where none was used."""
    path = checkpoint.path / CARRIED_FILE
    return read_tensors(path) if path.exists() else {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
