"""State of the window kept between sessions: geometry, page, draft, messages already shown.

Read before the window is created and written after it has closed, so that the Qt thread never waits
for the disk. A file that cannot be read means defaults.
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
    """The fields of window.json; renaming one resets it for every user."""

    geometry: str = ""
    """QWidget.saveGeometry in hex; empty if never saved."""
    page: str = "overview"
    was_told_closing: bool = False
    """True if the message that runs continue without the window was shown."""
    wall_as_table: bool = False
    """True if the overview shows a table instead of cards."""
    draft: dict[str, str] = field(default_factory=dict)
    """Answers of a New run form that was closed without starting; empty for none."""
    was_told_hiding: bool = False
    """True if the message that a closed window stays in the tray was shown."""


def read_window_state(home: Path) -> WindowState:
    """Return the state stored below `home`, with defaults for missing or invalid values."""
    try:
        stored: Any = json.loads((home / FILE_NAME).read_text(encoding="ascii"))
    # ValueError covers broken JSON as well as bytes that are not ASCII.
    except (OSError, ValueError):
        return WindowState()
    state = WindowState()
    if isinstance(stored, dict):
        for name, default in asdict(state).items():
            # One by one: a missing or mistyped value must not reset the others.
            if isinstance(stored.get(name), type(default)):
                setattr(state, name, stored[name])
    return state


def write_window_state(home: Path, state: WindowState) -> None:
    """Store `state`; failing to do so is not worth an error message."""
    with contextlib.suppress(OSError):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_text(home / FILE_NAME, json.dumps(asdict(state)))
