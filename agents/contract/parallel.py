"""Parallelism modes, one row each, read by run files, plans, forms and the trainer.

No other code compares their names: everything that depends on a mode is a trait here. A mode that
this version cannot train has a row, too. It is planned and shown, so that users see its benefit,
and refused with the same words at every start of a run. To make one runnable, add its strategy to
`agents/trainer/parallel/registry.py` and remove the refusal here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParallelMode = Literal["single", "data", "pipeline", "streamed", "sharded", "deepspeed"]
ParallelEngine = Literal["rackless", "fsdp2", "deepspeed"]

_NOT_YET = "not available yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Values of one key of the run file that a mode requires."""

    key: str
    """Dotted key."""
    values: tuple[str, ...]
    reason: str = ""
    """Reason, with its punctuation, to follow the values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelStrategy:
    """Properties of a parallelism mode.

    Its training is in `agents/trainer/parallel`, its cost in `app/planning/strategies`.
    """

    name: ParallelMode
    """Value of `parallel` in a run file."""
    label: str
    """Name in plans and sentences."""
    engine: ParallelEngine
    """Code that moves gradients and weights between GPUs."""
    summary: str = ""
    """Work of the devices, as a choice in a form; empty: not offered there."""
    refusal: str = ""
    """Why it cannot be trained, to follow its name; empty: it can."""
    holds: Literal["model", "stage", "some layers", "shards"] = "model"
    """Part of the model that a GPU keeps: all of it; the layers of its stage, through which every
    row passes; as many layers as fit, while others are streamed; a part of each layer."""
    uses_one_gpu: bool = False
    """True if a run has one rank, however many GPUs its nodes have."""
    copies_model: bool = False
    """True if GPUs share batches, each with the whole model."""
    keeps_whole_state: bool = True
    """True if every rank holds the whole trained state, so that survivors of a loss can regroup."""
    sends_over_nccl: bool = True
    """True if GPUs exchange tensors over NCCL; False if over Gloo, through host memory."""
    needs: tuple[Need, ...] = ()
    frozen_only: str = ""
    """Its use of frozen weights, if it cannot train all weights; empty: it can."""
    num_margins: int = 0
    """Number of margins by which `parallel: auto` wants it faster than a mode without margins,
    since forecasts of unlike modes err differently; see `app/planning/choice.py`."""

    @property
    def runnable(self) -> bool:
        """True if this version trains it."""
        return not self.refusal

    @property
    def divides_layers(self) -> bool:
        """True if a GPU may hold only some of the layers, which its plan names."""
        return self.holds in ("stage", "some layers")

    @property
    def has_stages(self) -> bool:
        """True if ranks hold successive layers, so that each rank computes every row."""
        return self.holds == "stage"

    @property
    def streams(self) -> bool:
        """True if frozen layers are streamed to the GPU during the computation."""
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
                    key="optimizer",
                    values=("adamw",),
                    reason=": other cuts of the layers would divide the blocks of an 8-bit state",
                ),
                # In bf16 replicas exchange gradients in full, which is more exact than asked for.
                Need(
                    key="compression",
                    values=("none", "bf16"),
                    reason=": PowerSGD carries errors of whole gradients",
                ),
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
# Traits of `parallel: auto` before a plan has chosen.
_AUTO = ParallelStrategy(name="data", label="auto", engine="rackless")


def find_mode(parallel: str) -> ParallelStrategy:
    """Return the row of a mode; `auto` has a row without special traits.

    >>> find_mode("pipeline").has_stages, find_mode("auto").copies_model
    (True, False)
    """
    return next((row for row in PARALLEL.values() if row.name == parallel), _AUTO)


def refuse_parallel(parallel: str) -> tuple[str, str] | None:
    """Return message and hint if `parallel` of a run file cannot be trained, else None.

    >>> refuse_parallel("sharded")
    ('parallel: sharded is not available yet', 'Use auto, data, single, pipeline or streamed')
    >>> refuse_parallel("auto")
    """
    # Not `find_mode`, which answers for unknown names and `auto` as well.
    row = next((row for row in PARALLEL.values() if row.name == parallel), None)
    if row is None or row.runnable:
        return None
    *names, last = ["auto", *(row.name for row in PARALLEL.values() if row.runnable)]
    return f"parallel: {parallel} is {row.refusal}", f"Use {', '.join(names)} or {last}"


def refuse_trained_weights(parallel: str, adapter_kind: str) -> tuple[str, str] | None:
    """Return message and hint if `parallel` needs frozen weights but the run trains them, else
    None.

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
