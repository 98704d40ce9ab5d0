"""Content of a checkpoint: trained values, optimizer state, and the position of the run.

Only safetensors and JSON, so loading a checkpoint can never run code. Every file depends on the run
alone, not on the rank or node that writes it, so copies on several nodes are equal byte by byte.
The adapter's two files have PEFT's layout. A fully trained model and its config have Transformers'
layout, in files of bounded size. Plain Transformers and PEFT load either unchanged.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agents.contract.run_layout import STATE_FILE
from agents.contract.spec import RunSpec
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.trainer.checkpoint.folder import Checkpoint
from agents.trainer.checkpoint.sharded_files import (
    cut_long,
    find_shards,
    join_cut,
    read_shapes,
    read_shards,
    write_shards,
)
from agents.trainer.model.experts import list_adapted, name_targets_for_peft
from agents.trainer.model.model import TrainedModel
from agents.trainer.optim.flat_parameters import Layout
from agents.trainer.optim.loss_scale import LossScale
from agents.trainer.parallel.strategy import Strategy, TrainedState

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FULL_STEM = "model"
FULL_CONFIG = "config.json"
OPTIMIZER_STEM = "optimizer"
CARRIED_FILE = "carried.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Position of a run: everything but the tensors that its next step depends on."""

    step: int
    total_steps: int
    spec: RunSpec
    devices: tuple[tuple[str, str], ...]
    """Node and device of each rank."""
    shares: tuple[float, ...]
    micro_tokens: tuple[int, ...]
    """Maximum micro-batch of each rank, in tokens."""
    num_recomputed: tuple[int, ...]
    """Number of layers of each rank that recompute their activations."""
    num_moved: tuple[int, ...] = ()
    """Number of layers of each rank that offload their activations; empty in older files."""
    is_repeating: tuple[bool, ...] = ()
    """True for ranks that pad micro-batches to repeating shapes; empty in older files."""
    tokens_seen: int
    plain_template: bool
    """True if the tokenizer had no chat template, so the merged model gets the plain one."""
    loss_scale: LossScale = field(default_factory=LossScale)
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Values of the optimizer's state that are not tensors."""
    layers: tuple[tuple[int, int], ...] = ()
    """First layer of each rank and the one after its last; empty if all ranks had all layers."""
    layout: Layout = "sorted"
    """Order of the parameters in the optimizer's tensors; the default is that of older files."""
    text_rules: int = 1
    """Version of `tokens.TEXT_RULES` for the rows; the default is that of older files."""


class HostCopy:
    """Trained values and optimizer state in host memory, ready to be written.

    The first copy allocates the buffers, pinned if the state is on a GPU, and all later copies
    reuse them: the host holds the state once.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        """Parameters by name."""
        self.optimizer: dict[str, Tensor] = {}
        self.plain: dict[str, Any] = {}
        """Values of the optimizer's state that are not tensors."""
        self.carried: dict[str, Tensor] = {}
        """Carried error of gradient compression."""
        self._buffers: dict[str, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Size of the copy, in bytes; 0 before the first one."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, state: TrainedState, changed: torch.cuda.Event | None = None) -> None:
        """Copy the current state; return when all of it has arrived.

        Args:
            state: state to copy.
            changed: event of the state's last change. The copy waits only for it, since other work
                on the GPU may never end. None waits for all queued work.
        """
        if changed is None:
            self._take(state)
            if state.parameters.values.is_cuda:
                torch.cuda.synchronize(state.parameters.values.device)
            return
        # A separate stream: the compute stream may be blocked behind a sum that never ends.
        stream = torch.cuda.Stream(state.parameters.values.device)
        stream.wait_event(changed)
        with torch.cuda.stream(stream):
            self._take(state)
        stream.synchronize()

    def _take(self, state: TrainedState) -> None:
        flat = state.parameters
        # One copy of the whole buffer instead of hundreds of small ones.
        whole = self._fetch("", flat.values)
        self.values, start = {}, 0
        for name, view in flat.views.items():
            self.values[name] = whole[start : start + view.numel()].view_as(view)
            start += view.numel()
        self.plain = state.plain
        self.optimizer = {
            name: self._fetch(name, tensor) for name, tensor in state.optimizer.items()
        }
        self.carried = {
            name: self._fetch(f"carried/{name}", tensor) for name, tensor in state.carried.items()
        }

    def _fetch(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = _allocate(tensor)
        # Only queued; `take` waits once for all copies.
        return buffer.copy_(tensor.detach(), non_blocking=True)


def _allocate(tensor: Tensor) -> Tensor:
    """Return host memory for a copy, pinned if the tensor is on a GPU and the system allows it."""
    if tensor.is_cuda:
        # A limit on locked memory (ulimit -l) only slows the copies.
        with contextlib.suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def write_state(folder: Path, *, model: TrainedModel, copy: HostCopy, point: ResumePoint) -> None:
    """Write every file of a checkpoint except its manifest."""
    metadata = {"format": "pt"}
    write_shards(cut_long(copy.optimizer), folder, OPTIMIZER_STEM)
    if copy.carried:
        save_file(copy.carried, folder / CARRIED_FILE, metadata=metadata)
    if model.lora is not None:
        save_file(copy.values, folder / ADAPTER_FILE, metadata=metadata)
        _write_json(folder / ADAPTER_CONFIG, adapter_config(model, point.spec))
    else:
        write_shards(copy.values, folder, FULL_STEM)
        _write_json(folder / FULL_CONFIG, full_config(model))
    _write_json(folder / STATE_FILE, to_wire(point))


def adapter_config(model: TrainedModel, spec: RunSpec) -> dict[str, Any]:
    """Return PEFT's config of the adapter, the same on every node."""
    assert model.lora is not None
    plain = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in model.lora.to_dict().items()
    }
    # A stage has only some layers, but writes the config of the whole adapter.
    adapted = model.stage.adapted if model.stage is not None else list_adapted(model.module)
    plain |= name_targets_for_peft(model.lora, model.module, adapted)
    # PEFT writes the path on this node here, and sets in memory order: copies of the checkpoint on
    # two nodes would differ.
    plain["base_model_name_or_path"] = spec.model
    # PEFT itself saves it so: a loaded adapter is frozen unless asked otherwise.
    plain["inference_mode"] = True
    return plain


def full_config(model: TrainedModel) -> dict[str, Any]:
    """Return Transformers' config of the model, the same on every node."""
    config: Any = model.module.config
    plain: dict[str, Any] = json.loads(config.to_json_string())
    # The path differs between nodes, and copies must be equal.
    plain.pop("_name_or_path", None)
    return plain


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="ascii")


def read_resume_point(checkpoint: Checkpoint) -> ResumePoint:
    """Return the saved position of the run.

    Raises:
        ExpectedError: the file is damaged or of an unknown version.
    """
    try:
        return from_wire(ResumePoint, json.loads((checkpoint.path / STATE_FILE).read_bytes()))
    except (OSError, ValueError, WireError) as error:
        raise ExpectedError(
            f"{checkpoint.path / STATE_FILE} cannot be read: {error}.",
            "Resume from another checkpoint: rackless checkpoints lists them",
        ) from error


def load_state(checkpoint: Checkpoint, strategy: Strategy) -> None:
    """Restore the checkpoint's state in the strategy, one tensor at a time.

    Raises:
        ExpectedError: it belongs to other parameters.
    """
    folder = checkpoint.path
    files = find_shards(folder, FULL_STEM) or [folder / ADAPTER_FILE]
    shapes = strategy.shapes
    found = read_shapes(files)
    if shapes != found:
        # One example is enough: with another adapter all names differ.
        odd = sorted(set(shapes.items()) ^ set(found.items()))[0]
        raise ExpectedError(
            f"{checkpoint.path} holds other parameters than this run trains, such as {odd[0]}.",
            "Resume with the model and the adapter settings of that run",
        )
    strategy.import_state(
        read_shards(files),
        join_cut(read_shards(find_shards(folder, OPTIMIZER_STEM))),
        read_resume_point(checkpoint).optimizer,
        _read_carried(checkpoint),
    )


def _read_carried(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the carried error of gradient compression; empty without compression."""
    path = checkpoint.path / CARRIED_FILE
    return dict(read_shards([path])) if path.exists() else {}
