"""Details of one node as name and value pairs."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QScrollArea, QVBoxLayout, QWidget

from agents.contract.node import Calibration
from app.events import NodeSnapshot
from app.gui.kit.primitives import make_label, make_selectable
from app.gui.session.context import Context
from app.gui.tables.node_columns import describe_clock, describe_environment
from app.planning.hardware.mig import describe_mig
from app.presentation.limit_text import show_cores, show_memory
from app.presentation.plan_text import describe_calibration
from app.telemetry.stream import DeviceKey
from app.text import DASH, show_bytes, show_bytes_of, show_duration, show_moment

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
    cores = f", {show_cores(facts)}" if facts.num_cores else ""
    rows += [
        ("System", f"{facts.os}, kernel {facts.kernel}"),
        ("Agent Python", facts.python),
        ("CPU", f"{facts.cpu or DASH}{cores}"),
        ("RAM", show_memory(facts)),
        ("Disk used", show_bytes_of(used, facts.disk_bytes)),
    ]
    if facts.wsl is not None:
        rows.append(("WSL network", facts.wsl))
    for gpu in facts.gpus:
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        rows.append((f"GPU {gpu.index}", f"{gpu.name}, {show_bytes(gpu.memory_bytes)}{driver}"))
        if gpu.uuid in measured:
            rows.append((f"GPU {gpu.index} measured", describe_calibration(measured[gpu.uuid])))
    rows += [(f"GPU {gpu.index}", describe_mig(gpu)) for gpu in facts.mig_gpus]
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
        """Update the clock, which arrives only with samples."""
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
