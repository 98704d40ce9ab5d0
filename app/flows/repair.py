"""Texts about repairs: offers of a check, steps, outcomes, and the log of a node."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agents.contract.repair import (
    Change,
    ChangeList,
    ChangeStep,
    RepairPreview,
    RepairStep,
    StepPreview,
)
from app.provisioning.check_row import CheckRow
from app.provisioning.repairs import Repair, ask_administrator, show_command
from app.shell_words import posix_command
from app.telemetry.state import Status, Tone
from app.text import count_of, show_moment

RESTARTED = "Restart {node}, then check again: what was installed works only after that."
WHERE = {
    "node": "",
    "windows": "Run this script once in PowerShell on its Windows, as administrator:",
    "person": "This has to be done at the PC itself.",
}
"""Text for a repair that Rackless cannot apply itself, by its place."""
_DIFF_CONTEXT = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """A repair of one node, and the rows that it is for."""

    node: str
    repair: Repair
    rows: tuple[CheckRow, ...]


def collect_offers(rows: Iterable[CheckRow]) -> tuple[Offer, ...]:
    """Return the repairs that a check found, each once for a node, in the order of its rows.

    A repair may be for another node than its row: a blocked connection is repaired in the firewall
    of the node that is called.
    """
    found: dict[tuple[str, str], list[CheckRow]] = {}
    repairs: dict[tuple[str, str], Repair] = {}
    for row in rows:
        if row.repair is not None and row.status != "pass":
            key = (row.repair.node or row.node, row.repair.id)
            repairs.setdefault(key, row.repair)
            found.setdefault(key, []).append(row)
    return tuple(Offer(node, repairs[node, id_], tuple(found[node, id_])) for node, id_ in found)


def is_done(shown: RepairPreview) -> bool:
    """Return whether every step is in place already."""
    return all(step.state == "in place" for step in shown.steps)


def find_obstacle(offer: Offer, shown: RepairPreview) -> str:
    """Return why a repair cannot be applied now, in a sentence; empty: it can."""
    blocked = next((step.problem for step in shown.steps if step.state == "blocked"), "")
    if blocked:
        return blocked
    if offer.repair.needs_admin and shown.admin == "none":
        return f"Rackless has no sudo on {offer.node}. {ask_administrator(offer.repair)}"
    return ""


def waits_for_restart(repair: Repair, changes: Iterable[Change], started_s: float | None) -> bool:
    """Return whether a repair was applied already and only a restart of the PC is missing.

    Args:
        repair: any repair; one that needs no restart never waits.
        changes: those of the node.
        started_s: time at which the PC was started, in seconds since 1970; None: not known.
    """
    # Applied after the last start of the PC means that it has not been restarted since.
    return repair.needs_restart and any(
        one.repair == repair.id
        and one.undone_s is None
        and not one.problem
        and started_s is not None
        and one.began_s > started_s
        for one in changes
    )


def needs_password(repair: Repair, shown: RepairPreview) -> bool:
    """Return whether sudo on the node wants a password for what is left to do."""
    wanted = any(
        step.as_root and one.state != "in place"
        for step, one in zip(repair.steps, shown.steps, strict=True)
    )
    return wanted and shown.admin == "password"


def describe_steps(repair: Repair, shown: RepairPreview | None = None) -> tuple[str, ...]:
    """Return the lines that say exactly what a repair does; `shown`: as the node is now."""
    previews = shown.steps if shown is not None else (None,) * len(repair.steps)
    return tuple(
        line
        for step, preview in zip(repair.steps, previews, strict=True)
        for line in _describe_step(step, preview)
    )


def describe_notes(repair: Repair) -> tuple[str, ...]:
    """Return sentences on rights, restart and undo of a repair."""
    notes = []
    if repair.needs_admin:
        notes.append("An administrator's rights are needed.")
    if repair.needs_restart:
        notes.append("The PC has to be restarted afterwards; Rackless does not do that.")
    if repair.not_undone:
        notes.append(f"Rackless cannot undo: {'; '.join(repair.not_undone)}.")
    elif repair.where == "node":
        notes.append("It can be undone.")
    return tuple(notes)


def describe_change(change: Change, now_s: float) -> str:
    """Return one line about a change in the log of a node."""
    when = show_moment(change.began_s, now_s)
    return f"{change.number}: {change.title}, {when}, by {change.by}: {show_state(change)}"


def show_state(change: Change) -> str:
    """Return the state of a change in a few words.

    >>> show_state(Change(number=1, repair="a", title="A", by="me", began_s=0, ended_s=1))
    'nothing was changed'
    """
    if change.undone_s is not None:
        return "undone in part" if change.undo_problem else "undone"
    if change.undo_problem:
        return "could not be undone"
    if change.ended_s is None:
        return "interrupted"
    if change.problem:
        return "failed in part" if change.did_something else "failed"
    return "in force" if change.did_something else "nothing was changed"


def judge_change(change: Change) -> Status:
    """Return the state of a change with its tone.

    >>> change = Change(number=1, repair="a", title="A", by="me", began_s=0, ended_s=1, undone_s=2)
    >>> judge_change(change)
    Status(tone='calm', text='undone')
    """
    tone: Tone = "good" if change.did_something else "calm"
    if change.undo_problem:
        tone = "warning"
    elif change.undone_s is not None:
        tone = "calm"
    elif change.problem or change.ended_s is None:
        tone = "error" if change.problem else "warning"
    return Status(tone, show_state(change))


def can_undo(change: Change) -> bool:
    """Return whether a change has steps that can be undone."""
    # A step that is still `running` was interrupted, and may have changed something.
    return change.undone_s is None and any(
        one.state in ("done", "running") and (one.step.undo or one.step.edit)
        for one in change.steps
    )


def wants_password(log: ChangeList) -> bool:
    """Return whether sudo on the node wants a password to undo the changes in force there."""
    return log.admin == "password" and any(
        one.step.as_root for change in log.changes if can_undo(change) for one in change.steps
    )


def summarise_changes(node: str, changes: Sequence[Change]) -> str:
    """Return one sentence on the log of a node.

    >>> summarise_changes("alpha", ())
    'Rackless has repaired nothing on alpha yet.'
    """
    if not changes:
        return f"Rackless has repaired nothing on {node} yet."
    left = sum(can_undo(change) for change in changes)
    return f"{count_of(len(changes), 'repair')} on {node}; {left} can be undone."


def find_problems(changes: Sequence[Change]) -> str:
    """Return the problems of undoing, in sentences; empty if everything was undone."""
    return " ".join(f"{one.title}: {one.undo_problem}" for one in changes if one.undo_problem)


def describe_change_steps(change: Change) -> tuple[str, ...]:
    """Return the lines of a change's record: each step, its outcome and what it printed."""
    lines = [line for one in change.steps for line in _describe_record(one)]
    lines += [change.problem] if change.problem else []
    lines += [change.undo_problem] if change.undo_problem else []
    return tuple(lines)


def describe_undone(changes: Sequence[Change]) -> str:
    """Return one sentence on what was undone.

    >>> describe_undone(())
    'There is nothing left to undo'
    """
    if not changes:
        return "There is nothing left to undo"
    whole = [one for one in changes if not one.undo_problem]
    return f"{len(whole)} of {count_of(len(changes), 'change')} undone"


def file_diff(path: str, before: str | None, after: str | None) -> tuple[str, ...]:
    """Return the lines that differ between two texts of a file; None: there is no such file.

    >>> file_diff("/etc/a", None, "x = 1\\n")
    ('new file /etc/a', '+x = 1')
    """
    if before is None:
        return (f"new file {path}", *(f"+{line}" for line in _lines_of(after)))
    lines = difflib.unified_diff(_lines_of(before), _lines_of(after), lineterm="", n=_DIFF_CONTEXT)
    # The first two lines name both versions of the same file.
    return (f"change {path}", *list(lines)[2:])


def _lines_of(text: str | None) -> list[str]:
    # Views show tabs as escapes, since a foreign tab could shift the text after it.
    return [line.expandtabs() for line in (text or "").splitlines()]


def _describe_step(step: RepairStep, shown: StepPreview | None) -> tuple[str, ...]:
    if shown is not None and shown.state == "in place":
        return (f"{step.says}: in place already",)
    command = show_command(step)
    if step.edit is None:
        return (f"{step.says}:", f"    {command}")
    edit = step.edit
    if shown is not None and shown.after is not None:
        lines = file_diff(edit.path, shown.before, shown.after)
    elif edit.content is not None:
        lines = (f"write {edit.path}", *(f"+{line}" for line in edit.content.splitlines()))
    else:
        swapped = (f"{pattern} becomes {text}" for pattern, text in edit.swap)
        lines = (f"change {edit.path}", *swapped, *(f"+{line}" for line in edit.add))
    right = " (as administrator)" if step.as_root else ""
    sudo = ("sudo",) if step.as_root else ()
    then = (f"    {posix_command(*sudo, *edit.activate)}",) if edit.activate else ()
    return (f"{step.says}{right}:", *(f"    {line}" for line in lines), *then)


def _describe_record(one: ChangeStep) -> tuple[str, ...]:
    code = "" if not one.exit_code else f", exit code {one.exit_code}"
    undone = {"yes": ", undone", "failed": ", undoing it failed"}.get(one.undone, "")
    head = f"{one.step.says}: {one.state}{code}{undone}"
    body = show_command(one.step).splitlines()
    if one.path:
        body = list(file_diff(one.path, one.before, one.after))
    said = [*one.output.splitlines(), *one.undo_output.splitlines()]
    return (head, *(f"    {line}" for line in body), *(f"    | {line}" for line in said))
