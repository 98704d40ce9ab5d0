"""Repairs of a node: steps that change it, previews, and records of the changes.

A step is a command or an edit of a file. A file is edited by whole lines, so that the node can show
the text before and after, and other content of the file stays. A step with a probe is skipped, with
nothing to undo, if the probe finds it in place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from agents.contract.names import check_number, check_text, check_time

QUICK_STEP_S = 60.0
"""Maximum duration of a step that only changes a setting, in seconds."""
MAX_CHANGES = 10**6
"""Maximum number of a change."""
MAX_EDITED_BYTES = 128 << 10
"""Maximum size of an edited file, in bytes: its old and new text travel in one message."""
INSTALL_STEP_S = 3600.0
"""Maximum duration of a step that downloads and installs packages, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Command whose output shows whether a step is in place."""

    argv: tuple[str, ...]
    shows: str
    """Regular expression that matches the whole output, stripped, if the step is in place. A failed
    command means that it is not in place."""
    as_root: bool = False
    """True if only an administrator can run it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEdit:
    """New text of one file: either `content`, or its lines after `swap` and `add`.

    >>> FileEdit(path="/etc/fstab", add=("/swap none swap sw 0 0",)).apply_to("a\\n")
    'a\\n/swap none swap sw 0 0\\n'
    """

    path: str
    content: str | None = None
    """Whole text; None: only the lines below are edited."""
    swap: tuple[tuple[str, str], ...] = ()
    """Pairs of a regular expression and the text that replaces its matches in each line."""
    add: tuple[str, ...] = ()
    """Lines to append unless they are present."""
    mode: int = 0o644
    """Mode of a new file; an existing file keeps its own."""
    activate: tuple[str, ...] = ()
    """Command that makes programs read the changed or restored file; empty: no command."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"path is {self.path!r}; it must begin with /")
        if (self.content is None) == (not self.swap and not self.add):
            raise ValueError(f"the edit of {self.path} needs either content or lines")

    def apply_to(self, before: str | None) -> str:
        """Return the text after the edit of `before`; None: the file does not exist."""
        if self.content is not None:
            return self.content
        # Only at newlines: `splitlines` also splits at form feeds and others, which are text here.
        lines = before.removesuffix("\n").split("\n") if before else []
        for pattern, text in self.swap:
            lines = [re.sub(pattern, text, line) for line in lines]
        present = {line.strip() for line in lines}
        lines += [line for line in self.add if line.strip() not in present]
        return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairStep:
    """One change on a node: a command to run, or the edit of a file."""

    says: str
    """Description of the step, in words."""
    run: tuple[str, ...] = ()
    """Command as an argument list, without `sudo`; empty: the step is `edit`."""
    edit: FileEdit | None = None
    as_root: bool = True
    """True if it needs administrator rights."""
    undo: tuple[str, ...] = ()
    """Command that undoes it; empty: a file is restored, a command cannot be undone."""
    undo_note: str = ""
    """Why nothing needs to be undone; empty: undo is needed."""
    done: Probe | None = None
    """Probe that shows whether it is in place; None: an edit is in place if it changes nothing."""
    needs: tuple[Probe, ...] = ()
    """Probes that must hold on the node just before the step; else nothing is changed. They repeat
    there what the master was told, so that no other node chooses what is done."""
    timeout_s: float = QUICK_STEP_S
    """Maximum duration, in seconds."""

    def __post_init__(self) -> None:
        if bool(self.run) == (self.edit is not None):
            raise ValueError(f"the step {self.says!r} needs either a command or an edit")

    @property
    def can_undo(self) -> bool:
        """True if undoing restores the node's former state."""
        return bool(self.undo or self.undo_note or self.edit is not None)


AdminWay = Literal["root", "passwordless", "password", "none"]
"""Access to administrator rights. `root`: the agent runs as root; `passwordless`: sudo needs no
password; `password`: sudo may work with a password; `none`: no sudo."""
Progress = Literal["pending", "running", "done", "in place", "failed"]
"""State of a step. `in place`: it was so before, and is not a change by Rackless."""
Undone = Literal["no", "yes", "not needed", "impossible", "failed"]
ABSENT = "absent"
"""Stands for the hash of a missing file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPreview:
    """Effect of a step on the node in its present state."""

    state: Literal["needed", "in place", "blocked", "not known"]
    """`blocked`: it would fail, see `problem`; `not known`: only an administrator can find out."""
    before: str | None = None
    """Present text of the edited file; None: a command, a missing file, or not known."""
    after: str | None = None
    sha256: str = ""
    """Hash of `before`; ABSENT: the file is missing; empty: not known, or a command."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairPreview:
    steps: tuple[StepPreview, ...]
    admin: AdminWay


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairOrder:
    """Repair to apply, as the user confirmed it."""

    repair: str
    title: str
    by: str
    """User who asked for it, such as `anna@desk`."""
    steps: tuple[RepairStep, ...]
    expected: tuple[str, ...]
    """`StepPreview.sha256` of each step as shown; a file that has changed since is not edited."""
    needs_restart: bool = False

    def check_foreign(self) -> None:
        if len(self.expected) != len(self.steps):
            raise ValueError(f"expected has {len(self.expected)} items, steps {len(self.steps)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UndoOrder:
    """Changes to undo, by number; empty: all."""

    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeStep:
    """One step of a change, and its result."""

    step: RepairStep
    state: Progress = "pending"
    exit_code: int | None = None
    output: str = ""
    """Last lines of its output, without secrets."""
    path: str = ""
    """Edited file, with links resolved; empty: a command."""
    before: str | None = None
    """Text before the edit; None: the file was missing."""
    after: str | None = None
    mode: int | None = None
    """Mode before the edit, with owner and group; None: the file was missing."""
    owner: int = 0
    group: int = 0
    undone: Undone = "no"
    undo_output: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One repair that was applied to a node, as recorded in its log."""

    number: int
    repair: str
    title: str
    by: str
    began_s: float
    """Start, in seconds since 1970 by the node's clock."""
    ended_s: float | None = None
    """End, by the same clock; None: interrupted, or still running."""
    steps: tuple[ChangeStep, ...] = ()
    problem: str = ""
    """Why it stopped early; empty: it was applied."""
    needs_restart: bool = False
    undone_s: float | None = None
    """Time at which everything that can be undone was undone; None: it is in force."""
    undo_problem: str = ""
    """Parts that were not undone, and why; empty: undo was not tried, or was complete."""

    def check_foreign(self) -> None:
        check_number("number", self.number, 1, MAX_CHANGES)
        for name in ("repair", "title", "by"):
            check_text(name, getattr(self, name))
        for name in ("began_s", "ended_s", "undone_s"):
            check_time(name, getattr(self, name))

    @property
    def did_something(self) -> bool:
        """True if a step changed the node, or may have."""
        return any(step.state in ("done", "running") for step in self.steps)

    @property
    def has_undo_left(self) -> bool:
        """True if undo was not tried yet, or failed. Steps that cannot be undone are reported
        once.
        """
        return self.undone_s is None and any(
            step.state in ("done", "running") and step.undone in ("no", "failed")
            for step in self.steps
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeList:
    """Changes in a node's log, oldest first."""

    changes: tuple[Change, ...]
    admin: AdminWay


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairWork:
    """First line of input to the agent's `repair` command; the second one is sudo's password, or
    empty.
    """

    apply: RepairOrder | None = None
    undo: UndoOrder | None = None

    def __post_init__(self) -> None:
        if (self.apply is None) == (self.undo is None):
            raise ValueError("the work needs either apply or undo")


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairFailure:
    """Reason why the `repair` command changed nothing."""

    message: str
    hint: str = ""
    reason: Literal["password", "sudo", ""] = ""
    """`password`: sudo rejected it; `sudo`: missing or not permitted."""
