"""Print which texts a longer language would cut: `python -m tests.gui.longer [PART OF A NAME]`.

Exits with 1 if any would. QT_SCALE_FACTOR chooses the screen.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZES = ((960, 600), (1280, 800))
PATIENCE = 20
"""How often it is looked again: layouts take some rounds of events until they come to rest."""


def main() -> int:
    """Look at every picture."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    from tests.gui.pictures import set_scenes

    only = sys.argv[1] if len(sys.argv) > 1 else ""
    _lengthen_columns()
    found = False
    with tempfile.TemporaryDirectory() as logs:
        for name, stage, widget in set_scenes(Path(logs), only):
            for complaint in dict.fromkeys(look(stage, widget)):
                print(f"{name}: {complaint}")
                found = True
    return int(found)


def look(stage: Any, widget: Any) -> Iterator[str]:
    """Make the texts of a window longer, and yield what is cut then."""
    from tests.gui.reach import find_cut, lengthen_all

    lengthen_all(widget)
    if widget is not stage.window:
        yield from _settled(stage, widget, find_cut)
        return
    for size in SIZES:
        widget.resize(*size)
        for complaint in _settled(stage, widget, find_cut):
            yield f"{size[0]} x {size[1]}: {complaint}"


def _settled(stage: Any, widget: Any, find: Any) -> list[str]:
    complaints: list[str] = []
    for _ in range(PATIENCE):
        stage.settle(0.02)
        complaints = list(find(widget))
        if not complaints:
            break
    return complaints


def _lengthen_columns() -> None:
    from PySide6.QtCore import Qt

    from app.gui.tables.rows_model import RowsModel
    from tests.gui.reach import lengthen

    original = RowsModel.headerData

    def header(self: Any, section: int, side: Any, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        value = original(self, section, side, role)
        return lengthen(value) if isinstance(value, str) else value

    RowsModel.headerData = header  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
