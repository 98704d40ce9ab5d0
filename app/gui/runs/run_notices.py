"""Notices of a run page: the most urgent problem of a run, and the result of a verification."""

from __future__ import annotations

from collections.abc import Sequence

from app.events import ACTIVE_STATES, CheckpointSnapshot, RunSnapshot, RunState
from app.presentation.result_text import describe_certificate
from app.telemetry.alerts import check_run
from app.telemetry.state import Tone
from app.text import count_of

_NOTICE_TONES: dict[RunState, Tone] = {"failed": "error", "interrupted": "warning"}


def choose_notice(run: RunSnapshot, last_step_age_s: float) -> tuple[Tone, str, str] | None:
    """Return (tone, message, hint) of the most urgent notice about a run; None: no notice."""
    alerts = check_run(run, last_step_age_s)
    # Once a run has ended, its own message says more than an alert about its last figures.
    if alerts and (run.state in ACTIVE_STATES or not run.message):
        return "error", f"{run.name}: {alerts[0].text}", ""
    if run.certificate is not None and not run.certificate.kept:
        hint = "Its checkpoint or environment has changed. See the run's events."
        return "error", describe_certificate(run.certificate), hint
    if run.message:
        return _NOTICE_TONES.get(run.state, "calm"), run.message, run.hint
    return None


def describe_verified(name: str, found: Sequence[CheckpointSnapshot]) -> tuple[Tone, str, str]:
    """Return (tone, message, hint) of a finished checkpoint verification."""
    bad = [item for item in found if item.verified is False]
    if bad:
        return "error", f"{name}: {len(bad)} of {count_of(len(found), 'checkpoint')} damaged", ""
    if found:
        return "good", f"{name}: every checkpoint is intact on the nodes that respond", ""
    return "warning", f"{name}: the nodes that respond have no checkpoint", "Nothing was verified."
