"""Quantize the experts of a mixture to NF4 while the model loads.

Transformers keeps the experts of a layer as one parameter (E, O, I) per matrix, and bitsandbytes
quantizes only linear layers: a model of 30 billion weights would stay in 16 bits. The quantizer
here extends Transformers' bitsandbytes quantizer to these parameters. They are quantized one by one
as their files are read, so at most one of them is in memory in 16 bits. bitsandbytes computes the
numbers (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

The parameter itself stays, because PEFT and Transformers ask for its shape. It holds a single
not-a-number in memory, so that code that multiplies with it cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from agents.errors import ExpectedError
from agents.trainer.kernels import nf4
from agents.trainer.model.llama4_experts import is_llama4_experts

_METHOD = "rackless_nf4"
# bitsandbytes counts the weights of one tensor in 32 bits.
_MAX_WEIGHTS = 2**31 - 1


class PackedExperts(nn.Module):
    """NF4 weights of one matrix of all experts of a layer."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Quantize.

        Args:
            weight: weights of any shape, on their final device.
            dtype: type of the dequantized weights.
        """
        super().__init__()
        from bitsandbytes import functional

        packed, state = functional.quantize_4bit(
            weight.contiguous(), quant_type="nf4", compress_statistics=True
        )
        self._take(nf4.split_state(packed, state), weight.shape, dtype, state.state2.blocksize)

    @classmethod
    def from_parts(
        cls, parts: Sequence[Tensor], size: Sequence[int], dtype: torch.dtype, group_blocks: int
    ) -> PackedExperts:
        """Return weights that were quantized before; see `nf4.dequantize_parts`."""
        packed = cls.__new__(cls)
        nn.Module.__init__(packed)
        packed._take(parts, size, dtype, group_blocks)
        return packed

    def _take(
        self, parts: Sequence[Tensor], size: Sequence[int], dtype: torch.dtype, group_blocks: int
    ) -> None:
        self.size = tuple(size)
        self.dtype = dtype
        self.group_blocks = int(group_blocks)
        self._names = [f"part_{number}" for number in range(len(parts))]
        for name, part in zip(self._names, parts, strict=True):
            # Persistent, since Transformers recreates other buffers after loading a model.
            self.register_buffer(name, part)

    def put(self, parts: Sequence[Tensor]) -> None:
        """Replace the tensors of these weights, in the order of `parts`."""
        for name, part in zip(self._names, parts, strict=True):
            setattr(self, name, part)

    @property
    def parts(self) -> list[Tensor]:
        """Tensors in the order of `nf4.dequantize_parts`."""
        return [getattr(self, name) for name in self._names]

    @property
    def nbytes(self) -> int:
        """Memory of the weights and their constants, in bytes."""
        return sum(part.nbytes for part in self.parts)

    def dequantize(self) -> Tensor:
        """Return the weights in their shape."""
        return nf4.dequantize_parts(self.parts, self.size, self.dtype, self.group_blocks)

    def make_placeholder(self) -> nn.Parameter:
        """Return a parameter of the weights' shape that takes no memory; see the module."""
        # An expanded scalar has the whole shape but the memory of one number.
        nothing = torch.full((), torch.nan, dtype=self.dtype, device=self.parts[0].device)
        return nn.Parameter(nothing.expand(self.size), requires_grad=False)


def is_experts(module: Any) -> bool:
    """Return whether a module holds all experts of a layer in a supported form.

    These are the classes of Transformers' interface, and Llama 4's. A norm after each expert needs
    separate results, which grouped products do not keep.
    """
    is_known = hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")
    is_known = is_known or is_llama4_experts(module)
    return is_known and not getattr(module, "has_post_expert_norm", False)


def name_matrices(module: Any) -> tuple[str, str]:
    """Return the names of the parameters of a module of experts: first and second product."""
    has_gate = getattr(module, "has_gate", True)
    return ("gate_up_proj" if has_gate else "up_proj"), "down_proj"


def find_packed(module: Any, name: str) -> PackedExperts | None:
    """Return the NF4 weights of a parameter of a module of experts, or None in 16 bits."""
    packed = getattr(module, f"{name}_nf4", None)
    return packed if isinstance(packed, PackedExperts) else None


def find_routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the routers of a model with their names: siblings of a module of experts."""
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        if any(is_experts(child) for child in children.values()):
            for short, child in children.items():
                # Classes share no base for routers: they are recognized by their names.
                if "Router" in type(child).__name__ or short in ("gate", "router"):
                    yield f"{name}.{short}" if name else short, child


@register_quantization_config(_METHOD)
class ExpertsNf4Config(BitsAndBytesConfig):
    """Settings of bitsandbytes for a model whose experts are quantized, too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.quant_method = _METHOD


@register_quantizer(_METHOD)
class ExpertsNf4Quantizer(Bnb4BitHfQuantizer):
    """Transformers' quantizer for bitsandbytes, extended by packed experts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packed: dict[str, PackedExperts] = {}

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is quantized while it loads."""
        above, _, name = param_name.rpartition(".")
        module = model.get_submodule(above)
        if is_experts(module) and name in name_matrices(module):
            return True
        return bool(super().param_needs_quantization(model, param_name, **kwargs))

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantizes one parameter."""
        return _Quantize(self, super().get_quantize_ops())

    def get_modules_to_not_convert(self, model: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Return the linear layers that are not quantized: those of bitsandbytes, and routers.

        A router decides by small differences, so it computes as its class does.
        """
        kept = super().get_modules_to_not_convert(model, *args, **kwargs)
        return [*kept, *(name for name, _ in find_routers(model))]

    def attach_packed(self, model: Any) -> None:
        """Attach their weights to the experts that were quantized since the last call."""
        for full_name, packed in self.packed.items():
            above, _, name = full_name.rpartition(".")
            model.get_submodule(above).add_module(f"{name}_nf4", packed)
        self.packed.clear()

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.attach_packed(model)
        return super()._process_model_after_weight_loading(model, **kwargs)


class _Quantize(ConversionOps):  # type: ignore[misc, unused-ignore]
    def __init__(self, quantizer: ExpertsNf4Quantizer, of_linear: ConversionOps) -> None:
        self._quantizer = quantizer
        self._of_linear = of_linear

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the parameters of linear layers quantized, and placeholders of experts."""
        model = kwargs["model"]
        converted: dict[str, Any] = {}
        for name in list(input_dict):
            # Popped, so that the 16-bit weight is freed as soon as it is packed.
            value = input_dict.pop(name)
            above, _, _ = name.rpartition(".")
            if not is_experts(model.get_submodule(above)):
                converted |= self._of_linear.convert({name: value}, **kwargs)
                continue
            packed = self._pack(name, value[0] if isinstance(value, list) else value)
            self._quantizer.packed[name] = packed
            converted[name] = packed.make_placeholder()
        return converted

    def _pack(self, name: str, weight: Tensor) -> PackedExperts:
        if weight.numel() > _MAX_WEIGHTS:
            raise ExpectedError(
                f"{name} has {weight.numel():,} weights; at most {_MAX_WEIGHTS:,} can be "
                "quantized as one tensor.",
                "Use a smaller model",
            )
        dtype = self._quantizer.quantization_config.bnb_4bit_compute_dtype
        return PackedExperts(weight, dtype)
