"""Forward passes over flat rows: the model's body, and its head only where a loss is computed.

The capabilities of a model class are detected once: its own attention and logits are compared with
flat passes on a few tokens and layers, and a change of one segment must not affect another. A class
that fails this, or whose rotary angles depend on the length of the input, processes one segment at
a time. A class whose logits `head` cannot compute uses its own head. Both fallbacks are slower but
correct, and `Forward.limits` reports them.

Shape letters: M tokens of the flat row, N targets (tokens whose prediction counts), H hidden
features, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agents.trainer.data.examples import Example, Segment
from agents.trainer.model import attention, fused_linear, positions, recurrent_layers, shallow
from agents.trainer.model.head import FullLogitsHead, Head, find_head
from agents.trainer.model.micro_batch import MicroBatch, build_micro_batch
from agents.trainer.model.model import TrainedModel
from agents.trainer.model.stage_ends import StageEnds

_PROBE_TOKENS = (7, 5)
# First token of an alternative first segment, which differs in every position.
_OTHER_TOKEN = 20
# Maximum difference between two computations of logits, relative to the largest logit.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
# Allowed effect of one segment on another, as a fraction of the tolerance: kernels round
# differently if experts get other numbers of tokens.
_LEAK = 0.1
# Number of compared layers if all are of one kind, so that one reads another one's output.
_COMPARED_LAYERS = 4


class Forward:
    """Runs the model over micro-batches, in the fastest way that its class supports."""

    def __init__(
        self, model: TrainedModel, device: torch.device, max_tokens: int | None = None
    ) -> None:
        """Detect the capabilities of the model's class.

        Args:
            model: the model.
            device: device of the passes.
            max_tokens: upper bound of a segment's length, in tokens; None if unknown.
        """
        self._model = model
        self._device = device
        self._causal: Any = model.module if model.lora is None else model.module.get_base_model()
        self._body = find_body(self._causal)
        self._ropes = positions.find_length_dependent(self._body, max_tokens)
        self.flat = False
        """True if several segments pass through the model at once."""
        self.limits: tuple[str, ...] = ()
        """Sentences for users about what is slower with this class than with others, and why."""
        # Inputs of the flat pass in addition to the bounds of its segments.
        self._chunk_tokens = attention.find_chunk(self._causal.config.get_text_config())
        self._needs_places = recurrent_layers.route(self._body) or self._chunk_tokens is not None
        self.head: Head | FullLogitsHead = FullLogitsHead()
        self._has_routers = shallow.has_routers(self._body)
        self._stage = model.stage
        # A rank without the last layers has no head: its output is the next rank's input.
        self._is_cut = model.stage is not None and not model.stage.is_last
        with torch.no_grad(), self._comparing():
            self._detect()

    def features(self, batch: MicroBatch) -> Tensor:
        """Return the head's input for each target (N, .).

        Hidden features with a `Head`, logits with a `FullLogitsHead`. The caller sets the dropout
        clock.
        """
        return self.outputs(batch).index_select(0, batch.predicted_at_N)

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Return the output of this rank's layers for every token (M, .); see `features`."""
        with self._autocast():
            return self._run(batch)[0] if self.flat else self._run_per_segment(batch)

    def fuse_linear(self) -> None:
        """Fuse linear layers that share their input, if results agree; see `fused_linear`."""
        batch = build_micro_batch([_build_probe()], self._device)
        with torch.no_grad():
            with self._comparing():
                expected_NH = self.features(batch)
            once = build_micro_batch([_build_probe(_PROBE_TOKENS[:1])], self._device)
            # A single segment: a class without flat passes would call each layer once per segment.
            fused_linear.fuse(self._model.module, lambda: self.features(once), self._model.stream)
            with self._comparing():
                agrees = self._agrees(lambda: self.features(batch), expected_NH)
            if not agrees:
                fused_linear.unfuse(self._model.module)
                self.limits += (
                    f"The linear layers of {type(self._causal).__name__} are computed one by one "
                    "by PEFT, which is slower: computed together they gave other numbers.",
                )

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Compute with the base weights alone and without gradients inside the block."""
        stage = nullcontext() if self._stage is None else self._stage.without_adapter()
        with torch.no_grad(), self._model.module.disable_adapter(), stage:
            yield

    def _comparing(self) -> Any:
        """Return a context for comparing two computations, in which the model is shallow."""
        return shallow.first_layers(self._body, 1 if self._has_routers else _COMPARED_LAYERS)

    def _autocast(self) -> Any:
        dtype = self._model.dtype
        return torch.autocast(self._device.type, dtype, enabled=self._model.autocast)

    def _run(self, batch: MicroBatch, **more: Any) -> Tensor:
        settings = {"use_cache": False, **more}
        if self.flat:
            segments = batch.segments
            settings["bounds_S"] = segments.bounds_S
            settings["host_bounds_S"] = segments.host_bounds_S
            settings["host_extent_2"] = segments.host_extent_2
            settings["position_ids"] = batch.position_1M
            if self._needs_places:
                places = recurrent_layers.find_places(segments.bounds_S, batch.position_1M)
                settings |= places
                if self._chunk_tokens:
                    settings["chunks"] = segments.split(self._chunk_tokens, places["place_M"])
        if self._is_cut or isinstance(self.head, Head):
            hidden_1MH = self._body(input_ids=batch.ids_1M, **settings).last_hidden_state
            if self._stage is not None and not self._stage.is_last:
                return self._stage.take_output()
            return hidden_1MH
        return self._causal(input_ids=batch.ids_1M, **settings).logits

    def _run_per_segment(self, batch: MicroBatch) -> Tensor:
        """Return the outputs of all segments (M, .), each from a separate forward pass."""
        outputs = []
        for start, stop in pairwise(batch.segments.bounds):
            # Otherwise a segment would get the angles of an earlier, longer one.
            positions.reset(self._ropes)
            stage = nullcontext() if self._stage is None else self._stage.limited_to(start, stop)
            with self._model.clock.limited_to(start, stop), stage:
                outputs.append(self._run(replace(batch, ids_1M=batch.ids_1M[:, start:stop]))[0])
        return torch.cat(outputs)

    def _detect(self) -> None:
        """Detect the capabilities of this model class; see the module's docstring."""
        batch = build_micro_batch([_build_probe()], self._device)
        name = type(self._causal).__name__
        limits = []
        with self._autocast():
            expected_MV = self._run_per_segment(batch)
            head = None if self._is_cut else find_head(self._causal, self._model.dtype)
            if head is not None:
                self.head = head
                if not self._agrees(lambda: head.logits(self._run_per_segment(batch)), expected_MV):
                    self.head = FullLogitsHead()
            if isinstance(self.head, FullLogitsHead) and not self._is_cut:
                limits.append(
                    f"{name} computes its logits itself, so they are kept for all "
                    "tokens, which takes memory."
                )
            obstacle = self._find_obstacle(batch, expected_MV)
        self.flat = obstacle is None
        if obstacle is not None:
            limits.append(
                f"Rows go through {name} one at a time, because {obstacle}: a batch takes as many "
                "passes as it has rows, so short rows train slower."
            )
        self.limits = tuple(limits)

    def _find_obstacle(self, batch: MicroBatch, expected_MV: Tensor) -> str | None:
        """Return why several segments cannot pass through this class at once, or None."""
        if self._ropes:
            return (
                "its rotary angles depend on the length of the row, and rows are longer than "
                f"{min(rope.max_tokens for rope in self._ropes):,} tokens"
            )
        if not self._causal._can_set_attn_implementation():
            return "it computes attention itself, not by Transformers' registry"
        # Restored below if packed rows fail.
        usual = self._causal.config._attn_implementation
        tuned = attention.take_temperatures(self._body)
        self._needs_places = self._needs_places or bool(tuned)
        self.flat = True
        try:
            attention.register()
            self._causal.set_attn_implementation(attention.NAME)
            obstacle = self._try_flat(batch, expected_MV)
        except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
            # Lack of memory is not a property of the class.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            obstacle = f"packed rows fail ({lines[0][:150]})"
        if obstacle is not None:
            self.flat = False
            attention.return_temperatures(tuned)
            self._causal.set_attn_implementation(usual)
        return obstacle

    def _try_flat(self, batch: MicroBatch, expected_MV: Tensor) -> str | None:
        windows: list[int | None] = []
        found_MV = self._compute_logits(batch, windows=windows)
        if not self._is_close(found_MV, expected_MV):
            return "its logits for packed rows differ from those of each row"
        other = build_micro_batch([_build_probe(first_token=_OTHER_TOKEN)], self._device)
        last = slice(batch.segments.bounds[1], batch.segments.bounds[2])
        found_MV, expected_MV = self._compute_logits(other)[last], found_MV[last]
        if not self._is_close(found_MV, expected_MV, _LEAK):
            return "its layers let a row see the row before it"
        # The probe is shorter than any window, so agreeing logits do not show that layers pass on
        # their windows; the collected windows do.
        config = self._causal.config.get_text_config()
        if any(windows) != _has_sliding_window(config, self._stage):
            return "its layers do not pass on their sliding windows"
        return None

    def _compute_logits(self, batch: MicroBatch, **more: Any) -> Tensor:
        found_M = self._run(batch, **more)[0]
        return self.head.logits(found_M) if isinstance(self.head, Head) else found_M

    def _agrees(self, compute: Callable[[], Tensor], expected_MV: Tensor) -> bool:
        try:
            found_MV = compute()
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            # Lack of memory is not a property of the class.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        return self._is_close(found_MV, expected_MV)

    def _is_close(self, found_MV: Tensor, expected_MV: Tensor, share: float = 1.0) -> bool:
        if found_MV.shape != expected_MV.shape:
            return False
        expected_MV = expected_MV.to(found_MV.dtype)
        error_M = (found_MV - expected_MV).abs().amax(-1) / expected_MV.abs().max()
        tolerance = share * _TOLERANCES[self._model.dtype]
        if self._has_routers:
            return shallow.most_agree(error_M, tolerance)
        return bool(error_M.max() <= tolerance)


def find_body(causal: Any) -> nn.Module:
    """Return the model without its head."""
    body: nn.Module = causal.base_model
    # Llama 4's text class names a body that it does not have.
    return getattr(causal, "model", body) if body is causal else body


def _has_sliding_window(config: Any, stage: StageEnds | None) -> bool:
    """Return whether layers of the model, or of its stage, attend to a sliding window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        mine = kinds if stage is None else kinds[stage.first : stage.stop]
        return "sliding_attention" in mine
    return bool(getattr(config, "sliding_window", None))


def _build_probe(lengths: tuple[int, ...] = _PROBE_TOKENS, first_token: int = 3) -> Example:
    """Return segments of these lengths; `first_token` starts the first one, 3 the others."""
    parts = []
    for place, length in enumerate(lengths):
        is_target = np.ones(length, dtype=np.bool_)
        is_target[0] = False
        first = 3 if place else first_token
        parts.append(Segment(0, np.arange(first, first + length, dtype=np.int32), is_target))
    return Example(tuple(parts))
