"""Resume a run as the core does it, with its state refreshed first."""

from __future__ import annotations

from app.progress import OnMessage
from app.runs.lifecycle import resume
from app.runs.lifecycle.launch_order import take_order
from app.runs.lifecycle.reconcile import reconcile_run, refresh_run
from app.runs.services import Services


async def resume_run(
    services: Services,
    run_id: str,
    checkpoint: int | None = None,
    nodes: tuple[str, ...] | None = None,
    verify_steps: int | None = None,
    report: OnMessage = lambda line: None,
    *,
    changes: resume.Changes | None = None,
    automatic: resume.Automatic | None = None,
) -> None:
    order = take_order(services, run_id)
    await (refresh_run if automatic is None else reconcile_run)(services, run_id)
    choices = resume.Choices(
        checkpoint=checkpoint,
        nodes=nodes,
        verify_steps=verify_steps,
        changes=changes or resume.Changes(),
    )
    await resume.resume_run(services, run_id, choices, report, automatic=automatic, order=order)
