"""Details of one node as name and value pairs, and the results of a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from agents.contract.node import Calibration
from app.events import NodeSnapshot
from app.flows.repair import Offer, collect_offers
from app.gui.kit.help_link import open_help
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label, make_selectable
from app.gui.nodes.repair_dialog import RepairDialog
from app.gui.session.context import Context
from app.gui.tables.node_columns import check_columns, describe_clock, describe_environment
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.view import TableView
from app.presentation.check_text import summarise_check, summarise_part
from app.presentation.plan_text import describe_calibration
from app.provisioning.check_row import CheckRow
from app.telemetry.stream import DeviceKey
from app.text import (
    DASH,
    count_of,
    show_bytes,
    show_bytes_of,
    show_duration,
    show_foreign,
    show_moment,
)

NUM_COLUMNS = 3


def describe_node_facts(
    node: NodeSnapshot,
    now_s: float,
    clock_offset_s: float | None,
    measured: Mapping[str, Calibration],
) -> list[tuple[str, str]]:
    """Return (name, value) pairs about a node; unknown values are a dash.

    Args:
        node: the node.
        now_s: wall-clock time, in seconds since the epoch.
        clock_offset_s: the node's clock minus the clock of this PC, in seconds.
        measured: measurements of its GPUs, by UUID.
    """
    facts = node.facts
    rows = [
        ("Address", node.address),
        ("Round trip", show_duration(node.round_trip_s)),
        ("Last response", show_moment(node.last_seen_s, now_s)),
        ("Clock", describe_clock(clock_offset_s)),
        ("Environment", describe_environment(node).text),
    ]
    # Facts come with the first connection; an unreachable node may have none.
    if facts is None:
        return rows
    used = None
    if facts.disk_bytes is not None and facts.disk_free_bytes is not None:
        used = facts.disk_bytes - facts.disk_free_bytes
    cores = f", {count_of(facts.num_cores, 'core')}" if facts.num_cores else ""
    rows += [
        ("System", f"{facts.os}, kernel {facts.kernel}"),
        ("Agent Python", facts.python),
        ("CPU", f"{facts.cpu or DASH}{cores}"),
        ("RAM", show_bytes(facts.memory_bytes)),
        ("Disk used", show_bytes_of(used, facts.disk_bytes)),
    ]
    if facts.wsl is not None:
        rows.append(("WSL network", facts.wsl))
    for gpu in facts.gpus:
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        rows.append((f"GPU {gpu.index}", f"{gpu.name}, {show_bytes(gpu.memory_bytes)}{driver}"))
        if gpu.uuid in measured:
            rows.append((f"GPU {gpu.index} measured", describe_calibration(measured[gpu.uuid])))
    # Docker and VPNs add many virtual interfaces; the first four are the ones in use.
    for interface in facts.interfaces[:4]:
        speed = f", {interface.speed_mbit} Mbit/s" if interface.speed_mbit else ""
        rows.append((f"Network {interface.name}", f"{interface.address}{speed}"))
    return rows


class NodeDetails(QScrollArea):
    """Facts about the selected node."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._body = QWidget()
        self._body.setObjectName("content")
        self._problem = make_selectable(make_label(role="problem", wraps=True))
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(24)
        self._grid.setVerticalSpacing(12)
        for number in range(NUM_COLUMNS):
            self._grid.setColumnStretch(number, 1)
        self._labels: list[QLabel] = []
        self._name = ""
        self._measured: dict[str, Mapping[str, Calibration]] = {}
        column = QVBoxLayout(self._body)
        column.setContentsMargins(0, 12, 0, 4)
        column.setSpacing(12)
        column.addWidget(self._problem)
        column.addLayout(self._grid)
        column.addStretch(1)
        self.setWidget(self._body)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        context.cluster.devices_changed.connect(self._follow)

    def show_measured(self, name: str, measured: Mapping[str, Calibration]) -> None:
        """Store the measurements of a node's GPUs, and show them if the node is selected."""
        self._measured[name] = measured
        if name in self._context.cluster.nodes and name == self._name:
            self.show_node(self._context.cluster.nodes[name])

    def show_node(self, node: NodeSnapshot | None) -> None:
        """Show a node; None: nothing is selected."""
        self._name = node.name if node is not None else ""
        problem = f"{node.problem}\n{node.hint}".strip() if node is not None else ""
        self._problem.setText(problem)
        self._problem.setVisible(bool(problem))
        pairs = [("", "Select a node to see its details.")]
        if node is not None:
            cluster = self._context.cluster
            offset_s = cluster.telemetry.clock_offset(node.name)
            measured = self._measured.get(node.name, {})
            pairs = describe_node_facts(node, cluster.now_s(), offset_s, measured)
        # Labels are reused: replacing them at every sample would drop a text selection.
        while len(self._labels) < 2 * len(pairs):
            self._add_pair()
        for number, label in enumerate(self._labels):
            pair = pairs[number // 2] if number // 2 < len(pairs) else ("", "")
            if label.text() != pair[number % 2]:
                label.setText(pair[number % 2])

    def _follow(self, keys: list[DeviceKey]) -> None:
        """Show the clock, which only samples tell of."""
        if any(key.node == self._name for key in keys):
            self.show_node(self._context.cluster.nodes[self._name])

    def _add_pair(self) -> None:
        place = len(self._labels) // 2
        name, value = make_label(role="caption"), make_selectable(make_label(wraps=True))
        pair = QVBoxLayout()
        pair.setSpacing(2)
        pair.addWidget(name)
        pair.addWidget(value)
        pair.addStretch(1)
        self._grid.addLayout(pair, place // NUM_COLUMNS, place % NUM_COLUMNS)
        self._labels += [name, value]


def _key_of(row: CheckRow) -> tuple[str, str, str | None, str]:
    return row.check, row.node, row.peer, row.message


class CheckResults(QWidget):
    """Results of the last check, with the fix for the selected one."""

    told = Signal(object)
    """The Tell of a repair that ended after its dialog was closed."""

    def __init__(self, context: Context, check: Callable[[], object]) -> None:
        super().__init__()
        self._context = context
        self.model: RowsModel[CheckRow] = RowsModel(check_columns(), key=_key_of)
        self.table = TableView(context.theme, self.model, "Check results")
        self.table.sort_by("Result", Qt.SortOrder.AscendingOrder)
        self.table.say_when_empty(
            "A check tests versions, clocks, every connection and a small all-reduce. It changes "
            "nothing."
        )
        self._summary = make_label("Not checked yet.", "muted", wraps=True)
        self._message = make_selectable(make_label(wraps=True))
        self._evidence = make_selectable(make_label(role="muted", wraps=True))
        self._fix = make_selectable(make_label(role="code", wraps=True))
        self._copy = Button(
            context.theme,
            "Copy fix",
            lambda: copy_to_clipboard(self._fix.text()),
            icon="copy",
            tip="Copy the command that fixes the selected problem, to run it on that PC",
        )
        self._repair = Button(
            context.theme,
            "Fix\u2026",
            self._open_repair,
            icon="repair",
            role="primary",
            tip="See what repairs the selected problem, apply it, and check again",
        )
        self._more = Button(
            context.theme,
            "More about this",
            self._explain,
            role="link",
            tip="Open the troubleshooting page at this problem",
        )
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        head = QHBoxLayout()
        head.addWidget(self._summary, 1)
        self._again = Button(context.theme, "Check now", check, icon="refresh", role="link")
        head.addWidget(self._again)
        column.addLayout(head)
        column.addWidget(self.table, 1)
        column.addWidget(self._message)
        column.addWidget(self._evidence)
        foot = QHBoxLayout()
        foot.addWidget(self._fix, 1)
        foot.addWidget(self._more)
        foot.addWidget(self._copy)
        foot.addWidget(self._repair)
        column.addLayout(foot)
        self.table.chosen.connect(self._show_fix)
        self._show_fix()

    def begin(self) -> None:
        """Clear the table for the rows of a new check."""
        self.model.reset(())
        self.table.say_when_empty("")
        self._again.setText("Check again")
        self._summary.setText("Checking; rows appear as they are known.")
        self._show_fix()

    def add_row(self, row: CheckRow) -> None:
        """Add a row of the check that is running."""
        self.model.put(row)

    def end_early(self, *, is_cancelled: bool) -> None:
        """Keep the rows of a check that was cancelled or has failed, and say so."""
        statuses = [row.status for row in self.model.rows()]
        self._summary.setText(summarise_part(statuses, is_cancelled=is_cancelled))

    def show_rows(self, rows: tuple[CheckRow, ...]) -> None:
        """Show results and select the first failure."""
        self.model.reset(rows)
        self._summary.setText(f"{summarise_check([row.status for row in rows])}.")
        # Select the first failure, so that its fix is visible at once.
        bad = [row for row in rows if row.status == "fail"]
        if bad:
            self.table.select(_key_of(bad[0]))
        self._show_fix()

    def _show_fix(self) -> None:
        row = self.table.selected()
        fix = row.fix if row is not None else ""
        self._fix.setText(fix)
        self._fix.setVisible(bool(fix))
        # A tooltip shows it too, though not to a person at the keyboard.
        message = row.message if row is not None else ""
        self._message.setText(message)
        self._message.setVisible(self.table.is_cut("Details", message))
        evidence = row.evidence if row is not None else ""
        self._evidence.setText(f"Read there: {show_foreign(evidence)}")
        self._evidence.setVisible(bool(evidence))
        self._copy.setVisible(bool(fix))
        self._repair.setVisible(row is not None and bool(collect_offers((row,))))
        self._more.setVisible(row is not None and bool(row.topic))

    def _open_repair(self) -> None:
        rows = self.model.rows()
        chosen = self.table.selected()
        offer = next((one for one in collect_offers(rows) if chosen in one.rows), None)
        if offer is None:
            return
        self.offer_repair(offer, tuple(dict.fromkeys(row.node for row in rows)))

    def offer_repair(self, offer: Offer, names: tuple[str, ...], series: str = "") -> RepairDialog:
        """Open the dialog of a repair, whose rows are replaced once they are tested again.

        `names`: nodes that were checked; `series`: its place among several, such as `1 of 3`.
        """
        dialog = RepairDialog(self._context, offer, names, self, series)
        dialog.retested.connect(self._replace)
        dialog.told.connect(self.told)
        dialog.open()
        return dialog

    def _replace(self, before: tuple[CheckRow, ...], after: tuple[CheckRow, ...]) -> None:
        """Put rows that were tested again in place of the old ones."""
        for row in before:
            self.model.drop(_key_of(row))
        for row in after:
            self.model.put(row)
        rows = self.model.rows()
        self._summary.setText(f"{summarise_check([row.status for row in rows])}.")
        self.table.select(_key_of(after[0]))
        self._show_fix()

    def _explain(self) -> None:
        row = self.table.selected()
        if row is not None:
            open_help(row.topic)
