"""Nodes page: table of all nodes, actions on them, and tabs with details."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QStackedWidget,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from agents.contract.node import Calibration, EnvironmentReport
from app.core.nodes import CalibrateNode, ListCalibrations, RefreshNode, RemoveNode, WakeNode
from app.events import NodeSnapshot
from app.flows.new_run import LOOKING_FOR_NODES
from app.gui.kit.actions import Actions
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.kit.empty import EmptyState, Waiting
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import Button, make_label, set_page_margins
from app.gui.kit.theme import Theme
from app.gui.nodes.links_pane import LinksPane
from app.gui.nodes.node_check import NodeCheck
from app.gui.nodes.node_details import NodeDetails
from app.gui.nodes.node_log_pane import NodeLogPane
from app.gui.nodes.node_settings_pane import NodeSettingsPane
from app.gui.nodes.node_split import NodeSplit
from app.gui.nodes.storage_pane import StoragePane
from app.gui.repairs.changes_pane import ChangesPane
from app.gui.repairs.check_results import CheckResults
from app.gui.repairs.node_pane import ShowOutcome
from app.gui.repairs.preparation import Preparation
from app.gui.repairs.windows_script_button import WindowsScriptButton
from app.gui.session.banner_task import (
    build_environment_in_banner,
    last_with_node,
    run_in_banner,
    show_error_while,
)
from app.gui.session.context import Context
from app.gui.tables.node_columns import node_columns
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.view import TableView
from app.presentation.environment_text import describe_environment, describe_trial
from app.presentation.plan_text import describe_calibration

Action = Callable[[], object]


def make_node_buttons(
    theme: Theme, remove: Action, prepare: Action, setup: Action, wake: Action, measure: Action
) -> dict[str, Button]:
    """Return the buttons by their names, in the order of the page's head."""
    return {
        "remove": Button(
            theme,
            "Remove",
            remove,
            icon="delete",
            role="danger",
            tip="Remove the selected node from Rackless; nothing is deleted on it",
        ),
        "prepare": Button(
            theme,
            "Prepare\u2026",
            prepare,
            icon="prepare",
            tip="Check the selected node, offer each repair, set it up, and check again",
        ),
        "setup": Button(
            theme,
            "Set up environment",
            setup,
            icon="setup",
            tip="Build the training environment on the selected node from the lock file",
        ),
        "wake": Button(
            theme,
            "Wake",
            wake,
            icon="resume",
            tip="Wake the selected node over its network, and wait until it answers",
        ),
        "measure": Button(
            theme,
            "Measure",
            measure,
            icon="speed",
            tip="Measure how fast its GPUs are, about 20 seconds each, for better plans",
        ),
    }


class NodesPage(QWidget):
    ended_unseen = Signal(object)
    """The ShowOutcome of a change of a node that ended while another page was in view."""

    def __init__(self, context: Context, actions: Actions) -> None:
        super().__init__()
        self._context = context
        self.model: RowsModel[NodeSnapshot] = RowsModel(
            node_columns(context.cluster.now_s, context.cluster.telemetry.clock_offset),
            key=lambda node: node.name,
        )
        self.table = TableView(context.theme, self.model, "Nodes")
        self.table.sort_by("Name", Qt.SortOrder.AscendingOrder)
        self.banner = Banner(context.theme)
        self.details = NodeDetails(context)
        self.results = CheckResults(context, self.check_all)
        self.links = LinksPane(context, self.measure_links)
        self.log = NodeLogPane(context)
        self.changes = ChangesPane(context)
        self.storage = StoragePane(context)
        self.settings = NodeSettingsPane(context)
        self.tabs = QTabWidget()
        self.tabs.setDocumentMode(True)
        self.tabs.addTab(self.details, "Details")
        self.tabs.addTab(self.results, "Check")
        self.tabs.addTab(self.links, "Links")
        self.tabs.addTab(self.log, "Log")
        self.tabs.addTab(self.changes, "Changes")
        self.tabs.addTab(self.storage, "Storage")
        self.tabs.addTab(self.settings, "Settings")
        self._stack = QStackedWidget()
        self._stack.addWidget(self._make_empty(actions))
        self._stack.addWidget(NodeSplit(self.table, self.tabs))
        self._stack.addWidget(Waiting(LOOKING_FOR_NODES))
        self._buttons = make_node_buttons(
            context.theme, self._ask_remove, self._prepare, self._setup, self._wake, self._measure
        )
        self.script = WindowsScriptButton(context)
        # A check has measured the links as well.
        self.check = NodeCheck(context, self.banner, self.results, self.links.reload)
        self.preparation = Preparation(
            context, self.banner, self.check.check_one, self.results.offer_repair
        )
        self._asked_measured: set[str] = set()
        column = QVBoxLayout(self)
        set_page_margins(column, self)
        column.addLayout(self._make_head(actions))
        column.addWidget(self.banner)
        column.addWidget(self._stack, 1)
        cluster = context.cluster
        cluster.node_changed.connect(self._show)
        cluster.node_removed.connect(self._remove_row)
        cluster.is_open_changed.connect(self._choose)
        self.table.chosen.connect(self._choose)
        for pane in (self.changes, self.storage, self.results):
            pane.ended_unseen.connect(self._show_outcome)
        self._choose()

    def open_node(self, name: str) -> None:
        """Select a node."""
        self.table.select(name)
        self.tabs.setCurrentWidget(self.details)

    def refresh(self) -> None:
        """Ask every node for current facts."""
        for node in self._context.cluster.node_list():
            self._refresh_node(node.name)

    def _refresh_node(self, name: str) -> None:
        self._context.bridge.do(
            RefreshNode(name=name),
            failure=lambda error: None,  # its state already shows the problem
        )

    def check_all(self) -> None:
        """Check all nodes and show the results."""
        self.tabs.setCurrentWidget(self.results)
        self.check.check_all()

    def measure_links(self) -> None:
        """Check all nodes, which measures the links, and stay on the Links tab."""
        self.check.check_all()

    # ------------------------------------------------------------ layout

    def _make_head(self, actions: Actions) -> FlowLayout:
        head = FlowLayout(lead=make_label("Nodes", "title"))
        self._head_buttons = [actions.button("check"), actions.button("add_node", role="primary")]
        for button in (*self._buttons.values(), self.script, *self._head_buttons):
            head.addWidget(button)
        return head

    def _make_empty(self, actions: Actions) -> QWidget:
        return EmptyState(
            self._context.theme,
            "nodes",
            "No nodes yet",
            "A node is a PC that trains. Add this PC with one click, or another one by its "
            "address and an SSH login.",
            [actions.button("add_this_pc", role="primary"), actions.button("add_node")],
        )

    # ------------------------------------------------------------ events

    def _show_outcome(self, show: ShowOutcome) -> None:
        if self.isVisible():
            show(self.banner)
        else:
            self.ended_unseen.emit(show)

    def _show(self, name: str) -> None:
        self.model.put(self._context.cluster.nodes[name])
        self._choose()

    def _remove_row(self, name: str) -> None:
        self.model.drop(name)
        self._choose()

    def _choose(self) -> None:
        cluster = self._context.cluster
        self._stack.setCurrentIndex(1 if cluster.nodes else 0 if cluster.is_open else 2)
        # The tabs below are never empty while there are nodes.
        if self.table.selected() is None and self.model.rows():
            self.table.selectRow(0)
        node = self.table.selected()
        self.details.show_node(node)
        name = node.name if node is not None else ""
        for pane in (self.log, self.changes, self.storage, self.settings):
            pane.show_node(name)
        # This runs at every change of any node; its measurements are read once.
        if node is not None and node.name not in self._asked_measured:
            self._asked_measured.add(node.name)
            self._load_measured(node.name)
        for button in self._buttons.values():
            button.setEnabled(node is not None)
        # An empty page has its own buttons in its middle.
        for button in (*self._buttons.values(), *self._head_buttons):
            button.setVisible(bool(cluster.nodes))
        self.script.show_node(node)
        # Offered where it may help: over SSH, to a PC that does not answer.
        is_silent = node is not None and node.transport == "ssh" and node.state == "unreachable"
        self._buttons["wake"].setVisible(is_silent)

    def _prepare(self) -> None:
        node = self.table.selected()
        if node is not None:
            self.tabs.setCurrentWidget(self.results)
            self.preparation.start(node.name)

    def _setup(self) -> None:
        node = self.table.selected()
        if node is None:
            return
        build_environment_in_banner(
            self._context,
            self.banner,
            node.name,
            lambda report: self._show_setup(node.name, report),
        )

    def _show_setup(self, name: str, report: EnvironmentReport) -> None:
        text = f"{name} is ready to train"
        details = (f"{describe_environment(report)}, {report.python}", *describe_trial(report))
        self.banner.show_message("good", text, "; ".join(details))
        last_with_node(self._context, self.banner, name)

    def _measure(self) -> None:
        node = self.table.selected()
        if node is None:
            return
        run_in_banner(
            self._context.bridge,
            self.banner,
            CalibrateNode(name=node.name),
            lambda found: self._show_measured(node.name, found),
            title=f"Measuring {node.name}",
            hint="About 20 seconds for each GPU.",
            cancelled="Plans keep using the previous measurements.",
            failed=partial(show_error_while, self._context, self.banner),
        )

    def _wake(self) -> None:
        node = self.table.selected()
        if node is None:
            return
        run_in_banner(
            self._context.bridge,
            self.banner,
            WakeNode(name=node.name),
            lambda found: self.banner.show_message("good", f"{node.name} answers"),
            title=f"Waking {node.name}",
            hint="Sending packets until it answers, for up to three minutes.",
            cancelled=f"{node.name} may still wake up.",
            failed=partial(show_error_while, self._context, self.banner),
        )

    def _show_measured(self, name: str, found: tuple[Calibration, ...]) -> None:
        self._load_measured(name)
        figures = "; ".join(f"{one.card}: {describe_calibration(one)}" for one in found)
        self.banner.show_message("good", f"Measured {name}; new plans use it", figures)

    def _load_measured(self, name: str) -> None:
        show = partial(self.details.show_measured, name)
        self._context.bridge.do(ListCalibrations(name=name), show)

    def _ask_remove(self) -> None:
        node = self.table.selected()
        if node is None or not confirm(
            self,
            self._context.theme,
            f"Remove {node.name}?",
            "Rackless forgets the node and its host key. Nothing is deleted on that PC, and you "
            "can add it again.",
            "Remove",
            is_dangerous=True,
        ):
            return
        self._context.bridge.do(
            RemoveNode(name=node.name),
            failure=partial(show_error_while, self._context, self.banner),
        )
