"""Turn a checkpoint into a model folder on this PC.

The merge runs on a node that holds the checkpoint, because the weights and torch are there; the
result is fetched beside its destination, checked, and put in place with one rename.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from agents.protocol import MergeJob
from app.errors import NotAvailableYet, UsageError, UserError
from app.runs.checkpoints import Copy, find_copies
from app.runs.inputs import recall_inputs, send
from app.runs.readiness import python_of
from app.runs.resume import choose_checkpoint
from app.runs.services import Services

FORMATS = ("merged", "gguf", "awq", "gptq", "nf4")
Progress = Callable[[str], None]


async def export_run(
    services: Services,
    run_id: str,
    to: str,
    out: Path,
    checkpoint: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the run's model as a folder `out` that plain Transformers loads; return it.

    Raises:
        UserError: `out` is in use, or there is no whole checkpoint to export.
    """
    tell = progress or (lambda text: None)
    _expect_format(to)
    out = await asyncio.to_thread(_free_place, out)
    run = services.book.get(run_id)
    inputs = await asyncio.to_thread(recall_inputs, services, run)
    tell("looking for the newest whole checkpoint")
    copy = await _choose_copy(services, run_id, checkpoint)
    agent = services.cluster.agent(copy.node)
    python = python_of(copy.node, await agent.facts())
    tell(f"merging step {copy.info.step} on {copy.node}")
    exported = await agent.export_merged(
        MergeJob(
            run_id=run_id,
            step=copy.info.step,
            python=python,
            model_path=await send(services, copy.node, inputs.model),
            destination=f"runs/{run_id}/exports/merged-{copy.info.step}",
        ),
        tell,
    )
    tell(f"fetching it from {copy.node}")
    await services.cluster.fetch(copy.node, exported.path, out)
    services.book.tell(run_id, "info", f"step {copy.info.step} exported to {out}")
    return out


def _expect_format(to: str) -> None:
    if to not in FORMATS:
        raise UsageError(f"{to} is no export format", f"Use one of {', '.join(FORMATS)}.")
    if to != "merged":
        raise NotAvailableYet(
            f"export to {to} is not available yet", "Export to merged and convert that folder."
        )


def _free_place(out: Path) -> Path:
    """Return the absolute place of a new folder; an empty one that stands there is taken away."""
    out = out.expanduser().absolute()
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty", "Name a new or empty folder with --out.")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file", "Name a new or empty folder with --out.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            out.rmdir()
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror}", "Name another folder with --out."
        ) from error
    return out


async def _choose_copy(services: Services, run_id: str, checkpoint: int | None) -> Copy:
    copies = await find_copies(services, run_id, services.cluster.names())
    good = await choose_checkpoint(services, run_id, copies, checkpoint)
    if not good:
        raise UserError(
            f"run {run_id} has no whole checkpoint on the nodes that answer",
            "Look at them with: rackless checkpoints " + run_id,
        )
    return good[0]
