"""Newest log lines of the selected node, read from the node itself."""

from __future__ import annotations

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from agents.contract.node import LogTail
from app.errors import RacklessError
from app.flows.node_logs import join_tails, summarise
from app.gui.kit.primitives import Button, make_label, make_panel
from app.gui.logs.log_view import LogView
from app.gui.session.bridge import Op
from app.gui.session.context import Context


class NodeLogPane(QWidget):
    """Shows the ends of a node's logs; queries the node only while visible."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._op: Op | None = None
        self._name, self._shown = "", ""
        # Delay to the next event loop turn: arrow keys pass over rows, and only the last is
        # queried.
        self._soon = QTimer(self, interval=0, singleShot=True)
        self._soon.timeout.connect(self._refresh_if_other)
        self.view = LogView(context.theme)
        self.view.setAccessibleName("Node logs")
        self.summary = make_label(role="muted", wraps=True)
        self.again = Button(
            context.theme,
            "Refresh",
            self.refresh,
            icon="refresh",
            role="link",
            tip="Read the newest lines from the node",
        )
        head = QHBoxLayout()
        head.addWidget(self.summary, 1)
        head.addWidget(self.again, 0, Qt.AlignmentFlag.AlignTop)
        panel = make_panel()
        inset = QVBoxLayout(panel)
        inset.setContentsMargins(4, 4, 4, 4)
        inset.addWidget(self.view)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addLayout(head)
        column.addWidget(panel, 1)
        self.show_node("")

    def show_node(self, name: str) -> None:
        """Show the logs of another node; empty: none is selected."""
        self._name = name
        self.again.setEnabled(bool(name))
        self._soon.start()

    def refresh(self) -> None:
        """Read the logs from the node."""
        if self._op is not None:
            self._op.cancel()
        name = self._shown = self._name
        self.view.clear()
        self.summary.setText(
            f"Reading from {name}\u2026" if name else "Select a node to read its logs."
        )
        if name:
            self._op = self._context.bridge.run(
                lambda core, report: core.nodes.logs(name), self._take, self._fail
            )

    def showEvent(self, event: QShowEvent) -> None:
        # Another node may have been selected while this tab was hidden.
        super().showEvent(event)
        self._soon.start()

    def _refresh_if_other(self) -> None:
        if self._name != self._shown and self.isVisible():
            self.refresh()

    def _take(self, tails: tuple[LogTail, ...]) -> None:
        self.summary.setText(summarise(self._name, tails))
        self.view.append(join_tails(tails, self._context.cluster.now_s()).encode())

    def _fail(self, error: RacklessError) -> None:
        self.summary.setText(str(error))
