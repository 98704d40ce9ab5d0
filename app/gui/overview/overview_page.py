"""Overview page: cluster totals, active runs, and the live wall of all devices."""

from __future__ import annotations

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QScrollArea, QStackedWidget, QVBoxLayout, QWidget

from app.gui.kit.actions import Actions
from app.gui.kit.empty import EmptyState
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import Button, make_label, set_page_margins
from app.gui.overview.story_strip import StoryStrip
from app.gui.overview.totals import TotalsBar
from app.gui.overview.wall import Wall
from app.gui.overview.wall_table import WallTable
from app.gui.runs.run_strip import RunStrip
from app.gui.session.context import Context
from app.telemetry.stream import DeviceKey

SCROLL_PX = 16
"""Width of a scroll bar with its margins, as in window.qss."""
CLOCK_MS = 1000
"""Interval at which ages such as `unreachable for 12 s` are updated, in milliseconds."""


class OverviewPage(QWidget):
    run_opened = Signal(str)
    node_opened = Signal(str)
    runs_opened = Signal()
    view_chosen = Signal(bool)
    """True if the user switched to the table, False for the cards."""

    def __init__(self, context: Context, actions: Actions) -> None:
        super().__init__()
        self._context = context
        self.story = StoryStrip(context.theme)
        self.totals = TotalsBar(context)
        self.strip = RunStrip(context)
        self.wall = Wall(context)
        self.table = WallTable(context)
        self._is_table = False
        self.view = Button(context.theme, "", self._switch_view, role="link")
        self._stack = QStackedWidget()
        self._stack.addWidget(self._make_empty(actions))
        self._stack.addWidget(self._make_scroll())
        self._stack.addWidget(self.table)
        upper = QVBoxLayout()
        upper.setContentsMargins(0, 0, SCROLL_PX, 0)
        upper.setSpacing(12)
        upper.addLayout(self._make_head(actions))
        for widget in (self.story, self.totals, self.strip):
            upper.addWidget(widget)
        column = QVBoxLayout(self)
        set_page_margins(column, self)
        # The scroll bar stands in the right margin, so that cards align with the panels above.
        column.setContentsMargins(24, 20, 24 - SCROLL_PX, 12)
        column.setSpacing(8)
        column.addLayout(upper)
        column.addWidget(self._stack, 1)
        self.strip.run_opened.connect(self.run_opened)
        self.strip.all_opened.connect(self.runs_opened)
        self.wall.device_opened.connect(self._open_device)
        self.table.device_opened.connect(self._open_device)
        context.cluster.structure_changed.connect(self._choose)
        context.cluster.is_open_changed.connect(self._choose)
        self._clock = QTimer(self, interval=CLOCK_MS)
        self._clock.timeout.connect(self._tick)
        self._clock.start()
        self.show_as_table(False)

    def show_as_table(self, is_table: bool) -> None:
        """Show devices as table rows, or as cards."""
        self._is_table = is_table
        self.view.setText("Show as cards" if is_table else "Show as table")
        self.view.setToolTip(
            "Show every device as a card with its recent history"
            if is_table
            else "Show every device as a table row: sortable, and readable by screen readers"
        )
        self._choose()

    def _switch_view(self) -> None:
        self.show_as_table(not self._is_table)
        self.view_chosen.emit(self._is_table)

    def _make_head(self, actions: Actions) -> FlowLayout:
        head = FlowLayout(lead=make_label("Overview", "title"))
        self._buttons = [
            self.view,
            actions.button("add_node"),
            actions.button("new_run", role="primary"),
        ]
        for button in self._buttons:
            head.addWidget(button)
        return head

    def _make_empty(self, actions: Actions) -> QWidget:
        buttons = [actions.button("add_this_pc", role="primary"), actions.button("add_node")]
        if actions.has("run_demo"):
            buttons.append(actions.button("run_demo"))
        return EmptyState(
            self._context.theme,
            "overview",
            "Your cluster starts with one PC",
            "See every GPU live: memory, load, temperature and speed. Start with this PC. Add "
            "others over SSH; Rackless installs what they need.",
            buttons,
        )

    def _make_scroll(self) -> QScrollArea:
        scroll = QScrollArea()
        scroll.setWidgetResizable(True)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setWidget(self.wall)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        bar = scroll.verticalScrollBar()
        bar.rangeChanged.connect(lambda low, high: self.wall.keep_free(0 if high else SCROLL_PX))
        self.wall.keep_free(SCROLL_PX)
        return scroll

    def _choose(self) -> None:
        cluster = self._context.cluster
        # Before the core is open no nodes are known yet, which does not mean that there are none.
        is_empty = cluster.is_open and not cluster.nodes
        self._stack.setCurrentIndex(0 if is_empty else 2 if self._is_table else 1)
        # An empty page has its own buttons in the middle.
        for widget in (*self._buttons, self.totals):
            widget.setVisible(not is_empty)

    def _tick(self) -> None:
        if not self.isVisible():
            return
        cluster = self._context.cluster
        for node in cluster.node_list():
            age_s = cluster.now_s() - (node.last_seen_s or cluster.now_s())
            # Samples repaint the cards of a node that sends them; only silent nodes need the clock.
            if node.state != "online" or age_s > CLOCK_MS / 1000:
                self.wall.refresh_node(node.name)
                self.table.refresh_node(node.name)
        # A node falls silent without an event.
        if any(cluster.has_silent_nodes(run) for run in cluster.active_runs()):
            self.strip.refresh()
            self.totals.refresh()

    def _open_device(self, key: DeviceKey) -> None:
        run = self._context.cluster.telemetry[key].run
        if run is not None:
            self.run_opened.emit(run.run_id)
        else:
            self.node_opened.emit(key.node)
