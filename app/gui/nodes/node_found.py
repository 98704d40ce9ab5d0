"""Hardware of a node that was just added, and the next step: set up its environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from agents.contract.node import EnvironmentReport
from app.core.new_nodes import TakeBackKey
from app.events import NodeSnapshot
from app.flows.add_node import describe_found, warn_of_lost_key
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.kit.fact_rows import FactRows
from app.gui.kit.primitives import Button, make_label
from app.gui.session.banner_task import build_environment_in_banner
from app.gui.session.context import Context
from app.presentation.environment_text import describe_environment, describe_trial

if TYPE_CHECKING:
    from app.nodes.key_copy import CopiedKey


class NodeFound(QWidget):
    another_wanted = Signal()
    done = Signal()
    changed = Signal()
    """The content has changed its height."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._name = ""
        self._title = make_label(role="heading", wraps=True)
        self._rows = FactRows(across_px=16, down_px=6)
        self._notes = make_label(role="advice", wraps=True)
        self._state = make_label(wraps=True)
        self.banner = Banner(context.theme)
        self.another = Button(context.theme, "Add another PC", self.another_wanted.emit)
        self.setup = Button(
            context.theme, "Set up environment", self._setup, icon="setup", role="primary"
        )
        self.finish = Button(context.theme, "Done", self.done.emit)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.another)
        row.addStretch(1)
        row.addWidget(self.finish)
        row.addWidget(self.setup)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(self._title)
        column.addLayout(self._rows)
        for part in (self._notes, self._state, self.banner):
            column.addWidget(part)
        column.addStretch(1)
        column.addLayout(row)

    def show_node(self, node: NodeSnapshot, copied: CopiedKey | None = None) -> None:
        """Show the found hardware, and whether the node is ready to train.

        `copied`: key that was added there to log in; None: none was.
        """
        self.banner.hide()
        if copied is not None and not copied.was_there:
            made = ", which was just made," if copied.is_new else ""
            self.banner.show_message(
                "good",
                f"The key {copied.key}{made} was added to ~/.ssh/authorized_keys there",
                "",
                ("Take it back", self._take_back),
            )
        self._name = node.name
        found = describe_found(node)
        self._title.setText(f"{node.name} is added")
        self._rows.show_rows(found.rows)
        self._notes.setText("\n".join(found.notes))
        # Notes are warnings that do not stop the user: little disk, no compiler, no GPU.
        self._notes.setVisible(bool(found.notes))
        self._state.setText(
            "Its training environment is set up: it is ready to train."
            if found.is_ready
            else "To train, it needs a training environment: Python packages in a folder of "
            "their own. Setting it up takes a few minutes, now or later on the Nodes page."
        )
        self.setup.setVisible(not found.is_ready)
        (self.finish if found.is_ready else self.setup).setFocus()
        self.changed.emit()

    def _take_back(self) -> None:
        if not confirm(
            self,
            self._context.theme,
            "Take the key back?",
            warn_of_lost_key(self._name),
            "Take it back",
            is_dangerous=True,
        ):
            return
        self._context.bridge.do(
            TakeBackKey(name=self._name), self._show_taken_back, self.banner.show_error
        )

    def _show_taken_back(self, was_there: bool) -> None:
        self.banner.show_message(
            "calm",
            "The key is taken back",
            f"Without another key, {self._name} can no longer be reached.",
        )
        self.changed.emit()

    def _setup(self) -> None:
        build_environment_in_banner(self._context, self.banner, self._name, self._show_ready)
        self.changed.emit()

    def _show_ready(self, report: EnvironmentReport) -> None:
        self.banner.show_message(
            "good",
            f"{self._name} is ready to train",
            "; ".join((describe_environment(report), *describe_trial(report))),
        )
        self._state.hide()
        self.setup.hide()
        self.finish.setFocus()
        self.changed.emit()
