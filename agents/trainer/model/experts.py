"""Compute the experts of a mixture by grouped products, with adapters and NF4 weights.

Registered with Transformers' interface for experts, so no model is forked: classes keep their
router, their activation and their shared experts. Llama 4 does not use it (`llama4_experts`).
Routing weights are applied before the second product instead of after it, which gives the same sum
and keeps its results out of memory.

An adapter on experts has separate matrices for each expert, in PEFT's layout for
`target_parameters`, so PEFT can load the trained adapter. PEFT itself would form weight + update
for all experts in each pass.

Shape letters: T tokens, K experts of a token, S = T * K rows sorted by expert, E experts, H hidden
features, O outputs of the first product.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from agents.trainer.kernels.grouped_linear_op import GroupedShape, multiply, reorder, sort_by_expert
from agents.trainer.model import nf4_experts
from agents.trainer.model.llama4_experts import apply_gate, is_llama4_experts, turn_adapter

NAME = "rackless"
_ADAPTER = "default"
# Names of linear layers that PEFT treats as one matrix of experts.
_FUSED = ("gate_proj", "up_proj")


def forward_experts(
    module: Any, hidden_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts (T, H).

    Args:
        module: module of experts; see `is_experts`.
        hidden_TH: tokens.
        top_k_index: experts of each token (T, K).
        top_k_weights: their weights (T, K).
    """
    first, second = nf4_experts.name_matrices(module)
    is_llama4, has_bias = is_llama4_experts(module), getattr(module, "has_bias", False)
    route = sort_by_expert(top_k_index, module.num_experts)
    top_k = top_k_index.shape[-1]
    dtype = _compute_dtype(module, hidden_TH)
    x_TH = hidden_TH.to(dtype)
    y_SO = _multiply(module, first, x_TH, route, top_k, gathers=True)
    if has_bias:
        expert_S = top_k_index.reshape(-1).index_select(0, route[0])
        y_SO = y_SO + F.embedding(expert_S, getattr(module, f"{first}_bias")).to(dtype)
    weight_S = reorder(top_k_weights.reshape(-1), route[0], route[1])[:, None].to(dtype)
    if is_llama4:
        z_SI = apply_gate(module, y_SO * weight_S)
    elif module.has_gate:
        z_SI = module._apply_gate(y_SO) * weight_S
    else:
        z_SI = module.act_fn(y_SO) * weight_S
    out_TH = _multiply(module, second, z_SI.to(dtype), route, top_k, gathers=False)
    if has_bias:
        # Weighted biases of each token, as a product with a narrow matrix instead of K copies.
        one_hot_TKE = F.one_hot(top_k_index, module.num_experts).to(dtype)
        share_TE = (one_hot_TKE * top_k_weights[..., None].to(dtype)).sum(dim=1)
        out_TH = out_TH + share_TE @ getattr(module, f"{second}_bias").to(dtype)
    return out_TH.to(hidden_TH.dtype)


def _compute_dtype(module: Any, hidden_TH: Tensor) -> torch.dtype:
    kind = hidden_TH.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    dtype: torch.dtype = getattr(module, nf4_experts.name_matrices(module)[1]).dtype
    return dtype


def _multiply(
    module: Any, name: str, x: Tensor, route: list[Tensor], top_k: int, *, gathers: bool
) -> Tensor:
    weight, packed = getattr(module, name), nf4_experts.find_packed(module, name)
    is_llama4 = is_llama4_experts(module)
    is_transposed = is_llama4 or module.is_transposed
    size = weight.shape[1:] if is_transposed else weight.shape[:0:-1]
    wrapper = module.__dict__.get("expert_adapters", {}).get(name)
    is_adapted = wrapper is not None and not wrapper.disable_adapters
    shape = GroupedShape(
        num_experts=module.num_experts,
        num_inputs=size[0],
        num_outputs=size[1],
        is_transposed=is_transposed,
        group_blocks=packed.group_blocks if packed is not None else 0,
        top_k=top_k,
        gathers=gathers,
        sums=not gathers,
        rank=wrapper.r[_ADAPTER] if is_adapted else 0,
    )
    adapter, scale = [], 1.0
    if is_adapted:
        adapter = [wrapper.lora_A[_ADAPTER].weight, wrapper.lora_B[_ADAPTER].weight]
        if is_llama4:
            adapter = turn_adapter(adapter[0], adapter[1], shape.num_experts, shape.rank)
        scale = float(wrapper.scaling[_ADAPTER])
    weights = packed.parts if packed is not None else [weight]
    return multiply(x, route, weights, adapter, shape.as_list(), scale)


class ExpertAdapter(ParamWrapper):
    """PEFT's wrapper of one parameter, which leaves the products to `forward_experts`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the module of experts."""
        output: Tensor = self.base_layer(x, *args, **kwargs)
        return output


def find_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of experts that grouped products compute, with their names."""
    for name, module in model.named_modules():
        if nf4_experts.is_experts(module) and not isinstance(module, ParamWrapper):
            yield name, module


def name_targets(model: nn.Module) -> list[str]:
    """Return PEFT's `target_parameters` for all experts of a model, such as `experts.down_proj`."""
    return sorted(
        {
            f"{name.rpartition('.')[2]}.{matrix}"
            for name, module in find_experts(model)
            for matrix in nf4_experts.name_matrices(module)
        }
    )


def use_own_products(model: Any) -> bool:
    """Let `forward_experts` compute the experts of a model; return whether it has experts."""
    if not any(True for _ in find_experts(model)):
        return False
    layers = [m for m in model.modules() if is_llama4_experts(getattr(m, "experts", None))]
    for layer in layers:
        _precede(layer, _RoutedLayer)
    if not layers:
        ALL_EXPERTS_FUNCTIONS.register(NAME, forward_experts)
        model.set_experts_implementation(NAME)
    for _, router in nf4_experts.find_routers(model):
        # Autocast would round routers that compute in float32, which changes their choices.
        _precede(router, _ExactRouter)
    # Router logits are collected for the auxiliary loss, which the objective does not include.
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
    return True


@contextmanager
def names_as_they_are() -> Iterator[None]:
    """Keep PEFT from changing the targets of an adapter inside the block.

    In models that had a linear layer per expert in Transformers 4, PEFT takes `gate_proj`,
    `up_proj` and `down_proj` for experts even if they name a shared expert or a dense layer: these
    would get no adapter, and the experts one of twice the rank.
    """
    usual = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = _leave_as_is
    try:
        yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = usual


def list_adapted(model: nn.Module) -> list[str]:
    """Return the names of the linear layers with an adapter, of a model as PEFT wraps it."""
    base: Any = model.get_base_model()  # type: ignore[operator, unused-ignore]
    return [
        name
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    ]


def name_targets_for_peft(
    lora: LoraConfig, model: nn.Module, adapted: Iterable[str]
) -> dict[str, Any]:
    """Return the settings in an adapter's config file with which PEFT loads it unchanged.

    Args:
        lora: settings of the adapter.
        model: model as PEFT wraps it; it may have only some of the layers.
        adapted: linear layers with an adapter, of the whole model; see `list_adapted`.

    A linear layer whose name PEFT would take for experts is named by its weight, which has the same
    layout of adapters. Such adapters have no dropout in PEFT, and a finished adapter needs none.
    """
    base: Any = model.get_base_model()  # type: ignore[operator, unused-ignore]
    convert = transformers_weight_conversion.convert_peft_config_for_transformers
    changed = copy.deepcopy(lora)
    try:
        convert(changed, base, None)
    except ValueError:  # PEFT wants both or neither of two matrices fused in experts
        changed = copy.deepcopy(lora)
        changed.target_modules = {*adapted, *_FUSED}
        convert(changed, base, None)
    if not changed.target_parameters or lora.use_dora:
        return {}
    kept: set[str] = set()
    taken: set[str] = set()
    for name in adapted:
        is_kept = any(f".{name}".endswith(f".{one}") for one in changed.target_modules or ())
        (kept if is_kept else taken).add(name)
    if not taken:
        return {}
    parameters = {*(lora.target_parameters or ()), *(f"{name}.weight" for name in taken)}
    return {
        "target_modules": sorted(kept),
        "target_parameters": sorted(parameters),
        "lora_dropout": 0.0,
    }


def _leave_as_is(*args: Any, **kwargs: Any) -> None:
    pass


def connect_adapters(model: nn.Module) -> None:
    """Pass the adapters that PEFT created for experts to `forward_experts`."""
    for module in list(model.modules()):
        if isinstance(module, ParamWrapper):
            module.__class__ = ExpertAdapter
            base: Any = module.get_base_layer()
            base.__dict__.setdefault("expert_adapters", {})[module.parameter_name] = module


def _precede(module: Any, mixin: type) -> None:
    """Place a mixin before a module's class in its method resolution order."""
    kind = type(module)
    if issubclass(kind, mixin):
        return
    if (mixin, kind) not in _mixed_kinds:
        _mixed_kinds[mixin, kind] = type(kind.__name__, (mixin, kind), {})
    module.__class__ = _mixed_kinds[mixin, kind]


class _ExactRouter:
    """Mixin that precedes the class of a router."""

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the class without autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = next(self.parameters()).dtype
            return super().forward(hidden.to(dtype), *args, **kwargs)  # type: ignore[misc]


class _RoutedLayer:
    """Mixin that precedes the class of a layer of Llama 4 with experts."""

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of all tokens (T, H) and the router's logits, as the class does."""
        hidden_TH = hidden.reshape(-1, self.hidden_dim)
        scores_TE, logits_TE = self.router(hidden_TH)
        # Scores of experts that were not chosen are 0.
        weight_TK, index_TK = scores_TE.topk(self.top_k, dim=1)
        own = self.experts  # or PEFT's wrappers of its parameters
        own = own.get_base_layer() if isinstance(own, LoraLayer) else own
        routed_TH = forward_experts(own, hidden_TH, index_TK, weight_TK)
        return self.shared_expert(hidden_TH) + routed_TH, logits_TE


_mixed_kinds: dict[tuple[type, type], type] = {}
