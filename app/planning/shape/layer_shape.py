"""The parameters of one decoder layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """One linear layer of a decoder layer."""

    name: str
    """Name as in adapter targets, such as `q_proj`."""
    num_inputs: int
    num_outputs: int
    has_bias: bool = False
    part: str = ""
    """Module that holds it; empty: self_attn or mlp, by its name; `.`: the decoder layer itself."""
    is_adapted: bool = True
    """True if `all-linear` gives it an adapter."""

    @property
    def place(self) -> str:
        """Name within the decoder layer, such as `self_attn.q_proj`."""
        if self.part == ".":
            return self.name
        part = self.part or ("self_attn" if self.name in _ATTENTION else "mlp")
        return f"{part}.{self.name}"

    @property
    def num_weights(self) -> int:
        """Number of values of the matrix."""
        return self.num_inputs * self.num_outputs

    @property
    def num_parameters(self) -> int:
        """Number of values of the matrix and the bias."""
        return self.num_weights + (self.num_outputs if self.has_bias else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """Sizes of a mixer that carries a state from token to token."""

    num_groups: int
    """Number of heads of queries and keys; in Mamba, of groups of heads that share them."""
    num_heads: int
    """Number of heads of values."""
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One decoder layer."""

    linears: tuple[Linear, ...]
    """Linear layers: attention first, then the MLP or the shared expert."""
    num_attention: int
    """Number of parameters of attention's linear layers."""
    num_mlp: int
    """Number of parameters of the MLP's linear layers, shared experts included."""
    num_norms: int
    num_router: int = 0
    """Number of parameters of the router."""
    num_experts_params: int = 0
    """Number of parameters of all experts together."""
    num_met_params: int = 0
    """Number of parameters of the experts that one token is routed to."""
    kind: str = "attention"
    """Mixer of tokens: attention, delta (gated delta rule), mamba, both (Mamba and attention in
    parallel), convolution, or none."""
    num_other: int = 0
    """Number of other parameters: convolutions, decays, sinks and the like."""
    mixer: Mixer | None = None
    """Sizes of its delta rule or Mamba; None: it has neither."""
    number: int = 0
    """Index of the first layer that it stands for, with which names in targets are matched."""

    @property
    def num_parameters(self) -> int:
        """Number of all parameters of the layer."""
        parts = self.num_attention + self.num_mlp + self.num_norms + self.num_other
        return parts + self.num_router + self.num_experts_params


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of one layer."""

    num_router: int = 0
    num_experts_params: int = 0
    num_met_params: int = 0


@dataclass(kw_only=True, slots=True)
class LayerParts:
    """Builder of a decoder layer."""

    hidden: int
    """Number of features of the residual stream."""
    kind: str = "attention"
    attention: list[Linear] = field(default_factory=list)
    mlp: list[Linear] = field(default_factory=list)
    num_norms: int = 0
    num_other: int = 0
    experts: Experts = field(default_factory=Experts)
    mixer: Mixer | None = None

    def finish(self) -> LayerShape:
        """Return the layer."""
        return LayerShape(
            linears=(*self.attention, *self.mlp),
            num_attention=_count(self.attention),
            num_mlp=_count(self.mlp),
            num_norms=self.num_norms,
            num_router=self.experts.num_router,
            num_experts_params=self.experts.num_experts_params,
            num_met_params=self.experts.num_met_params,
            kind=self.kind,
            num_other=self.num_other,
            mixer=self.mixer,
        )


def _count(linears: Iterable[Linear]) -> int:
    return sum(linear.num_parameters for linear in linears)
