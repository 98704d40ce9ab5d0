"""Sentences on runs that nodes list and that are not known to be this home's."""

from __future__ import annotations

from app.events import FoundRun
from app.text import show_list


def describe_found(run: FoundRun) -> str:
    """Return what was found, and what it is said to be."""
    name = f"{run.name} ({run.run_id})" if run.name else run.run_id
    return f"Found on {run.node}, not yours: attempt {run.attempt} of {name}, {run.state}."


def may_stop(run: FoundRun) -> bool:
    """Return whether the run has something to stop on its node."""
    return run.is_active


def may_take_over(run: FoundRun) -> bool:
    """Return whether the run may still need a resume, which a takeover moves to this home."""
    return run.state != "done"


def ask_to_adopt(run: FoundRun) -> str:
    """Return the question before a run is adopted, which names all files that a resume reads."""
    return (
        f"{run.node} lists the run {run.run_id}, which nothing proves to be yours. Watching it "
        "fetches its logs. If you resume it from here, this PC reads and sends to its nodes: "
        f"{show_list(list(run.files)) or 'nothing'}. Is it a run of yours or of your team?"
    )
