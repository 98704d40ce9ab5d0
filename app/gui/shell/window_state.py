"""What the window remembers from one time to the next: size, page, what was said once.

Read before the window is made and written after it is gone, so the Qt thread never waits for it.
A file that cannot be read means defaults.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.paths import replace_text

FILE_NAME = "window.json"


@dataclass(slots=True)
class WindowState:
    geometry: str = ""
    """QWidget.saveGeometry as hex; empty: never saved."""
    page: str = "overview"
    was_told_closing: bool = False
    """That runs go on without the window was said."""
    wall_as_table: bool = False
    """The overview lists devices instead of showing cards."""
    draft: dict[str, str] = field(default_factory=dict)
    """Answers of the New run form that was left without starting; empty: there are none."""
    was_told_hiding: bool = False
    """That a closed window waits in the tray was said."""


def read_window_state(home: Path) -> WindowState:
    """Return what was remembered below `home`."""
    try:
        stored: Any = json.loads((home / FILE_NAME).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return WindowState()
    state = WindowState()
    if isinstance(stored, dict):
        for name, default in asdict(state).items():
            if isinstance(stored.get(name), type(default)):
                setattr(state, name, stored[name])
    return state


def write_window_state(home: Path, state: WindowState) -> None:
    """Remember `state`; a place that cannot be written is no reason to disturb a person."""
    with contextlib.suppress(OSError):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_text(home / FILE_NAME, json.dumps(asdict(state)))
