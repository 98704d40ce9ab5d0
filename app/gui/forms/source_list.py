"""List of further sources of training data, to add and remove, with path and weight.

The first source has a field of its own; only its weight stands here, once there are others. The
other settings of a source, which come from a run file, are kept and shown.
"""

from __future__ import annotations

import json
from typing import Any

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app.gui.kit.primitives import Button, IconButton, make_label
from app.gui.kit.theme import Theme

_WEIGHT_PX = 64
_FIRST: dict[str, Any] = {"path": "-"}


class SourceList(QWidget):
    edited = Signal()
    """The user has changed, added or removed a source."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        # All sources, of which the first one has its path elsewhere.
        self._sources: list[dict[str, Any]] = [dict(_FIRST)]
        self.rows: list[SourceRow] = []
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        self._column = QVBoxLayout()
        self._column.setSpacing(8)
        column.addLayout(self._column)
        foot = QHBoxLayout()
        self.add = Button(theme, "Add data", self._add, icon="add")
        foot.addWidget(self.add)
        foot.addStretch(1)
        column.addLayout(foot)
        self.setFocusProxy(self.add)

    def answer(self) -> str:
        """Return all sources as a list in JSON; empty: there is only a plain one."""
        if self._sources == [_FIRST]:
            return ""
        return json.dumps(self._sources)

    def set_answer(self, text: str) -> None:
        sources = json.loads(text) if text else [_FIRST]
        # Defaults say nothing, and would keep a single source in the list.
        self._sources = [
            {
                key: value
                for key, value in one.items()
                if value not in (None, []) and (key, value) != ("weight", 1)
            }
            for one in sources
        ]
        self._sources[0]["path"] = "-"
        self._show()

    def _show(self) -> None:
        for row in self.rows:
            row.hide()
            row.deleteLater()
        self.rows = []
        # Of one source without further settings nothing is shown.
        shown = self._sources if self._sources != [_FIRST] else []
        for place, source in enumerate(shown):
            row = SourceRow(self._theme, source, is_first=place == 0)
            row.edited.connect(self.edited)
            row.removed.connect(self._remove)
            self._column.addWidget(row)
            self.rows.append(row)

    def _add(self) -> None:
        self._sources.append({"path": ""})
        self._show()
        self.rows[-1].path.setFocus()
        self.edited.emit()

    def _remove(self, row: SourceRow) -> None:
        self._sources = [one for one in self._sources if one is not row.source]
        if len(self._sources) == 1:
            self._sources[0].pop("weight", None)  # without others it would only repeat epochs
        self._show()
        self.edited.emit()


class SourceRow(QWidget):
    edited = Signal()
    removed = Signal(object)
    """This row, whose source is to be removed."""

    def __init__(self, theme: Theme, source: dict[str, Any], *, is_first: bool) -> None:
        super().__init__()
        self.source = source
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        self.path = QLineEdit(source["path"])
        self.path.setAccessibleName("Further training data")
        self.path.setPlaceholderText("more.jsonl, or the id of a public data set")
        self.path.textEdited.connect(lambda text: self._set("path", text))
        if is_first:
            row.addWidget(make_label("The data above"), 1)
        else:
            row.addWidget(self.path, 1)
            row.addWidget(Button(theme, "Choose\u2026", self._choose, icon="folder"))
        if other := describe_rest(source):
            row.addWidget(make_label(other, "muted"))
        row.addWidget(make_label("Weight", "muted"))
        weight = source.get("weight", 1)
        # Text that was typed and is no number yet stays.
        self.weight = QLineEdit(weight if isinstance(weight, str) else f"{weight:g}")
        self.weight.setAccessibleName("Weight")
        self.weight.setFixedWidth(_WEIGHT_PX)
        self.weight.textEdited.connect(lambda text: self._set("weight", text))
        row.addWidget(self.weight)
        self.remove = IconButton(
            theme, "delete", "Remove this data", lambda: self.removed.emit(self)
        )
        if is_first:  # keeps the place, so that the weights stand below each other
            self.remove.setEnabled(False)
        row.addWidget(self.remove)

    def _set(self, name: str, text: str) -> None:
        self.source[name] = text
        self.edited.emit()

    def _choose(self) -> None:
        chosen, _ = QFileDialog.getOpenFileName(self, "Further training data")
        if chosen:
            self.path.setText(chosen)
            self._set("path", chosen)


def describe_rest(source: dict[str, Any]) -> str:
    """Return the settings of a source that the list does not edit.

    >>> describe_rest({"path": "a", "split": "test", "max_rows": 5000, "format": "chat"})
    'chat, split test, at most 5,000 rows'
    """
    parts = [source.get("format") or ""]
    if source.get("columns"):
        parts.append("columns mapped")
    if source.get("split"):
        parts.append(f"split {source['split']}")
    if source.get("max_rows"):
        parts.append(f"at most {source['max_rows']:,} rows")
    return ", ".join(filter(None, parts))
