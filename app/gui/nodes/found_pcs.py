"""PCs of ~/.ssh/config and of this network, to choose one to add."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.core.new_nodes import DiscoverPcs
from app.errors import RacklessError
from app.gui.kit.banner import Banner
from app.gui.kit.primitives import Button, make_label
from app.gui.session.context import Context
from app.gui.tables.rows_model import Column, RowsModel
from app.gui.tables.view import TableView
from app.nodes.discovery.candidate import PcCandidate, warn_of_overlay
from app.telemetry.state import Status
from app.text import DASH, count_of

_FOUND_BY = {"ssh-config": "SSH config", "mdns": "mDNS", "neighbour": "Network"}


def candidate_columns() -> list[Column[PcCandidate]]:
    return [
        Column(title="PC", text=lambda c: c.name or c.target, width_px=130),
        Column(title="Address", text=lambda c: c.host or DASH, width_px=120),
        Column(title="Found by", text=lambda c: _FOUND_BY[c.sources[0]], width_px=108),
        Column(
            title="SSH",
            text=lambda c: describe_port(c).text,
            status=describe_port,
            width_px=130,
            stretches=True,
        ),
    ]


def describe_port(one: PcCandidate) -> Status:
    """Return whether a candidate can be added, in words."""
    if one.node:
        return Status("calm", f"is {one.node}")
    if one.state == "not-tried":
        return Status("calm", "behind a host")
    if one.state == "closed":
        return Status("warning", "no answer")
    server = one.banner.removeprefix("SSH-2.0-")
    return Status("good", f"{server}, {one.overlay}" if one.overlay else server)


class FoundPcs(QWidget):
    used = Signal(str)
    """Target of the chosen PC, as typed after `ssh`."""
    back = Signal()

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self.model: RowsModel[PcCandidate] = RowsModel(
            candidate_columns(), key=lambda c: (c.target, c.host, c.port)
        )
        self.table = TableView(context.theme, self.model, "Found PCs")
        self.table.setMinimumHeight(220)
        self.banner = Banner(context.theme, can_close=False)
        self.use = Button(context.theme, "Use this PC", self._use, role="primary")
        self.again = Button(context.theme, "Search again", self.look, icon="refresh")
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(Button(context.theme, "Back", self.back.emit))
        row.addStretch(1)
        row.addWidget(self.again)
        row.addWidget(self.use)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label("Found PCs", "heading"))
        column.addWidget(
            make_label(
                "Names of ~/.ssh/config, PCs that announce themselves, and those that this PC has "
                "talked to. Nothing is sent to them but a connection to their SSH port.",
                "caption",
                wraps=True,
            )
        )
        column.addWidget(self.table, 1)
        column.addWidget(self.banner)
        column.addLayout(row)
        self.table.chosen.connect(self._choose)
        self.table.opened.connect(self._use)
        self._choose()

    def look(self) -> None:
        """Search for PCs; takes about three seconds."""
        self.again.setEnabled(False)
        self.banner.show_message("busy", "Searching for PCs")
        self._context.bridge.do(DiscoverPcs(), self._show, self._show_failure)

    def _show(self, found: tuple[PcCandidate, ...]) -> None:
        self.again.setEnabled(True)
        self.model.reset(found)
        if found:
            self.banner.hide()
            self.table.selectRow(0)
        else:
            self.banner.show_message(
                "calm", "No PC was found", "Go back and type its address: hostname -I prints it."
            )
        self.table.setAccessibleDescription(count_of(len(found), "PC"))
        self._choose()

    def _show_failure(self, error: RacklessError) -> None:
        self.again.setEnabled(True)
        self.banner.show_error(error)

    def _choose(self) -> None:
        one = self.table.selected()
        self.use.setEnabled(one is not None and not one.node)
        if one is not None and one.overlay:
            self.banner.show_message("warning", warn_of_overlay(one.overlay))
        elif one is not None:
            self.banner.hide()

    def _use(self) -> None:
        one = self.table.selected()
        if one is not None and not one.node:
            self.used.emit(one.target)
