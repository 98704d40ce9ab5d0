"""Describe the interruptions of a run, for the window and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.interruption import Interruption
from app.text import capitalize, count_of, show_duration, show_list

MomentTone = Literal["calm", "busy", "good", "warning", "error"]


@dataclass(frozen=True, slots=True)
class StoryMoment:
    """One moment in the timeline of an interruption."""

    time_s: float | None
    """Time in seconds since the epoch; None: ongoing."""
    title: str
    text: str
    tone: MomentTone = "calm"


def describe_repeated(one: Interruption) -> str:
    """Describe the repeated steps.

    >>> lost = Interruption(kind="loss", state="recovered", reason="", step=13, nodes=("a", "b"),
    ...     last_step_s=100.0, noticed_s=104.0, resumed_s=108.0, resumed_nodes=("a",),
    ...     resume_step=10, training_s=121.0)
    >>> describe_repeated(lost)
    '3 steps are repeated from step 10'
    """
    number = one.repeated_steps
    if not number:
        return "no step is repeated"
    verb = "is" if number == 1 else "are"
    return f"{count_of(number, 'step')} {verb} repeated from step {one.resume_step}"


def tell_story(one: Interruption) -> list[StoryMoment]:
    """Return the moments of an interruption, in order."""
    moments = _describe_end(one)
    if one.resumed_s is not None:
        moments.append(_describe_resume(one))
    if one.training_s is not None:
        moments.append(_describe_training(one))
    elif not one.is_cut and (open_end := _describe_open_end(one)):
        moments.append(open_end)
    return moments


def summarize_story(found: Sequence[Interruption]) -> str:
    """Return one line on all interruptions of a run; empty: no interruptions."""
    losses = [one for one in found if one.kind == "loss"]
    num_pauses = sum(one.kind == "heat" for one in found)
    joined = [node for one in found if one.kind == "rejoin" for node in one.joined]
    parts = []
    if losses:
        parts.append(f"interrupted {_show_times(len(losses))}")
    if num_pauses:
        parts.append(f"paused {_show_times(num_pauses)} to cool down")
    if joined:
        parts.append(f"{show_list(list(dict.fromkeys(joined)))} rejoined")
    # An interruption that is not over has no cost yet.
    over = [one.cost_s for one in found if one.cost_s is not None]
    if over:
        repeated = sum(one.repeated_steps for one in found if one.cost_s is not None)
        steps = f"{count_of(repeated, 'step')} trained again" if repeated else "no step repeated"
        parts.append(f"{show_duration(sum(over))} lost, {steps}")
    if found and (open_end := _describe_open_end(found[-1])):
        parts.append(open_end.title.lower())
    return capitalize("; ".join(parts))


def _show_times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _describe_end(one: Interruption) -> list[StoryMoment]:
    last = f"step {one.step}" if one.step else ""
    if one.kind == "heat":
        return [StoryMoment(one.noticed_s, "Too hot", f"{one.reason}, after {last}", "warning")]
    if one.kind == "rejoin":
        stopped = StoryMoment(one.noticed_s, "Stopped", "before the first step of this start")
        if one.has_trained:
            # It kept training after the node was noticed, until it stopped at a checkpoint.
            stopped = StoryMoment(
                max(one.began_s, one.noticed_s), "Saved and stopped", f"after {last}"
            )
        return [StoryMoment(one.noticed_s, "Node back", one.reason), stopped]
    moments = []
    if one.has_trained and one.last_step_s is not None and last:
        moments.append(StoryMoment(one.began_s, "Last step", last))
    after_s = one.noticed_s - one.began_s
    after = f"{show_duration(after_s)} later" if moments and after_s > 0 else ""
    text = ": ".join(t for t in (after, one.reason.rstrip(".")) if t)
    moments.append(StoryMoment(one.noticed_s, "Loss noticed", text, "error"))
    return moments


def _describe_resume(one: Interruption) -> StoryMoment:
    assert one.resumed_s is not None
    away = f", without {show_list(one.without)}" if one.without else ""
    start = f"from step {one.resume_step}" if one.resume_step else "from the beginning"
    by = "by you, " if one.state == "replaced" else ""
    after = f"{show_duration(one.resumed_after_s)} after {one.began_with}"
    text = f"{by}{after}, on {show_list(one.resumed_nodes)}{away}, {start}"
    if one.is_regrouped:
        text = f"{after}, on {show_list(one.resumed_nodes)}{away}, with the model still in memory"
        return StoryMoment(one.resumed_s, "Regrouped", text, "busy")
    if one.is_cut:
        text += "; it ended before its first step"
    return StoryMoment(one.resumed_s, "Resumed", text, "busy")


def _describe_training(one: Interruption) -> StoryMoment:
    cost = f"cost {show_duration(one.cost_s)} in all, and {describe_repeated(one)}"
    if one.kind == "rejoin" and one.joined:
        text = f"{show_list(one.joined)} trains again; {cost}"
        return StoryMoment(one.training_s, "Rejoined", text, "good")
    return StoryMoment(one.training_s, "Training again", cost, "good")


def _describe_open_end(one: Interruption) -> StoryMoment | None:
    """Return the moment that is still going on, or None."""
    match one.state:
        case "pending":
            text = "resumed automatically while the window or `rackless watch` is open"
            return StoryMoment(None, "Waiting to resume", text, "busy")
        case "cooling":
            return StoryMoment(None, "Cooling down", "all ranks wait", "busy")
        case "resumed":
            return StoryMoment(
                None, "Starting again", "the ranks load model and checkpoint", "busy"
            )
        case "given_up":
            text = "a limit was reached, which the events name; resume it yourself"
            return StoryMoment(None, "Given up", text, "error")
        case "cancelled":
            return StoryMoment(None, "Stopped by you", "it is not resumed", "calm")
        case "left":
            text = "it is not resumed automatically; the run's message says what to do"
            return StoryMoment(None, "Waiting for you", text, "warning")
        case _:
            return None
