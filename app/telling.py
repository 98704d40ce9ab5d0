"""Say what became of a person's wish, in the same words in the window and on the command line."""

from __future__ import annotations

from app.events import SavedNow
from app.text import show_duration


def describe_saved(saved: SavedNow) -> str:
    """Return what became of the wish for a checkpoint.

    >>> describe_saved(SavedNow(step=12, stall_s=0.031, seconds=1.5))
    'the checkpoint of step 12 is saved; training stood still for 31 ms'
    """
    if saved.step is None:
        return (
            "no step has ended since; the checkpoint is saved at the end of the present one, and "
            "told among the run's events"
        )
    if saved.seconds is None:
        return f"the checkpoint of step {saved.step} is being written"
    text = f"the checkpoint of step {saved.step} is saved"
    if saved.stall_s is None:
        return text
    return f"{text}; training stood still for {show_duration(saved.stall_s)}"
