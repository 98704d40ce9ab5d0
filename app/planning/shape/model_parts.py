"""List the parts of a model that a run leaves untouched: without an adapter, or in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from agents.contract.spec import RunSpec
from app.planning.shape.model_shape import ModelShape, choose_targets

PartKind = Literal["no_adapter", "not_quantized", "untouched", "no_balance_loss"]
# Bytes of a value that is not quantized.
_WIDE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart:
    """A part of a model that a run does not treat in one respect."""

    kind: PartKind
    """Treatment that is left out: `no_adapter`, `not_quantized`, `untouched` (no adapter and not
    quantized), or `no_balance_loss` (the routers' auxiliary loss)."""
    names: tuple[str, ...]
    """Linear layers by their names in adapter targets, or `experts`, `routers`, `embeddings`,
    `head`, `norms`."""
    num_layers: int
    """Number of decoder layers that have it; 0: it is outside of the decoder layers."""
    num_weights: int
    num_experts: int = 0
    """Number of experts of each layer, if the part is the experts."""
    is_choice: bool = False
    """True if `adapter.experts` would give it an adapter."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights in 16 bits."""
        return _WIDE * self.num_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """Key figures of a model."""

    family: str
    """`model_type` of the text model."""
    num_parameters: int
    num_experts: int = 0
    """Number of experts of each layer that has experts."""
    num_experts_met: int = 0
    """Number of experts that one token is routed to."""


def summarize(shape: ModelShape) -> ModelSummary:
    """Return the key figures of a model."""
    return ModelSummary(
        family=shape.family,
        num_parameters=shape.num_parameters,
        num_experts=shape.num_experts,
        num_experts_met=shape.num_experts_met,
    )


def list_parts(shape: ModelShape, spec: RunSpec) -> tuple[ModelPart, ...]:
    """Return the parts that a run with an adapter leaves untouched; empty in full training.

    >>> from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
    >>> from app.planning.shape.model_shape import read_shape
    >>> shape = read_shape({"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    ...     "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    ...     "head_dim": 128})
    >>> spec = RunSpec(model="m", data=DataSpec(train="d"), adapter=AdapterSpec(kind="qlora"))
    >>> [(one.kind, one.names, one.num_weights) for one in list_parts(shape, spec)][0]
    ('no_adapter', ('experts',), 28991029248)
    """
    if spec.adapter.kind == "full":
        return ()
    return tuple(_find_parts(shape.tell_apart(spec.adapter.targets), spec))


def _find_parts(shape: ModelShape, spec: RunSpec) -> Iterator[ModelPart]:
    num_sparse = sum(count for layer, count in shape.kinds if layer.num_router)
    is_adapted = spec.adapter.experts and shape.has_usual_experts
    experts = ModelPart(
        kind="no_adapter",
        names=("experts",),
        num_layers=num_sparse,
        num_weights=shape.num_all_experts,
        num_experts=shape.num_experts,
        is_choice=shape.has_usual_experts,
    )
    is_quantized = spec.adapter.kind == "qlora"
    if num_sparse and not is_adapted:
        # QLoRA cannot quantize experts of another form.
        is_wide = is_quantized and not shape.has_usual_experts
        yield replace(experts, kind="untouched" if is_wide else "no_adapter")
    yield from _find_linears(shape, spec)
    yield from _find_ends(shape, spec, has_routers=num_sparse > 0)
    if num_sparse:
        yield ModelPart(
            kind="no_balance_loss",
            names=("routers",),
            num_layers=num_sparse,
            num_weights=sum(count * layer.num_router for layer, count in shape.kinds),
        )


def _find_linears(shape: ModelShape, spec: RunSpec) -> Iterator[ModelPart]:
    """Yield the linear layers that get no adapter."""
    names: dict[str, None] = {}
    num_weights = num_layers = 0
    for layer, count in shape.kinds:
        chosen = choose_targets(layer, spec.adapter.targets)
        left = [linear for linear in layer.linears if linear not in chosen]
        names |= dict.fromkeys(one.name for one in left)
        num_weights += count * sum(one.num_weights for one in left)
        num_layers += count if left else 0
    if names:
        yield ModelPart(
            kind="no_adapter", names=tuple(names), num_layers=num_layers, num_weights=num_weights
        )


def _find_ends(shape: ModelShape, spec: RunSpec, *, has_routers: bool) -> Iterator[ModelPart]:
    """Yield the parts outside of the decoder layers' linear layers, which are never quantized."""
    is_quantized = spec.adapter.kind == "qlora"
    # Only a list can name the head; `all-linear` and patterns apply to the decoder layers.
    names = spec.adapter.targets
    is_adapted = not isinstance(names, str) and "lm_head" in names and not shape.is_tied
    head = ("head",) if not shape.is_tied and not is_adapted else ()
    routers = ("routers",) if has_routers else ()
    num_weights = shape.num_parameters - shape.num_quantized - shape.num_all_experts
    yield ModelPart(
        kind="untouched" if is_quantized else "no_adapter",
        names=("embeddings", *head, *routers, "norms"),
        num_layers=0,
        num_weights=num_weights - (shape.num_head if is_adapted else 0),
    )
    if is_adapted and is_quantized:
        yield ModelPart(
            kind="not_quantized", names=("head",), num_layers=0, num_weights=shape.num_head
        )
