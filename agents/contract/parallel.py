"""Modes of parallel training: one row each, asked by run files, plans, forms and the trainer.

Nothing else compares their names: what code has to know of a mode is a trait here. A mode that this
version cannot train yet has its row too. It is planned and shown, so that a user sees what it would
bring, and refused with the same words wherever a run is started. To make one runnable, add its
strategy to `agents/trainer/parallel/registry.py` and remove the refusal here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParallelMode = Literal["single", "data", "pipeline", "streamed", "sharded", "deepspeed"]
ParallelEngine = Literal["rackless", "fsdp2", "deepspeed"]

_NOT_YET = "not available yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Values of one key of the run file without which a mode trains no run."""

    key: str
    """Dotted key."""
    values: tuple[str, ...]
    reason: str = ""
    """Why, with its punctuation, to follow the values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelStrategy:
    """Facts about a mode; how it trains is in `agents/trainer/parallel`, what it costs in
    `app/planning/strategies`.
    """

    name: ParallelMode
    """Value of `parallel` in a run file."""
    label: str
    """Name in plans and sentences."""
    engine: ParallelEngine
    """Code that moves gradients and weights between GPUs."""
    summary: str = ""
    """What devices do, as a choice in a form; empty: it is not offered there."""
    refusal: str = ""
    """Why it cannot be trained, to follow its name; empty: it can."""
    holds: Literal["model", "stage", "some layers", "shards"] = "model"
    """What a GPU keeps of the model: all of it; the layers of its stage, through which every row
    passes; as many layers as fit, while others are streamed; a part of each layer."""
    uses_one_gpu: bool = False
    """Whether a run has one rank, however many GPUs its nodes have."""
    copies_model: bool = False
    """Whether it asks that GPUs share batches, each with the whole model."""
    keeps_whole_state: bool = True
    """Whether every rank holds all that is trained, so that survivors of a loss can regroup."""
    sends_over_nccl: bool = True
    """Whether GPUs exchange tensors over NCCL; else over Gloo, through host memory."""
    needs: tuple[Need, ...] = ()
    frozen_only: str = ""
    """What it does with frozen weights, where it cannot train all of them; empty: it can."""
    num_margins: int = 0
    """Margins by which `parallel: auto` wants it faster than a mode that has none, since forecasts
    of unlike modes err differently; see `app/planning/choice.py`."""

    @property
    def runnable(self) -> bool:
        """Whether this version trains it."""
        return not self.refusal

    @property
    def divides_layers(self) -> bool:
        """Whether a GPU may hold some of the layers only, which its plan names."""
        return self.holds in ("stage", "some layers")

    @property
    def has_stages(self) -> bool:
        """Whether ranks hold layers one after the other, so that each computes every row."""
        return self.holds == "stage"

    @property
    def streams(self) -> bool:
        """Whether frozen layers are streamed to the GPU while it computes."""
        return self.holds == "some layers"


PARALLEL: dict[ParallelMode, ParallelStrategy] = {
    row.name: row
    for row in (
        ParallelStrategy(
            name="data",
            label="data parallel",
            engine="rackless",
            summary="Each device takes a part of every batch",
            copies_model=True,
        ),
        ParallelStrategy(
            name="single",
            label="one GPU",
            engine="rackless",
            summary="Only the first device trains",
            uses_one_gpu=True,
        ),
        ParallelStrategy(
            name="pipeline",
            label="pipeline",
            engine="rackless",
            summary="Each device holds some layers, and passes rows on to the next",
            holds="stage",
            keeps_whole_state=False,
            sends_over_nccl=False,
            needs=(
                Need(
                    key="adapter.kind",
                    values=("lora", "qlora"),
                    reason=": stages keep all other weights as is",
                ),
                Need(
                    key="optimizer", values=("adamw",), reason=", whose state other cuts continue"
                ),
                Need(key="compression", values=("none",)),
            ),
            # One over data parallel, and one over streamed weights, which survive a lost node.
            num_margins=2,
        ),
        ParallelStrategy(
            name="streamed",
            label="streamed weights",
            engine="rackless",
            summary="As data parallel, with layers that a GPU has no room for read from its PC",
            holds="some layers",
            frozen_only="keeps frozen weights outside the GPU",
            num_margins=1,
        ),
        ParallelStrategy(
            name="sharded",
            label="sharded",
            engine="fsdp2",
            refusal=_NOT_YET,
            holds="shards",
            keeps_whole_state=False,
        ),
        ParallelStrategy(
            name="deepspeed",
            label="DeepSpeed",
            engine="deepspeed",
            refusal=_NOT_YET,
            holds="shards",
            keeps_whole_state=False,
        ),
    )
}
"""Every mode by its name in run files; the order is that of forms and hints."""
# What holds for `parallel: auto` before a plan has chosen.
_AUTO = ParallelStrategy(name="data", label="auto", engine="rackless")


def find_mode(parallel: str) -> ParallelStrategy:
    """Return the row of a mode; `auto` has one that claims nothing.

    >>> find_mode("pipeline").has_stages, find_mode("auto").copies_model
    (True, False)
    """
    return next((row for row in PARALLEL.values() if row.name == parallel), _AUTO)


def refuse_parallel(parallel: str) -> tuple[str, str] | None:
    """Return message and hint when `parallel` of a run file cannot be trained; None: it can.

    >>> refuse_parallel("sharded")
    ('parallel: sharded is not available yet', 'Use auto, data, single, pipeline or streamed')
    >>> refuse_parallel("auto")
    """
    row = next((row for row in PARALLEL.values() if row.name == parallel), None)
    if row is None or row.runnable:
        return None
    *names, last = ["auto", *(row.name for row in PARALLEL.values() if row.runnable)]
    return f"parallel: {parallel} is {row.refusal}", f"Use {', '.join(names)} or {last}"


def refuse_trained_weights(parallel: str, adapter_kind: str) -> tuple[str, str] | None:
    """Return message and hint when `parallel` needs frozen weights, which a run trains; None: ok.

    >>> refuse_trained_weights("streamed", "full")[1]
    'Use adapter: {kind: qlora} or {kind: lora}, or parallel: auto'
    >>> refuse_trained_weights("streamed", "qlora")
    """
    frozen_only = find_mode(parallel).frozen_only
    if not frozen_only or adapter_kind != "full":
        return None
    return (
        f"parallel: {parallel} {frozen_only}, but adapter: {{kind: full}} trains all of them",
        "Use adapter: {kind: qlora} or {kind: lora}, or parallel: auto",
    )
