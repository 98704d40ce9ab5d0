"""Modes of the decoder layers: compiled or not, and where activations are kept.

A layer keeps its activations on the GPU until the backward pass (mode "keep"), offloads them to
host memory ("move"; see `activation_offload`), or recomputes them from its input ("recompute").
Keeping is fastest. Offloading costs bus bandwidth and recomputing a third of the layer's time, so
no more layers do either than memory requires. Offloaded layers are spread evenly, so that their
copies overlap with the layers between them. Of the others the first ones recompute, because their
activations would be held the longest.

One compiled function serves all layers of a kind and any number of tokens. A layer that recomputes
is compiled together with its second forward pass, from which the compiler removes what no gradient
needs, such as the last product of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.contract.layer_plan import LayerPlan, Mode
from agents.trainer.execution.activation_offload import OffloadedBatch, Offloader
from agents.trainer.kernels import nf4
from agents.trainer.model import shared_states
from agents.trainer.model.model import TrainedModel
from agents.trainer.model.shared_states import call

# Measured for Llama-2-7B with NF4 weights on an H200, rows of 2,048 tokens, two and one at once:
# 17,510 instead of 12,742 tokens/s, 14,975 instead of 7,910; activations 13.0 instead of 18.9 GiB.
_COST_OF_EAGER = "1.4 to 1.9 times the time and half as much memory again for activations"


class LayerStack:
    """The decoder layers of a model.

    Args:
        model: owner of the layers.
        compiled: True to compile them; see `compiling` for the requirements.
        offloader: offloads activations; None to keep or recompute all of them.
        make_offloader: creates one for `offload_inputs`; None if offloading is impossible.
        warn: called with a message and a hint if compilation fails.
    """

    def __init__(
        self,
        model: TrainedModel,
        *,
        compiled: bool = False,
        offloader: Offloader | None = None,
        make_offloader: Callable[[], Offloader] | None = None,
        warn: Callable[[str, str], None] = lambda message, hint: None,
    ) -> None:
        self._warn = warn
        self._make_offloader = make_offloader
        self._clock = model.clock
        self.stream = model.stream
        self._layers = [
            module
            for module in model.module.modules()
            if isinstance(module, GradientCheckpointingLayer)
        ]
        # Bound before any replacement, so that a plan can restore them.
        self._plain = [layer.forward for layer in self._layers]
        self._norms = [*_find_norms(model.module, self._layers)]
        self._modes: list[Mode] = []
        self._dequantized: list[nn.Module] = []
        # Reserved memory for the largest packed weight: repacking frees other memory and must not
        # fail.
        self._repack_buffer: Tensor | None = None
        self.offloader = offloader
        self.compiled = compiled
        # fullgraph: a graph break raises, so that `stop_compiling` can report it.
        self._compiled = torch.compile(_compute, fullgraph=True)
        self._compiled_recompute = torch.compile(_compute_recomputing, fullgraph=True)
        self.plan = LayerPlan()
        self.set(LayerPlan())

    @property
    def num_layers(self) -> int:
        """Number of decoder layers; 0 if the model's class does not support layer modes."""
        return len(self._layers)

    def set(self, plan: LayerPlan) -> None:
        """Apply a plan from the next micro-batch on."""
        # Not transformers' own gradient checkpointing: it works only in training mode, which would
        # enable the base model's dropout.
        num_recomputed = min(plan.num_recomputed, self.num_layers)
        num_moved = min(plan.num_moved, self.num_layers - num_recomputed)
        if self.offloader is None:
            num_moved = 0
        self.plan = LayerPlan(num_recomputed=num_recomputed, num_moved=num_moved)
        self._modes = self.plan.modes(self.num_layers)
        if self.offloader is not None:
            self.offloader.saves_memory = self.plan.is_sparse(self.num_layers)
        for place, layer in enumerate(self._layers):
            plain = not self.compiled and self._modes[place] == "keep"
            layer.forward = self._plain[place] if plain else partial(self._run, place)
        for norm in self._norms:
            norm.__dict__.pop("forward", None)
            if self.compiled:
                norm.forward = partial(self._run_norm, norm)

    @property
    def can_fill(self) -> bool:
        """True if spare memory can make the layers faster; see `fill`."""
        return self.stream is not None or self.can_dequantize

    def fill(self, max_bytes: float) -> None:
        """Use up to `max_bytes` of GPU memory for weights, replacing the previous use.

        Streamed layers stay on the device, if the model has any, since copying costs more than
        dequantizing. Otherwise 4-bit weights are kept dequantized.

        Raises:
            ExpectedError: a streamed layer cannot be read.
        """
        if self.stream is not None:
            self.stream.keep_resident(max_bytes)
        else:
            self.dequantize(max_bytes)

    @property
    def filled_bytes(self) -> int:
        """GPU memory that `fill` uses, in bytes."""
        if self.stream is not None:
            return self.stream.resident_bytes
        return self.dequantized_bytes

    def empty(self) -> None:
        """Free the memory that `fill` uses."""
        if self.stream is not None:
            if self.stream.num_resident:
                self.stream.keep_resident(0)
        else:
            self.drop_dequantized()

    @property
    def can_dequantize(self) -> bool:
        """True if the layers have 4-bit weights that can be kept dequantized."""
        # Streamed weights share buffers, so they cannot be kept.
        return self.stream is None and any(True for _ in _find_packed(self._layers))

    @property
    def dequantized_bytes(self) -> int:
        """Extra GPU memory of weights that are kept dequantized, in bytes."""
        return sum(nf4.count_extra_bytes(linear) for linear in self._dequantized)

    @property
    def dequantizable_bytes(self) -> int:
        """Extra GPU memory that the remaining 4-bit weights would take dequantized, in bytes."""
        if not self.can_dequantize:
            return 0
        all_bytes = sum(nf4.count_extra_bytes(linear) for linear in _find_packed(self._layers))
        return all_bytes - self.dequantized_bytes

    def dequantize(self, max_bytes: float) -> None:
        """Keep 4-bit weights dequantized in up to `max_bytes` of extra memory.

        The others are dequantized in every pass, with bit-equal results. If less memory is
        available, fewer weights are kept.
        """
        self.drop_dequantized()
        # Recomputing layers first: they read their weights three times per step.
        order = sorted(range(self.num_layers), key=lambda i: self._modes[i] != "recompute")
        linears = [*_find_packed(self._layers[place] for place in order)]
        with suppress(torch.OutOfMemoryError):
            self._repack_buffer = nf4.allocate_repack_buffer(linears)
            for linear in linears:
                max_bytes -= nf4.count_extra_bytes(linear)
                if max_bytes < 0:
                    break
                nf4.keep_dequantized(linear)
                self._dequantized.append(linear)
        if not self._dequantized:
            self._repack_buffer = None
        # The gaps of packed weights may fit nothing else: return them to the driver.
        torch.cuda.empty_cache()

    def drop_dequantized(self) -> None:
        """Drop all dequantized weights."""
        self._repack_buffer = None
        for linear in self._dequantized:
            nf4.repack(linear)
        self._dequantized = []

    def recompute_more(self) -> bool:
        """Recompute in more layers: a quarter, half, then all; return False if all do already."""
        if self.plan.num_recomputed >= self.num_layers:
            return False
        quarter = -(-self.num_layers // 4)
        more = max(quarter, 2 * self.plan.num_recomputed)
        self.set(LayerPlan(num_recomputed=more, num_moved=self.plan.num_moved))
        return True

    def offload_inputs(self) -> bool:
        """Offload the inputs of recomputing layers from the next pass on.

        Returns:
            True if they were not offloaded before and host memory is available.
        """
        if self.offloader is not None or self._make_offloader is None:
            return False
        self.offloader = self._make_offloader()
        self.set(self.plan)
        return self.offloader.arena.capacity_bytes > 0

    def stop_compiling(self, error: Exception) -> None:
        """Run the layers uncompiled from now on, and warn."""
        self.compiled = False
        self.set(self.plan)
        kinds = sorted({type(layer).__name__ for layer in self._layers})
        lines = str(error).strip().splitlines()
        # Some of these errors have a heading in their first line and the reason in the second.
        first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:200]
        self._warn(
            f"{' and '.join(kinds)} cannot be compiled here ({type(error).__name__}: {first}). "
            f"These layers run uncompiled, which takes {_COST_OF_EAGER}.",
            "",
        )

    def begin(self) -> None:
        """Prepare for a micro-batch."""
        if self.offloader is not None:
            self.offloader.begin()

    @property
    def offloaded(self) -> OffloadedBatch | None:
        """Offloaded tensors of the current micro-batch; None without an offloader."""
        return None if self.offloader is None else self.offloader.current

    def start_backward(self, batch: OffloadedBatch | None = None) -> None:
        """Prepare for the backward pass of the current micro-batch, or of an earlier one."""
        if self.offloader is not None:
            self.offloader.start_backward(batch)

    def drop(self, batch: OffloadedBatch | None) -> None:
        """Release the offloaded tensors of a micro-batch, after its backward pass or an error."""
        if self.offloader is not None and batch is not None:
            self.offloader.drop(batch)

    def end(self) -> None:
        """Release all offloaded tensors, also after an error."""
        if self.offloader is not None:
            self.offloader.release()

    def _run(self, place: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, mode = self._layers[place], self._modes[place]
        if not torch.is_grad_enabled():
            mode = "keep"
        kwargs, shared = shared_states.take(kwargs)
        others = [*_tensors((args, kwargs))]
        if self.compiled:
            tokens = self._clock.tokens_BT1
            for tensor in (hidden, *others, *(() if tokens is None else (tokens,))):
                # Dimension of the tokens. Of four dimensions: parallel streams (., 1, M, .) and
                # heads (1, ., M, .).
                _mark(tensor, (0, 0, 1, 1, 2)[tensor.dim()])
        with self._offloading(mode, others):
            try:
                output, written = self._choose(place, mode)(layer, hidden, args, kwargs)
            except TorchDynamoException as error:
                self._fall_back_to_eager(error)
                output, written = self._choose(place, mode)(layer, hidden, args, kwargs)
        if shared is not None:
            shared.update(written)
        return output

    def _run_norm(self, norm: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the norm after the last layer compiled: uncompiled it makes a dozen memory passes."""
        if not torch.is_grad_enabled():
            return type(norm).forward(norm, hidden, *args, **kwargs)
        _mark(hidden, 1)
        try:
            return self._compiled(norm, hidden, args, kwargs)[0]
        except TorchDynamoException as error:
            self._fall_back_to_eager(error)
            return norm(hidden, *args, **kwargs)

    def _fall_back_to_eager(self, error: TorchDynamoException) -> None:
        """Stop compiling, or re-raise an error that compilation did not cause."""
        # Dynamo wraps errors of the compiled code: a shortage of memory is handled by the executor.
        if not self.compiled or "out of memory" in str(error):
            raise error
        self.stop_compiling(error)

    def _choose(self, place: int, mode: Mode) -> Callable[..., Any]:
        if self.compiled:
            return self._compiled_recompute if mode == "recompute" else self._compiled
        plain = self._plain[place]
        if mode != "recompute":
            return lambda _, hidden, args, kwargs: call(plain, hidden, args, kwargs)
        return partial(self._recompute, plain)

    def _recompute(
        self, plain: Callable[..., Any], _: Any, hidden: Tensor, args: Any, kwargs: Any
    ) -> Any:
        return checkpoint(
            partial(call, plain),
            hidden,
            args,
            kwargs,
            use_reentrant=False,
            # Dropout uses no random stream but keys of the clock, so there is no state to preserve.
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._clock.repeated()),
        )

    def _offloading(self, mode: Mode, others: list[Tensor]) -> AbstractContextManager[None]:
        if self.offloader is None or mode == "keep":
            return nullcontext()
        tokens = self._clock.tokens_BT1
        shared = others if tokens is None else [*others, tokens]
        # A layer that recomputes saves only its input, which is offloaded.
        return self.offloader.offloading(shared, is_whole=mode == "move")


def _find_norms(model: nn.Module, layers: list[Any]) -> Iterator[Any]:
    """Yield norms outside the decoder layers whose class also occurs inside them."""
    inside = {module for layer in layers for module in layer.modules()}
    kinds = {type(module) for module in inside}
    for module in model.modules():
        is_norm = type(module).__name__.endswith("Norm") and "forward" not in vars(module)
        if is_norm and module not in inside and type(module) in kinds:
            yield module


def _find_packed(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the linear layers with 4-bit weights."""
    for layer in layers:
        yield from filter(nf4.is_registered, layer.modules())


def _compute(layer: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: Any) -> Any:
    return call(partial(type(layer).forward, layer), hidden, args, kwargs)


def _compute_recomputing(
    layer: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: Any
) -> Any:
    def body(hidden: Tensor) -> Any:
        return _compute(layer, hidden, args, kwargs)

    return checkpoint(body, hidden, use_reentrant=False, preserve_rng_state=False)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _mark(tensor: Tensor, dim: int) -> None:
    """Mark a dimension of tokens or segments as dynamic for the compiler.

    A size of 1 stays static, since Dynamo specializes on it anyway.
    """
    if tensor.dim() and tensor.shape[dim] > 1:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
