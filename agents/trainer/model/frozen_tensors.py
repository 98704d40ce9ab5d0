"""Frozen tensors of a layer: exported as plain tensors, and imported as views of a block.

NF4 weights consist of six tensors (see `kernels.nf4`), which bitsandbytes keeps in a state of the
parameter; packed experts are buffers of a `PackedExperts`. Facts such as shapes, types and block
sizes, from which these objects can be created again, are stored with the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from agents.trainer.kernels import nf4
from agents.trainer.model.nf4_experts import PackedExperts, find_packed, is_experts

# Suffixes of the tensors of an NF4 weight, after the name of its parameter.
_PARTS = ("packed", "scale8", "code", "group", "offset", "values")
# Suffixes of a weight that was quantized only once.
_SINGLE_PARTS = ("packed", "scale", "values")

Facts = dict[str, dict[str, Any]]
"""Facts about quantized tensors, by the name of the parameter within the layer."""


def take_frozen(layer: nn.Module) -> tuple[dict[str, Tensor], Facts]:
    """Return the frozen tensors of a layer by name, and the facts of the quantized ones."""
    tensors: dict[str, Tensor] = {}
    facts: Facts = {}
    for name, module, short in _name_tensors(layer):
        parameter = getattr(module, short)
        state = getattr(parameter, "quant_state", None)
        packed = find_packed(module, short) if is_experts(module) else None
        if packed is not None:
            tensors |= dict(zip(_name_parts(name), packed.parts, strict=True))
            facts[name] = {
                "experts": list(packed.size), "dtype": _write(packed.dtype),
                "group_blocks": packed.group_blocks,
            }  # fmt: skip
        elif state is None:
            tensors[name] = parameter.data
        elif state.nested:
            parts = nf4.split_state(parameter.data, state)
            tensors |= dict(zip(_name_parts(name), (parameter.data, *parts[1:]), strict=True))
            facts[name] = _describe(state)
        else:
            single = (parameter.data, state.absmax, state.code)
            tensors |= {f"{name}:{part}": t for part, t in zip(_SINGLE_PARTS, single, strict=True)}
            facts[name] = _describe(state)
    return tensors, facts


def put_frozen(layer: nn.Module, tensors: Mapping[str, Tensor], facts: Facts) -> None:
    """Use these tensors, named as by `take_frozen`, in a layer."""
    for name, module, short in [*_name_tensors(layer)]:
        about = facts.get(name)
        if about is None:
            if name in tensors:  # otherwise it belongs to an adapter
                _put_plain(module, short, tensors[name])
        elif "experts" in about:
            parts = [tensors[part] for part in _name_parts(name)]
            _put_experts(module, short, parts, about)
        else:
            _put_quantized(module, name, short, tensors, about)


def _name_tensors(layer: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield loaded tensors: name in a layer without adapters, module, name in the module."""
    for prefix, module in layer.named_modules():
        path = [part for part in prefix.split(".") if part not in ("", "base_layer")]
        if isinstance(module, PackedExperts):
            continue  # found by its placeholder parameter
        for short in (*module._parameters, *module._buffers):
            # Buffers that are in no file, such as angles, are created by the class.
            is_loaded = short not in module._non_persistent_buffers_set
            if is_loaded and getattr(module, short) is not None:
                yield ".".join([*path, short]), module, short


def _name_parts(name: str) -> list[str]:
    return [f"{name}:{part}" for part in _PARTS]


def _write(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(state: Any) -> dict[str, Any]:
    return {
        "shape": list(state.shape),
        "dtype": _write(state.dtype),
        "quant_type": state.quant_type,
        "blocksize": state.blocksize,
        "group_blocks": state.state2.blocksize if state.nested else None,
    }


def _put_plain(module: nn.Module, short: str, tensor: Tensor) -> None:
    known = module._parameters.get(short)
    if known is None:
        tensor._is_hf_initialized = True
        module._buffers[short] = tensor
        return
    if known.device == tensor.device:
        known.data = tensor
        return
    made: Any = nn.Parameter(tensor, requires_grad=False)
    made._is_hf_initialized = True  # or Transformers would fill it with random numbers
    module._parameters[short] = made


def _put_quantized(
    module: Any, name: str, short: str, tensors: Mapping[str, Tensor], about: dict[str, Any]
) -> None:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    is_nested = about["group_blocks"] is not None
    names = _PARTS if is_nested else _SINGLE_PARTS
    parts = {part: tensors[f"{name}:{part}"] for part in names}
    nested = (
        QuantState(
            absmax=parts["group"], code=parts["code"], blocksize=about["group_blocks"],
            dtype=torch.float32,
        )
        if is_nested
        else None
    )  # fmt: skip
    state = QuantState(
        absmax=parts["scale8"] if is_nested else parts["scale"],
        shape=torch.Size(about["shape"]), code=parts["values"], blocksize=about["blocksize"],
        quant_type=about["quant_type"], dtype=getattr(torch, about["dtype"]),
        offset=parts.get("offset"), state2=nested,
    )  # fmt: skip
    known = module._parameters[short]
    if getattr(known, "quant_state", None) is not None and known.device == parts["packed"].device:
        known.data, known.quant_state = parts["packed"], state
    else:
        made: Any = Params4bit(
            parts["packed"], requires_grad=False, quant_state=state, blocksize=about["blocksize"],
            compress_statistics=is_nested, quant_type=about["quant_type"],
            quant_storage=parts["packed"].dtype, module=module, bnb_quantized=True,
        )  # fmt: skip
        made._is_hf_initialized = True
        module._parameters[short] = made
    module.quant_state = state
    nf4.refresh(module)


def _put_experts(module: nn.Module, short: str, parts: list[Tensor], about: dict[str, Any]) -> None:
    packed = find_packed(module, short)
    if packed is not None:
        packed.put(parts)
        return
    packed = PackedExperts.from_parts(
        parts, about["experts"], getattr(torch, about["dtype"]), about["group_blocks"]
    )
    placeholder: Any = packed.make_placeholder()
    placeholder._is_hf_initialized = True
    module._parameters[short] = placeholder
    module.add_module(f"{short}_nf4", packed)
