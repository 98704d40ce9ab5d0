"""Newest log lines of the selected node, read from the node itself."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout

from agents.contract.node import LogTail
from app.core.nodes import ReadNodeLogs
from app.errors import RacklessError
from app.flows.node_logs import join_tails, summarise
from app.gui.kit.primitives import Button, make_label, make_panel
from app.gui.logs.log_view import LogView
from app.gui.repairs.node_pane import NodePane
from app.gui.session.bridge import work_of
from app.gui.session.context import Context


class NodeLogPane(NodePane):
    """The ends of a node's logs."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
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
        """Show another node; empty: none is selected."""
        super().show_node(name)
        self.again.setEnabled(bool(name))

    def refresh(self) -> None:
        """Read the logs from the node."""
        name = self._shown = self._name
        self.view.clear()
        self.summary.setText(
            f"Reading from {name}\u2026" if name else "Select a node to read its logs."
        )
        if name:
            self.read(work_of(ReadNodeLogs(name=name)), self._take, self._fail)
        else:
            self.stop_reading()

    def _take(self, tails: tuple[LogTail, ...]) -> None:
        self.summary.setText(summarise(self._name, tails))
        self.view.append(join_tails(tails, self._context.cluster.now_s()).encode())

    def _fail(self, error: RacklessError) -> None:
        self.summary.setText(str(error))
