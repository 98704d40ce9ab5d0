"""Forward passes over flat rows: the model's body, and its head only where a loss is computed.

The capabilities of a model class are detected once, by comparing its own attention and logits with
ours on a few tokens. One segment at a time goes through a class whose attention does not use
Transformers' registry, that carries state from token to token, or whose rotary angles depend on
the length of the input. A class whose logits `head` cannot compute uses its own head. Both
fallbacks are slower and as correct.

Shape letters: M tokens of the flat row, N targets (tokens whose prediction counts), H hidden
features, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agents.trainer.data.examples import Example, Segment
from agents.trainer.model import attention, fused_linear, positions
from agents.trainer.model.head import FullLogitsHead, Head, find_head
from agents.trainer.model.micro_batch import MicroBatch, build_micro_batch
from agents.trainer.model.model import TrainedModel

_PROBE_TOKENS = (7, 5)
# Maximum difference between two ways to compute logits, relative to the largest logit.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


class Forward:
    """Runs the model over micro-batches, in the fastest way that its class supports."""

    def __init__(
        self, model: TrainedModel, device: torch.device, max_tokens: int | None = None
    ) -> None:
        """Detect what the model's class supports.

        Args:
            model: The model.
            device: Device of the passes.
            max_tokens: Length of the longest segment that will occur; None if unknown.
        """
        self._model = model
        self._device = device
        self._causal: Any = model.module if model.lora is None else model.module.get_base_model()
        self._body: nn.Module = self._causal.base_model
        self._ropes = positions.find_length_dependent(self._body, max_tokens)
        self.flat = False
        """Whether several segments go through the model in one pass."""
        self.head: Head | FullLogitsHead = FullLogitsHead()
        with torch.no_grad():
            self._detect()

    def features(self, batch: MicroBatch) -> Tensor:
        """Return the head's input for each target (N, .).

        Hidden features with a `Head`, logits with a `FullLogitsHead`. The caller sets the dropout
        clock.
        """
        with self._autocast():
            if self.flat:
                return self._run(batch)[0].index_select(0, batch.predicted_at_N)
            return self._run_per_segment(batch).index_select(0, batch.predicted_at_N)

    def fuse_linear(self) -> None:
        """Fuse linear layers that share their input, if results agree; see `fused_linear`."""
        batch = build_micro_batch([_build_probe()], self._device)
        with torch.no_grad():
            expected_NH = self.features(batch)
            once = build_micro_batch([_build_probe(_PROBE_TOKENS[:1])], self._device)
            # A single segment: a class that is not flat would call each layer once per segment.
            fused_linear.fuse(self._model.module, lambda: self.features(once))
            if not self._agrees(lambda: self.features(batch), expected_NH):
                fused_linear.unfuse(self._model.module)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Compute with the base weights alone and without gradients inside the block."""
        with torch.no_grad(), self._model.module.disable_adapter():
            yield

    def _autocast(self) -> Any:
        dtype = self._model.dtype
        return torch.autocast(self._device.type, dtype, enabled=self._model.autocast)

    def _run(self, batch: MicroBatch, **more: Any) -> Tensor:
        settings = {"use_cache": False, **more}
        if self.flat:
            settings["bounds_S"] = batch.segments.bounds_S
            settings["host_bounds_S"] = batch.segments.host_bounds_S
            settings["host_extent_2"] = batch.segments.host_extent_2
            settings["position_ids"] = batch.position_1M
        if isinstance(self.head, Head):
            return self._body(input_ids=batch.ids_1M, **settings).last_hidden_state
        return self._causal(input_ids=batch.ids_1M, **settings).logits

    def _run_per_segment(self, batch: MicroBatch) -> Tensor:
        """Return the outputs of all segments (M, .), each from a forward pass of its own."""
        outputs = []
        for start, stop in pairwise(batch.segments.bounds):
            # Otherwise a segment would get the angles of a longer one before it.
            positions.reset(self._ropes)
            with self._model.clock.limited_to(start, stop):
                outputs.append(self._run(replace(batch, ids_1M=batch.ids_1M[:, start:stop]))[0])
        return torch.cat(outputs)

    def _detect(self) -> None:
        """Detect what this model class supports; see the module's docstring."""
        batch = build_micro_batch([_build_probe()], self._device)
        with self._autocast():
            expected_MV = self._run_per_segment(batch)
            head = find_head(self._causal, self._model.dtype)
            if head is not None:
                self.head = head
                if not self._agrees(lambda: head.logits(self._run_per_segment(batch)), expected_MV):
                    self.head = FullLogitsHead()
            self.flat = self._can_be_flat(batch, expected_MV)

    def _can_be_flat(self, batch: MicroBatch, expected_MV: Tensor) -> bool:
        config = self._causal.config
        usual = config._attn_implementation
        if self._ropes or not self._can_route_attention():
            return False
        attention.register()
        self._causal.set_attn_implementation(attention.NAME)
        self.flat = True
        windows: list[int | None] = []
        # The probe is shorter than any window, so agreeing logits do not show that the layers pass
        # theirs on; the collected windows do.
        if self._agrees(lambda: self._try_flat(batch, windows), expected_MV) and (
            any(windows) == _has_sliding_window(config.get_text_config())
        ):
            return True
        self.flat = False
        self._causal.set_attn_implementation(usual)
        return False

    def _try_flat(self, batch: MicroBatch, windows: list[int | None]) -> Tensor:
        found_M = self._run(batch, windows=windows)[0]
        return self.head.logits(found_M) if isinstance(self.head, Head) else found_M

    def _can_route_attention(self) -> bool:
        config = self._causal.config.get_text_config()
        # Other types, such as linear attention, carry state across the bounds of segments.
        kinds = set(getattr(config, "layer_types", None) or ())
        return kinds <= {"full_attention", "sliding_attention"} and bool(
            self._causal._can_set_attn_implementation()
        )

    def _agrees(self, compute: Callable[[], Tensor], expected_MV: Tensor) -> bool:
        try:
            found_MV = compute()
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            # Lack of memory says nothing about the class.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        if found_MV.shape != expected_MV.shape:
            return False
        expected_MV = expected_MV.to(found_MV.dtype)
        error_of = (found_MV - expected_MV).abs().max() / expected_MV.abs().max()
        return bool(error_of <= _TOLERANCES[self._model.dtype])


def _has_sliding_window(config: Any) -> bool:
    """Return whether some layers attend to a sliding window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return bool(getattr(config, "sliding_window", None))


def _build_probe(lengths: tuple[int, ...] = _PROBE_TOKENS) -> Example:
    parts = []
    for length in lengths:
        is_target = np.ones(length, dtype=np.bool_)
        is_target[0] = False
        parts.append(Segment(0, np.arange(3, 3 + length, dtype=np.int32), is_target))
    return Example(tuple(parts))
