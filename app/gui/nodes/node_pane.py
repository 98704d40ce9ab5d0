"""A tab about the selected node, which is asked only while somebody looks at the tab."""

from __future__ import annotations

from PySide6.QtCore import QTimer
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QWidget

from app.gui.session.bridge import Op
from app.gui.session.context import Context


class NodePane(QWidget):
    """Follows the selection in the list of nodes; a pane says in `refresh` what it asks for."""

    asks_each_time = False
    """Whether the node is asked again whenever the tab is opened, as it may have changed."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._op: Op | None = None
        # The node that is selected, and the one that was asked last.
        self._name, self._shown = "", ""
        # Delay to the next event loop turn: arrow keys pass over rows, and only the last is
        # queried.
        self._soon = QTimer(self, interval=0, singleShot=True)
        self._soon.timeout.connect(self._refresh_if_other)

    def show_node(self, name: str) -> None:
        """Show another node; empty: none is selected."""
        self._name = name
        self._soon.start()

    def refresh(self) -> None:
        """Ask the selected node, and show what it says."""
        raise NotImplementedError

    def showEvent(self, event: QShowEvent) -> None:
        # Another node may have been selected while this tab was hidden.
        super().showEvent(event)
        if self.asks_each_time:
            self._shown = ""
        self._soon.start()

    def _refresh_if_other(self) -> None:
        if self._name != self._shown and self.isVisible():
            self.refresh()
