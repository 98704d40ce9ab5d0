"""Ways to spread a run over GPUs: one row each, asked by run files, plans, forms and the trainer.

A way that this version cannot train yet has its row too. It is planned and shown, so that a user
sees what it would bring, and refused with the same words wherever a run is started. To make one
runnable, add its strategy to `agents/trainer/parallel/registry.py` and remove the refusal here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParallelMode = Literal["single", "data", "pipeline", "streamed", "sharded", "deepspeed"]
ParallelEngine = Literal["rackless", "fsdp2", "deepspeed"]

_NOT_YET = "not available yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelStrategy:
    """What is known of a way without training it."""

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

    @property
    def runnable(self) -> bool:
        """Whether this version trains it."""
        return not self.refusal


PARALLEL: dict[ParallelMode, ParallelStrategy] = {
    row.name: row
    for row in (
        ParallelStrategy(
            name="data",
            label="data parallel",
            engine="rackless",
            summary="Each device takes a part of every batch",
        ),
        ParallelStrategy(
            name="single",
            label="one GPU",
            engine="rackless",
            summary="Only the first device trains",
        ),
        ParallelStrategy(
            name="pipeline",
            label="pipeline",
            engine="rackless",
            summary="Each device holds some layers, and passes rows on to the next",
        ),
        ParallelStrategy(
            name="streamed",
            label="streamed weights",
            engine="rackless",
            summary="As data parallel, with layers that a GPU has no room for read from its PC",
        ),
        ParallelStrategy(name="sharded", label="sharded", engine="fsdp2", refusal=_NOT_YET),
        ParallelStrategy(name="deepspeed", label="DeepSpeed", engine="deepspeed", refusal=_NOT_YET),
    )
}
"""Every way by its name in run files; the order is that of forms and hints."""


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
    if parallel != "streamed" or adapter_kind != "full":
        return None
    return (
        "parallel: streamed keeps frozen weights outside the GPU, but adapter: {kind: full} trains "
        "all of them",
        "Use adapter: {kind: qlora} or {kind: lora}, or parallel: auto",
    )
