"""Resume a run as the core does it, with its state refreshed first."""

from __future__ import annotations

from typing import Any

from app.runs.lifecycle import resume
from app.runs.lifecycle.reconcile import reconcile_run, refresh_run
from app.runs.services import Services


async def resume_run(services: Services, run_id: str, *args: Any, **kwargs: Any) -> None:
    await (refresh_run if kwargs.get("automatic") is None else reconcile_run)(services, run_id)
    await resume.resume_run(services, run_id, *args, **kwargs)
