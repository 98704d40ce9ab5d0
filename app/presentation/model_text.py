"""Describe a model, its parts that a run leaves untouched, and nodes without compiled layers.

The texts are shared by plan and preview, and by the window and the command line.
"""

from __future__ import annotations

from collections.abc import Iterable

from agents.shared.models.families import name_family
from app.planning.candidate import Advice, Caveats, RunLimit
from app.planning.shape.model_parts import ModelPart, ModelSummary
from app.text import capitalize, count_of, short_card, show_bytes, show_list

LEFT = "Left as it is"
"""Title of the list of parts that a run leaves untouched."""
CHECK = "Check first"
"""Title of the list of limits to check before a start."""
_PLURAL_PARTS = ("experts", "routers", "embeddings", "norms")
# Parts with an English name; others are named after their layers.
_PLAIN_PARTS = (*_PLURAL_PARTS, "head")
_LIMIT_WORDS = {
    "no_compiler": (
        "no C compiler is installed",
        "On Debian and Ubuntu: sudo apt install build-essential",
    ),
    "old_card": ("Triton supports cards since Volta only", ""),
    "turned_off": ("the run file has compile: off", "compile: auto compiles them"),
}


def describe_model(model: ModelSummary) -> str:
    """Describe a model: family, size, and number of experts per token.

    >>> describe_model(ModelSummary(family="qwen3_moe", num_parameters=30_532_122_624,
    ...     num_experts=128, num_experts_met=8))
    'Qwen3-MoE, 30.5 billion parameters, 8 of 128 experts per token'
    """
    facts = [name_family(model.family).full, f"{show_amount(model.num_parameters)} parameters"]
    if model.num_experts:
        facts.append(f"{model.num_experts_met} of {model.num_experts} experts per token")
    return ", ".join(facts)


def show_amount(number: int) -> str:
    """Return a number of weights in words.

    >>> show_amount(28_991_029_248), show_amount(453_000_000), show_amount(1_200)
    ('29.0 billion', '453 million', '1,200')
    """
    if number >= 1e9:
        return f"{number / 1e9:.1f} billion"
    return f"{number / 1e6:.0f} million" if number >= 1e6 else f"{number:,}"


def describe_caveats(caveats: Caveats) -> list[tuple[str, list[str]]]:
    """Return (title, lines) of each non-empty list of caveats of a run."""
    offers = [one.text for one in offer_adapters(caveats.parts or ())]
    left = [f"Not known: {caveats.problem}"]
    if caveats.parts is not None:
        left = [*describe_parts(caveats.parts), *offers]
    limits = [one.text for one in describe_limits(caveats.limits)]
    found = [(LEFT, left), (CHECK, limits)]
    return [(title, lines) for title, lines in found if lines]


def describe_parts(parts: Iterable[ModelPart]) -> list[str]:
    """Return a line on each part that a run leaves untouched.

    >>> part = ModelPart(kind="no_adapter", names=("experts",), num_layers=48,
    ...     num_weights=28_991_029_248, num_experts=128, is_choice=True)
    >>> describe_parts([part])
    ['Experts (128 in each of 48 layers) get no adapter: 29.0 billion weights']
    """
    return [_describe_part(part) for part in parts]


def _describe_part(part: ModelPart) -> str:
    names = show_list(part.names)
    # Names of layers are spelled as in a run file, so they keep their case.
    names = capitalize(names) if part.names[0] in _PLAIN_PARTS else names
    layers = count_of(part.num_layers, "layer") if part.num_layers else ""
    if part.num_experts:
        names += f" ({part.num_experts} in each of {layers})"
    elif layers:
        names += f" of {layers}"
    is_one = len(part.names) == 1 and part.names[0] not in _PLURAL_PARTS
    get, stay = ("gets", "stays") if is_one else ("get", "stay")
    weights = f"{show_amount(part.num_weights)} weights"
    size = show_bytes(part.num_bytes)
    if part.kind == "no_balance_loss":
        return f"{names} are frozen, and no auxiliary loss balances the load of the experts"
    if part.kind == "no_adapter":
        return f"{names} {get} no adapter: {weights}"
    if part.kind == "untouched":
        return f"{names} {get} no adapter and {stay} in 16 bits: {size}"
    return f"{names} {stay} in 16 bits: {size}"


def offer_adapters(parts: Iterable[ModelPart]) -> list[Advice]:
    """Return the change that gives adapters to the experts; empty: not applicable."""
    if not any(part.is_choice for part in parts):
        return []
    # Adapters on experts support neither dropout nor DoRA, so the change turns these off.
    change = {"adapter.experts": True, "adapter.dropout": 0.0, "adapter.dora": False}
    text = "To train the experts as well, set adapter.experts: true, without dropout and DoRA"
    return [Advice(text=text, change=change)]


def describe_limits(limits: Iterable[RunLimit]) -> list[Advice]:
    """Return advice on nodes without compiled layers: the reason, the cost and a remedy.

    >>> found = describe_limits([RunLimit(reason="no_compiler", nodes=("beta",),
    ...     card="NVIDIA GeForce RTX 4070", time_ratio=1.74)])
    >>> found[0].text
    'beta: layers are not compiled, since no C compiler is installed: the RTX 4070 takes about 1.7 \
times as long. On Debian and Ubuntu: sudo apt install build-essential'
    """
    return [_describe_limit(one) for one in limits]


def _describe_limit(limit: RunLimit) -> Advice:
    card = f"the {short_card(limit.card)}"
    reason, hint = _LIMIT_WORDS[limit.reason]
    cost = ""
    if limit.is_decisive:
        cost = f", so the run does not fit on {card}; compiled, it would"
    elif limit.time_ratio is not None:
        # At least 1, since two close forecasts may be in the wrong order.
        cost = f": {card} takes about {max(1.0, limit.time_ratio):.1f} times as long"
    text = f"{show_list(limit.nodes)}: layers are not compiled, since {reason}{cost}"
    change = {"compile": "auto"} if limit.reason == "turned_off" else {}
    return Advice(text=f"{text}. {hint}" if hint else text, change=change)
