"""Preview, apply and undo repairs of this node step by step, with a record of each step.

A failed step ends a repair; earlier steps stay, are recorded, and can be undone. Steps are undone
in reverse order. A file that was changed after the repair is not touched, and the record says so.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from agents.contract import repair
from agents.errors import ExpectedError
from agents.node.administrator import Administrator
from agents.node.change_log import ChangeLog
from agents.node.edited_file import FileState, HiddenFile, hash_text, read_file, write_file
from agents.state import Home

Say = Callable[[str], None]
"""Callback for each message about the work and each line of a command's output."""
_PROBE_S = 20.0
_MAX_OUTPUT_CHARACTERS = 8000


class _StepFailed(Exception):
    """Raised when a step fails; `args[0]` is the message."""


def preview(steps: Sequence[repair.RepairStep], admin: Administrator) -> repair.RepairPreview:
    """Return the effect of the steps; changes nothing and needs no password."""
    return repair.RepairPreview(
        steps=tuple(_preview(step, admin) for step in steps), admin=admin.way
    )


def apply(home: Home, order: repair.RepairOrder, admin: Administrator, say: Say) -> repair.Change:
    """Apply a repair and return its record, which names the problem if a step failed.

    Raises:
        ExpectedError: nothing was changed, because another repair is being applied or administrator
            rights are required and not available.
    """
    log = ChangeLog(home)
    with log.owned():
        # Before the first step, so that a wrong password changes nothing.
        if any(step.as_root for step in order.steps):
            admin.require()
        change = repair.Change(
            number=log.next_number(),
            repair=order.repair,
            title=order.title,
            by=order.by,
            began_s=time.time(),
            steps=tuple(repair.ChangeStep(step=step) for step in order.steps),
            needs_restart=order.needs_restart,
        )
        return _Applying(home, log, change, admin, say).run(order.expected)


def undo(
    home: Home, order: repair.UndoOrder, admin: Administrator, say: Say
) -> list[repair.Change]:
    """Undo changes, newest first, and return their records.

    Raises:
        ExpectedError: nothing was changed, because the change does not exist, another repair is
            being applied, or administrator rights are required and not available.
    """
    log = ChangeLog(home)
    with log.owned():
        known = [change for change in log.all() if change.undone_s is None and change.did_something]
        wanted = [log.require(number) for number in order.numbers]
        chosen = [c for c in known if (c in wanted if wanted else c.has_undo_left)]
        steps = [made.step for change in chosen for made in change.steps]
        # A step that cannot be undone needs no rights.
        if any(step.as_root and (step.undo or step.edit) for step in steps):
            admin.require()
        newest_first = sorted(chosen, key=lambda change: -change.number)
        return [_Undoing(home, log, change, admin, say).run() for change in newest_first]


class _Work:
    """A change that is being applied or undone, with each step recorded in the log."""

    def __init__(
        self, home: Home, log: ChangeLog, change: repair.Change, admin: Administrator, say: Say
    ) -> None:
        self._home = home
        self._log = log
        self._change = change
        self._admin = admin
        self._say = say

    def _note(self, index: int, **values: object) -> None:
        steps = list(self._change.steps)
        steps[index] = replace(steps[index], **values)  # type: ignore[arg-type]
        self._change = replace(self._change, steps=tuple(steps))
        self._log.save(self._change)


class _Applying(_Work):
    def run(self, expected: Sequence[str]) -> repair.Change:
        for index, sha256 in enumerate(expected):
            try:
                self._take_step(index, sha256)
            # TimeoutError, because the commands that read and write a file may hang as well.
            except (_StepFailed, ExpectedError, TimeoutError) as error:
                hint = getattr(error, "hint", "")
                problem = f"{error.args[0]} {hint}".strip()
                self._note(index, state="failed")
                self._change = replace(self._change, problem=problem)
                break
        self._change = replace(self._change, ended_s=time.time())
        self._log.save(self._change)
        return self._change

    def _take_step(self, index: int, sha256: str) -> None:
        step = self._change.steps[index].step
        if step.done is not None and _is_in_place(step.done, self._admin, ask_root=True):
            self._note(index, state="in place")
            return
        for probe in step.needs:
            if not _is_in_place(probe, self._admin, ask_root=True):
                raise ExpectedError(
                    f"{step.says}: this PC is not as the check said ({shlex.join(probe.argv)}).",
                    "Check this node again",
                )
        self._say(f"{step.says} ...")
        if step.edit is not None:
            self._edit(index, step, step.edit, sha256)
            return
        # Recorded before the command: an interrupted step counts as possibly done.
        self._note(index, state="running")
        code, output = _run(self._admin, step.run, step, self._say)
        self._note(index, exit_code=code, output=output)
        if code:
            raise _StepFailed(f"{step.says}: {_last_words(code, output)}.")
        self._note(index, state="done")

    def _edit(
        self, index: int, step: repair.RepairStep, edit: repair.FileEdit, sha256: str
    ) -> None:
        # A link stays a link: its target is edited.
        path = os.path.realpath(edit.path)
        before = read_file(path, self._admin if step.as_root else None)
        # The user has approved an edit of the text with this hash.
        if sha256 and before.sha256 != sha256:
            raise ExpectedError(
                f"{path} has changed since it was shown; it was left alone.",
                "Review the change again, then apply it",
            )
        text = edit.apply_to(before.text)
        if text == before.text:
            self._note(index, state="in place")
            return
        # Recorded before the file is written, so that an interrupted edit can be undone.
        self._note(
            index,
            state="running",
            path=path,
            before=before.text,
            after=text,
            mode=before.mode,
            owner=before.owner,
            group=before.group,
        )
        mode = edit.mode if before.mode is None else before.mode
        owner = _owner_of(before, step)
        after = FileState(text=text, mode=mode, owner=owner[0], group=owner[1])
        write_file(path, after, before, self._admin, self._home, as_root=step.as_root)
        code, output = _run(self._admin, edit.activate, step, self._say)
        self._note(index, exit_code=code, output=output)
        if code:
            # A file that its program rejects must not stay, or the program's next start would fail.
            now = read_file(path, self._admin if step.as_root else None)
            write_file(path, before, now, self._admin, self._home, as_root=step.as_root)
            _run(self._admin, edit.activate, step, self._say)
            raise _StepFailed(f"{step.says}: {_last_words(code, output)}; {path} is as it was.")
        self._note(index, state="done")


class _Undoing(_Work):
    def run(self) -> repair.Change:
        self._change = replace(self._change, undo_problem="")
        problems = []
        for index in reversed(range(len(self._change.steps))):
            made = self._change.steps[index]
            if made.state not in ("done", "running") or made.undone == "yes":
                continue
            try:
                problem = self._take_back(index, made)
            except (_StepFailed, ExpectedError, TimeoutError) as error:
                # Earlier steps may depend on this one: a disk in use must not be removed.
                problems.append(str(error.args[0]))
                self._note(index, undone="failed", undo_output=str(error.args[0]))
                break
            problems += [problem] if problem else []
        # Steps that cannot be undone do not prevent the change from counting as undone.
        states = {made.undone for made in self._change.steps}
        is_over = "failed" not in states and bool(states & {"yes", "not needed"})
        self._change = replace(
            self._change, undo_problem=" ".join(problems), undone_s=time.time() if is_over else None
        )
        self._log.save(self._change)
        return self._change

    def _take_back(self, index: int, made: repair.ChangeStep) -> str:
        """Undo one step; return a message if it cannot be undone, else an empty string."""
        step = made.step
        if step.edit is not None:
            self._say(f"Put back {made.path} ...")
            self._put_back(made, step.edit)
        elif step.undo:
            self._say(f"Undo: {step.says} ...")
            code, output = _run(self._admin, step.undo, step, self._say)
            self._note(index, undo_output=output)
            if code:
                raise _StepFailed(f"Undoing '{step.says}': {_last_words(code, output)}.")
        elif step.undo_note:  # the note says why nothing is left to undo
            self._note(index, undone="not needed")
            return ""
        else:
            self._note(index, undone="impossible")
            return f"'{step.says}' cannot be taken back."
        self._note(index, undone="yes")
        return ""

    def _put_back(self, made: repair.ChangeStep, edit: repair.FileEdit) -> None:
        step, path = made.step, made.path
        now = read_file(path, self._admin if step.as_root else None)
        # An interrupted edit may not have changed the file; then nothing is written.
        if now.text != made.before:
            if made.after is None or now.sha256 != hash_text(made.after):
                raise ExpectedError(f"{path} was changed after this repair; it was left alone.")
            old = FileState(text=made.before, mode=made.mode, owner=made.owner, group=made.group)
            write_file(path, old, now, self._admin, self._home, as_root=step.as_root)
        code, output = _run(self._admin, edit.activate, step, self._say)
        if code:
            raise _StepFailed(f"{path} is as it was, but: {_last_words(code, output)}.")


def _owner_of(before: FileState, step: repair.RepairStep) -> tuple[int, int]:
    """Return owner and group for the new file: those of the old one, else of root or this user."""
    if before.text is not None:
        return before.owner, before.group
    return (0, 0) if step.as_root else (os.geteuid(), os.getegid())


def _preview(step: repair.RepairStep, admin: Administrator) -> repair.StepPreview:
    # A preview must not ask for a password.
    may_ask = admin.way in ("root", "passwordless")
    if step.done is not None:
        if step.done.as_root and not may_ask:
            return repair.StepPreview(state="not known")
        if _is_in_place(step.done, admin, ask_root=may_ask):
            return repair.StepPreview(state="in place")
    if step.edit is None:
        return repair.StepPreview(state="needed")
    path = os.path.realpath(step.edit.path)
    if not os.path.isdir(os.path.dirname(path)):
        return repair.StepPreview(state="blocked", problem=f"There is no folder for {path}.")
    try:
        found = read_file(path, admin if may_ask else None)
    except HiddenFile as error:
        return repair.StepPreview(state="not known", problem=error.message)
    except ExpectedError as error:
        return repair.StepPreview(state="blocked", problem=error.message)
    after = step.edit.apply_to(found.text)
    return repair.StepPreview(
        state="in place" if after == found.text else "needed",
        before=found.text,
        after=after,
        sha256=found.sha256,
    )


def _is_in_place(probe: repair.Probe, admin: Administrator, *, ask_root: bool) -> bool:
    try:
        code, lines = admin.run(probe.argv, as_root=probe.as_root and ask_root, timeout_s=_PROBE_S)
    except (ExpectedError, TimeoutError):
        return False
    # The whole output must match: a part of it could appear in an error message.
    return code == 0 and re.fullmatch(probe.shows, "\n".join(lines).strip()) is not None


def _run(
    admin: Administrator, argv: Sequence[str], step: repair.RepairStep, say: Say
) -> tuple[int, str]:
    """Run a command of a step; return its exit code and output."""
    if not argv:  # an edit may need no activation
        return 0, ""
    try:
        code, lines = admin.run(
            argv,
            as_root=step.as_root,
            timeout_s=step.timeout_s,
            on_line=lambda line: say(admin.clean(line)),
        )
    except TimeoutError as error:
        raise _StepFailed(f"{step.says}: {argv[0]} had {error}.") from error
    return code, admin.clean("\n".join(lines))[-_MAX_OUTPUT_CHARACTERS:]


def _last_words(code: int, output: str) -> str:
    said = output.strip().rpartition("\n")[2]
    return f"{said} (exit code {code})" if said else f"exit code {code}"
