"""Repairs of a node: steps that change something there, previews and records of what they change.

A step is a command or an edit of a file. A file is edited by whole lines, so that the node can show
the text before and after, and what else is in the file stays. A step that says how to see that it
is in place already is skipped then, and has nothing to undo.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from agents.contract.names import check_number, check_text, check_time

QUICK_STEP_S = 60.0
"""Maximum duration of a step that only sets something, in seconds."""
MAX_CHANGES = 10**6
"""Largest number of a change."""
MAX_EDITED_BYTES = 128 << 10
"""Maximum size of a file that is edited, in bytes: its old and new text travel in one message."""
INSTALL_STEP_S = 3600.0
"""Maximum duration of a step that downloads and installs packages, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Command whose output says whether a step is in place already."""

    argv: tuple[str, ...]
    shows: str
    """Regular expression that its whole output, stripped, matches in that case. A command that
    fails shows nothing."""
    as_root: bool = False
    """Whether only an administrator can ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEdit:
    """New text of one file: `content` as a whole, or else its lines after `swap`, and `add`.

    >>> FileEdit(path="/etc/fstab", add=("/swap none swap sw 0 0",)).apply_to("a\\n")
    'a\\n/swap none swap sw 0 0\\n'
    """

    path: str
    content: str | None = None
    """Whole text; None: the lines below are edited."""
    swap: tuple[tuple[str, str], ...] = ()
    """Regular expressions, and what each line has from then on where one matches."""
    add: tuple[str, ...] = ()
    """Lines to add at the end, those that are there already left out."""
    mode: int = 0o644
    """Mode of a file that is new; another one keeps its own."""
    activate: tuple[str, ...] = ()
    """Command that makes programs read the file, after it was written or put back; empty: none."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"path is {self.path!r}; it must begin with /")
        if (self.content is None) == (not self.swap and not self.add):
            raise ValueError(f"the edit of {self.path} needs either content or lines")

    def apply_to(self, before: str | None) -> str:
        """Return the text after the edit. `before`: the text now; None: there is no such file."""
        if self.content is not None:
            return self.content
        # Only at newlines: `splitlines` knows more ends of a line, which belong to its text here.
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
    """What it does, in words."""
    run: tuple[str, ...] = ()
    """Command as an argument list, without `sudo`; empty: `edit` says what to do."""
    edit: FileEdit | None = None
    as_root: bool = True
    """Whether an administrator's rights are needed."""
    undo: tuple[str, ...] = ()
    """Command that takes it back; empty: a file is put back, a command cannot be taken back."""
    undo_note: str = ""
    """Why nothing needs to be taken back; empty: it does."""
    done: Probe | None = None
    """How to see that it is in place already; None: an edit that changes nothing is."""
    timeout_s: float = QUICK_STEP_S
    """Maximum duration, in seconds."""

    def __post_init__(self) -> None:
        if bool(self.run) == (self.edit is not None):
            raise ValueError(f"the step {self.says!r} needs either a command or an edit")

    @property
    def can_undo(self) -> bool:
        """Whether undoing leaves the node as it was."""
        return bool(self.undo or self.undo_note or self.edit is not None)


AdminWay = Literal["root", "passwordless", "password", "none"]
"""How an administrator's rights are had on a node. `root`: the agent has them; `passwordless`: sudo
gives them; `password`: sudo may, with a password; `none`: there is no sudo."""
Progress = Literal["pending", "running", "done", "in place", "failed"]
"""State of a step. `in place`: it was so before, and is no change of ours."""
Undone = Literal["no", "yes", "not needed", "impossible", "failed"]
ABSENT = "absent"
"""In place of a hash: there is no such file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPreview:
    """What a step would do on the node as it is now."""

    state: Literal["needed", "in place", "blocked", "not known"]
    """`blocked`: it would fail, see `problem`; `not known`: only an administrator can see it."""
    before: str | None = None
    """Text of the edited file now; None: a command, no such file, or not known."""
    after: str | None = None
    sha256: str = ""
    """Hash of `before`; ABSENT: there is no such file; empty: not known, or a command."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairPreview:
    steps: tuple[StepPreview, ...]
    admin: AdminWay


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairOrder:
    """A repair to apply, as the person agreed to it."""

    repair: str
    title: str
    by: str
    """Who asked for it, such as `anna@desk`."""
    steps: tuple[RepairStep, ...]
    expected: tuple[str, ...]
    """`StepPreview.sha256` of each step as shown: a file that has changed since is left alone."""
    needs_restart: bool = False

    def check_foreign(self) -> None:
        if len(self.expected) != len(self.steps):
            raise ValueError(f"expected has {len(self.expected)} items, steps {len(self.steps)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UndoOrder:
    """Changes to take back, by number; empty: all."""

    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeStep:
    """One step of a change, and what came of it."""

    step: RepairStep
    state: Progress = "pending"
    exit_code: int | None = None
    output: str = ""
    """Last lines that it printed, without secrets."""
    path: str = ""
    """File that was edited, with links resolved; empty: a command."""
    before: str | None = None
    """Its text before; None: there was no such file."""
    after: str | None = None
    mode: int | None = None
    """Its mode before, with owner and group; None: there was no such file."""
    owner: int = 0
    group: int = 0
    undone: Undone = "no"
    undo_output: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One repair that was applied to a node, as its log keeps it."""

    number: int
    repair: str
    title: str
    by: str
    began_s: float
    """Time by the node's clock, in seconds since 1970."""
    ended_s: float | None = None
    """None: it was interrupted, or is still being applied."""
    steps: tuple[ChangeStep, ...] = ()
    problem: str = ""
    """Why it went no further; empty: it was applied."""
    needs_restart: bool = False
    undone_s: float | None = None
    """Time at which all of it that can be taken back was; None: it is in force."""
    undo_problem: str = ""
    """What was not taken back, and why; empty: nobody tried, or all was."""

    def check_foreign(self) -> None:
        check_number("number", self.number, 1, MAX_CHANGES)
        for name in ("repair", "title", "by"):
            check_text(name, getattr(self, name))
        for name in ("began_s", "ended_s", "undone_s"):
            check_time(name, getattr(self, name))

    @property
    def did_something(self) -> bool:
        """Whether a step changed the node, or may have."""
        return any(one.state in ("done", "running") for one in self.steps)

    @property
    def has_undo_left(self) -> bool:
        """Whether undoing it was not tried yet, or failed. What only stays is said once."""
        return self.undone_s is None and any(
            one.state in ("done", "running") and one.undone in ("no", "failed")
            for one in self.steps
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeList:
    """What a node's log has, from the oldest to the newest."""

    changes: tuple[Change, ...]
    admin: AdminWay


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairWork:
    """First line to the agent's `repair` command; the second is sudo's password, or empty."""

    apply: RepairOrder | None = None
    undo: UndoOrder | None = None

    def __post_init__(self) -> None:
        if (self.apply is None) == (self.undo is None):
            raise ValueError("the work needs either apply or undo")


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairFailure:
    """Why the `repair` command changed nothing."""

    message: str
    hint: str = ""
    reason: Literal["password", "sudo", ""] = ""
    """`password`: sudo did not take it; `sudo`: there is none, or it allows nothing."""
