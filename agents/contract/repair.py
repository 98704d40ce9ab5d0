"""Repairs of a node: steps that change something there, and the record of what they changed.

A step is a command or an edit of a file. A file is edited by whole lines, so that the node can show
the text before and after, and what else is in the file stays. A step that says how to see that it
is in place already is skipped then, and has nothing to undo.
"""

from __future__ import annotations

from dataclasses import dataclass

QUICK_STEP_S = 60.0
"""Maximum duration of a step that only sets something, in seconds."""
INSTALL_STEP_S = 3600.0
"""Maximum duration of a step that downloads and installs packages, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Command whose output says whether a step is in place already."""

    argv: tuple[str, ...]
    shows: str
    """Regular expression that its whole output, stripped, matches in that case. A command that
    fails shows nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEdit:
    """New text of one file: `content` as a whole, or else its lines without `drop` and with `add`.

    >>> FileEdit(path="/etc/fstab", add=("/swap none swap sw 0 0",)).apply_to("a\\n")
    'a\\n/swap none swap sw 0 0\\n'
    """

    path: str
    content: str | None = None
    """Whole text; None: the lines below are edited."""
    drop: tuple[str, ...] = ()
    """Lines to leave out, compared without the white space around them."""
    add: tuple[str, ...] = ()
    """Lines to add where none of them is: in place of the first dropped one, else at the end."""
    mode: int = 0o644
    """Mode of a file that is new; another one keeps its own."""
    activate: tuple[str, ...] = ()
    """Command that makes programs read the file, after it was written or put back; empty: none."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"path is {self.path!r}; it must begin with /")
        if (self.content is None) == (not self.drop and not self.add):
            raise ValueError(f"the edit of {self.path} needs either content or lines")

    def apply_to(self, before: str | None) -> str:
        """Return the text after the edit. `before`: the text now; None: there is no such file."""
        if self.content is not None:
            return self.content
        dropped = {line.strip() for line in self.drop}
        kept: list[str] = []
        place: int | None = None
        for line in (before or "").splitlines():
            if line.strip() not in dropped:
                kept.append(line)
            elif place is None:
                place = len(kept)
        present = {line.strip() for line in kept}
        at = len(kept) if place is None else place
        kept[at:at] = [line for line in self.add if line.strip() not in present]
        return "".join(f"{line}\n" for line in kept)


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
