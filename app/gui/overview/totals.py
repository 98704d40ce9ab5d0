"""Totals of the cluster, as one line of figures."""

from __future__ import annotations

from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import make_label, make_separator, make_tooltip
from app.gui.session.context import Context
from app.telemetry.state import is_silent
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
        self._values[key] = make_label(role="figure")
        self._captions[key] = make_label(caption, "caption")
        cell = QWidget()
        row = QHBoxLayout(cell)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(20)
        if has_rule:
            row.addWidget(make_separator(upright=True))
        column = QVBoxLayout()
        column.setSpacing(2)
        row.addLayout(column, 1)
        for label in (self._values[key], self._captions[key]):
            label.setToolTip(make_tooltip(tip))
            column.addWidget(label)
        return cell

    def _show(self, key: str, text: str) -> None:
        label = self._values[key]
        # Most samples leave the totals unchanged; setting equal text would still repaint.
        if label.text() != text:
            label.setText(text)
            label.setAccessibleName(f"{self._captions[key].text()}: {text}")
