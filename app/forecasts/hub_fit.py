"""Judge whether this cluster can fine-tune a model of the hub, from its config alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agents.contract.spec import AdapterKind, AdapterSpec, DataSpec, RunSpec
from app.errors import UserError
from app.hub.hub_item import HubFit
from app.planning.candidate import Candidate, Plan
from app.planning.shape.model_shape import read_shape
from app.text import capitalize, one_line, shorten, show_bytes, show_list

_METHODS: dict[AdapterKind, str] = {"lora": "LoRA", "qlora": "QLoRA"}
"""Methods in the order in which they are tried, the one without loss of precision first."""
_NUMBERS = ("", "one", "both", "all three", "all four", "all five", "all six")
_MAX_REASON = 200
Planning = Callable[[RunSpec], Awaitable[Plan]]


async def judge_fit(
    model: str, config: Mapping[str, Any], num_nodes: int, plan: Planning
) -> HubFit:
    """Return the verdict on a model.

    Args:
        model: hub id.
        config: its config.json.
        num_nodes: number of nodes, for the words.
        plan: plans a run on all nodes.
    """
    tried: Plan | None = None
    streamed: HubFit | None = None
    for kind in _METHODS:
        spec = RunSpec(model=model, data=DataSpec(train="-"), adapter=AdapterSpec(kind=kind))
        try:
            tried = await plan(spec)
        except UserError as error:
            if (unknown := _find_unknown(model, config)) is not None:
                return unknown
            return HubFit(model=model, verdict="unusable", text=_shorten(error))
        if tried.chosen is None:
            continue
        fit = _describe_fit(model, kind, tried.chosen, num_nodes)
        if not _streams(tried.chosen):
            return fit
        # QLoRA without streaming is faster than LoRA with it.
        streamed = streamed or fit
    return streamed or HubFit(model=model, verdict="too-large", text=_say_lack(tried))


def _describe_fit(model: str, kind: AdapterKind, chosen: Candidate, num_nodes: int) -> HubFit:
    more = ", with its weights streamed" if _streams(chosen) else ""
    return HubFit(
        model=model,
        verdict="fits",
        text=f"{_METHODS[kind]} on {say_nodes(chosen.nodes, num_nodes)}{more}",
        adapter=kind,
        nodes=tuple(chosen.nodes),
    )


def _streams(chosen: Candidate) -> bool:
    return any(gpu.num_streamed for gpu in chosen.gpus)


def _find_unknown(model: str, config: Mapping[str, Any]) -> HubFit | None:
    try:
        read_shape(config)
    except UserError as error:
        return say_unknown(model, error)
    return None


def say_unknown(model: str, error: UserError) -> HubFit:
    """Return the verdict on a model whose shape cannot be read, with the reason."""
    return HubFit(model=model, verdict="unknown", text=f"Unknown shape: {_shorten(error)}")


def say_nodes(nodes: tuple[str, ...], num_nodes: int) -> str:
    """Return the nodes of a plan in words.

    >>> say_nodes(("a", "b", "c"), 3), say_nodes(("a", "b"), 3), say_nodes(("a",), 1)
    ('all three PCs', 'a and b', 'a')
    """
    if len(nodes) < num_nodes or len(nodes) < 2:
        return show_list(nodes)
    word = _NUMBERS[len(nodes)] if len(nodes) < len(_NUMBERS) else f"all {len(nodes)}"
    return f"{word} PCs"


def _say_lack(plan: Plan | None) -> str:
    """Return which GPU of the nearest plan has too little memory."""
    nearest = plan.others[0] if plan is not None and plan.others else None
    for gpu in nearest.gpus if nearest is not None else ():
        if not gpu.fits:
            needs, has = show_bytes(gpu.memory.high_bytes), show_bytes(gpu.room_bytes)
            return f"Too large: QLoRA needs {needs} on {gpu.node}, which has {has}"
    return "Too large for these PCs, even with QLoRA"


def _shorten(error: UserError) -> str:
    return capitalize(one_line(shorten(str(error).rstrip("."), _MAX_REASON)))
