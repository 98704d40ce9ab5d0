"""Overview page: cluster totals, active runs, and the live wall of all devices."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QScrollArea,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.gui.kit import primitives
from app.gui.kit.actions import Actions
from app.gui.kit.empty import EmptyState
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import set_tooltip
from app.gui.kit.theme import Theme
from app.gui.overview.wall import Wall
from app.gui.overview.wall_table import WallTable
from app.gui.runs.run_strip import RunStrip
from app.gui.session.context import Context
from app.telemetry.state import is_silent
from app.telemetry.stream import DeviceKey
from app.text import DASH, count_of, show_bytes_of, show_rate, show_share, show_watts


class TotalsBar(QFrame):
    """Nodes, devices, memory, power and throughput of all nodes that are online."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self.setObjectName("panel")
        self._values: dict[str, QLabel] = {}
        self._captions: dict[str, QLabel] = {}
        row = FlowLayout(gap_px=20, line_gap_px=10)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 14, 20, 14)
        column.addLayout(row)
        for key, caption, tip in (
            ("nodes", "Nodes online", "PCs that respond, of all that you added"),
            (
                "devices",
                "Devices",
                "Devices that can train: GPUs, and CPUs of PCs without an NVIDIA GPU",
            ),
            ("memory", "Memory in use", "VRAM of GPUs, and RAM of PCs that train on their CPU"),
            ("power", "Power", "Total of the devices that report power draw"),
            ("tokens", "Throughput", "Tokens trained per second, all runs together"),
        ):
            row.addWidget(self._make_cell(key, caption, tip, has_rule=bool(self._values)))
        cluster = context.cluster
        # a bound method: PySide disconnects it when this widget is deleted
        cluster.devices_changed.connect(self.refresh)
        cluster.structure_changed.connect(self.refresh)
        cluster.node_changed.connect(self.refresh)
        cluster.run_changed.connect(self.refresh)
        cluster.is_open_changed.connect(self.refresh)
        self.refresh()

    def refresh(self, changed: object = None) -> None:
        """Recompute all totals."""
        cluster = self._context.cluster
        online = frozenset(node.name for node in cluster.node_list() if node.state == "online")
        now_s = cluster.now_s()
        totals = cluster.telemetry.totals(
            frozenset(name for name in online if not is_silent(cluster.nodes[name], now_s))
        )
        # Before the core is open no nodes are known yet, which does not mean that there are none.
        known = f"{len(online)} of {len(cluster.nodes)}" if cluster.is_open else DASH
        self._show("nodes", known)
        parts = []
        if totals.num_gpus:
            parts.append(count_of(totals.num_gpus, "GPU"))
        if totals.num_cpus:
            parts.append(count_of(totals.num_cpus, "CPU"))
        self._show("devices", " \u00b7 ".join(parts) or ("none" if cluster.is_open else DASH))
        self._show("memory", show_bytes_of(totals.memory_used_bytes, totals.memory_total_bytes))
        if totals.memory_used_bytes is not None and totals.memory_total_bytes:
            share = show_share(totals.memory_used_bytes / totals.memory_total_bytes)
            self._captions["memory"].setText(f"Memory in use \u00b7 {share}")
        self._show("power", show_watts(totals.power_w))
        self._show("tokens", show_rate(totals.tokens_per_s))

    def _make_cell(self, key: str, caption: str, tip: str, *, has_rule: bool) -> QWidget:
        self._values[key] = primitives.make_label(role="figure")
        self._captions[key] = primitives.make_label(caption, "caption")
        cell = QWidget()
        row = QHBoxLayout(cell)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(20)
        if has_rule:
            row.addWidget(primitives.make_separator(upright=True))
        column = QVBoxLayout()
        column.setSpacing(2)
        row.addLayout(column, 1)
        for label in (self._values[key], self._captions[key]):
            set_tooltip(label, tip)
            column.addWidget(label)
        return cell

    def _show(self, key: str, text: str) -> None:
        label = self._values[key]
        # Most samples leave the totals unchanged; setting equal text would still repaint.
        if label.text() != text:
            label.setText(text)
            label.setAccessibleName(f"{self._captions[key].text()}: {text}")


_GLYPHS = {"done": ("good", "good"), "now": ("busy", "accent"), "failed": ("error", "error")}


class StoryStrip(QFrame):
    """Strip with the demo's steps; hidden until `show_steps` is called."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.setObjectName("panel")
        self._theme = theme
        self._steps: tuple[tuple[str, str], ...] = ()
        self._marks: list[tuple[QLabel, QLabel]] = []
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 10, 8, 12)
        column.setSpacing(8)
        head = QHBoxLayout()
        head.addWidget(
            primitives.make_label("Demo: three nodes on this PC train one model", "subheading")
        )
        head.addStretch(1)
        head.addWidget(primitives.IconButton(theme, "close", "Hide the demo steps", self.hide))
        column.addLayout(head)
        self._row = FlowLayout(gap_px=16, line_gap_px=4)
        column.addLayout(self._row)
        self._note = primitives.make_label(role="caption", wraps=True)
        column.addWidget(self._note)
        theme.changed.connect(self._paint)
        self.hide()

    def show_steps(self, steps: Sequence[tuple[str, str]], note: str = "") -> None:
        """Show (title, `done` | `now` | `todo` | `failed`) of each step, and a note on the
        current one.
        """
        if len(steps) != len(self._marks):
            self._make_marks(len(steps))
        self._steps = tuple(steps)
        self._note.setText(note)
        self._note.setVisible(bool(note))
        self._paint()
        self.show()

    def _make_marks(self, count: int) -> None:
        while self._row.count():
            item = self._row.takeAt(0)
            part = item.widget() if item is not None else None
            if part is not None:
                part.deleteLater()
        self._marks = []
        for _ in range(count):
            glyph, words = QLabel(), primitives.make_label(role="")
            glyph.setFixedSize(16, 16)
            part = QWidget()
            line = QHBoxLayout(part)
            line.setContentsMargins(0, 0, 0, 0)
            line.setSpacing(6)
            line.addWidget(glyph)
            line.addWidget(words, 1)
            self._row.addWidget(part)
            self._marks.append((glyph, words))

    def _paint(self) -> None:
        scale = self.devicePixelRatioF()
        for (glyph, words), (title, state) in zip(self._marks, self._steps, strict=True):
            icon, color = _GLYPHS.get(state, ("pending", "muted"))
            glyph.setPixmap(self._theme.pixmap(icon, color, 16, scale))
            words.setText(title)
            words.setAccessibleName(f"{title}: {state}")


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
        self.view = primitives.Button(context.theme, "", self._switch_view, role="link")
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
        primitives.set_page_margins(column, self)
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
        set_tooltip(
            self.view,
            "Show every device as a card with its recent history"
            if is_table
            else "Show every device as a table row: sortable, and readable by screen readers",
        )
        self._choose()

    def _switch_view(self) -> None:
        self.show_as_table(not self._is_table)
        self.view_chosen.emit(self._is_table)

    def _make_head(self, actions: Actions) -> FlowLayout:
        head = FlowLayout(lead=primitives.make_label("Overview", "title"))
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
        # Tab goes from card to card, not to the scroll area.
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
