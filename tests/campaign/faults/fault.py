"""A fault: what it does to a run, and what has to come of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from tests.campaign.case import Case

CGROUPS = {name: Path("/sys/fs/cgroup") / name for name in ("memory", "cpu", "freezer")}
"""Control groups that some faults need, of the first version."""
Recovery = Literal["untouched", "recovered", "either"]
"""Whether the attempt must go on as it is, another pass must take over, or both are right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What has to come of a fault."""

    named: tuple[tuple[str, ...], ...] = ()
    """Words that one line of the keeper has to hold, in alternatives; {node} and {rank} stand for
    the victim's. Empty: the fault needs no word, since nothing is wrong with the run."""
    within_s: float = 5.0
    """Time in which it has to be named, in seconds."""
    recovery: Recovery = "untouched"
    back_s: float = 20.0
    """Time in which training has to go on after it, beside the load of the model, in seconds."""
    alarms: bool = False
    """Whether the keeper may call the run lost or standing still."""


class Fault:
    """Base of all faults. A fault is made anew for each case, with its own draws."""

    name: ClassVar[str]
    does: ClassVar[str]
    """What it does, for the table."""
    needs: ClassVar[str] = ""
    """What it needs beside namespaces: `three nodes`, `compiler`, `loop devices`, or
    one of CGROUPS."""
    is_at_start: ClassVar[bool] = False
    """Whether it has to be prepared before the run starts, so that it is the first to strike it."""
    strikes_while_loading: ClassVar[bool] = False
    """Whether it strikes as soon as the ranks live, not at a step; such a one is at the start."""
    leaves_as_before: ClassVar[bool] = True
    """Whether a run that it does not interrupt may take another fault."""
    lasts_s: float = 0.0
    """Time from `do` to `undo`, in seconds."""

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        """Draw what varies, such as how long a cable is cut."""

    @property
    def expectation(self) -> Expectation:
        raise NotImplementedError

    @property
    def detail(self) -> str:
        """What was drawn, for the table."""
        return f"{self.lasts_s:.0f} s" if self.lasts_s else ""

    def prepare(self, case: Case) -> None:
        """Set the stage before the run starts."""

    def do(self, case: Case) -> None:
        raise NotImplementedError

    def undo(self, case: Case) -> None:
        """End the fault; called once, `lasts_s` after `do`."""
