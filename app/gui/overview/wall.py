"""Live wall: every device, grouped by node, in as many columns as fit.

A node with one device takes one column, so that three small PCs stand side by side; a node with
eight takes whole rows. `arrange` computes the places and touches no widget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from PySide6.QtCore import QEvent, QSize, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QWidget

from app.events import NodeSnapshot
from app.gui.kit.primitives import ElidedLabel, make_label
from app.gui.overview.card import HEIGHT_PX, MIN_WIDTH_PX, DeviceCard
from app.gui.session.context import Context
from app.telemetry.state import describe_device, describe_node, is_current
from app.telemetry.stream import Device, DeviceKey
from app.text import count_of, show_bytes

K = TypeVar("K")
W = TypeVar("W", bound=QWidget)

GAP_PX = 16
HEAD_PX = 32
GROUP_GAP_PX = 12


@dataclass(frozen=True, slots=True)
class CardPlace:
    """Place of a group: columns from the left, pixels from the top."""

    column: int
    num_columns: int
    top_px: int
    num_rows: int


def choose_columns(width_px: int) -> int:
    """Return the number of cards that fit side by side in `width_px`."""
    return max(1, (width_px + GAP_PX) // (MIN_WIDTH_PX + GAP_PX))


def arrange(counts: list[int], num_columns: int) -> list[CardPlace]:
    """Place groups of `counts` cards from left to right, wrapping to a new line as needed."""
    places = []
    column = top = line_height = 0
    for count in counts:
        # A node without devices still has a heading, which takes one column.
        wanted = min(max(count, 1), num_columns)
        rows = -(-max(count, 1) // wanted)
        if column + wanted > num_columns:
            column, top, line_height = 0, top + line_height + GROUP_GAP_PX, 0
        places.append(CardPlace(column, wanted, top, rows))
        column += wanted
        line_height = max(line_height, HEAD_PX + rows * HEIGHT_PX + (rows - 1) * GAP_PX)
    return places


class GroupHead(QWidget):
    """Heading of a group: node name, state if not online, CPU cores and RAM."""

    def __init__(self) -> None:
        super().__init__()
        self._name = make_label(role="subheading")
        self._facts = ElidedLabel(role="caption")
        row = QHBoxLayout(self)
        row.setContentsMargins(2, 0, 2, 4)
        row.setSpacing(8)
        row.addWidget(self._name)
        row.addWidget(self._facts, 1)

    def show_node(self, node: NodeSnapshot, now_s: float) -> None:
        self._name.setText(node.name)
        parts = [describe_node(node, now_s).text] if node.state != "online" else []
        if node.facts is not None:
            parts.append(count_of(node.facts.num_cores, "core") if node.facts.num_cores else "")
            parts.append(f"{show_bytes(node.facts.memory_bytes)} RAM")
        self._facts.setText(" \u00b7 ".join(part for part in parts if part))


class Wall(QWidget):
    """Cards of all devices, read from `LiveState`."""

    device_opened = Signal(object)
    """DeviceKey of the card that was clicked."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._heads: dict[str, GroupHead] = {}
        self._cards: dict[DeviceKey, DeviceCard] = {}
        self._order: list[tuple[str, list[DeviceKey]]] = []
        self._free_px = 0
        self.setObjectName("content")
        cluster = context.cluster
        cluster.structure_changed.connect(self.rebuild)
        cluster.devices_changed.connect(self.refresh)
        cluster.node_changed.connect(self.refresh_node)
        self.rebuild()

    def cards(self) -> list[DeviceCard]:
        """Return the cards in reading order."""
        return [self._cards[key] for _, keys in self._order for key in keys]

    def refresh(self, keys: list[DeviceKey]) -> None:
        """Update the cards of `keys`, and no others."""
        for key in keys:
            card = self._cards.get(key)
            node = self._context.cluster.nodes.get(key.node)
            # Figures of one frame may arrive after their node was removed.
            if card is not None and node is not None:
                now_s = self._context.cluster.now_s()
                status = describe_device(card.device, node, now_s)
                card.refresh(status, is_live=is_current(card.device, node, now_s))

    def refresh_node(self, name: str) -> None:
        """Update the state of a node."""
        node, now_s = self._context.cluster.nodes[name], self._context.cluster.now_s()
        if name in self._heads:
            self._heads[name].show_node(node, now_s)
        for key, card in self._cards.items():
            if key.node == name:
                status = describe_device(card.device, node, now_s)
                card.show_status(status, is_live=is_current(card.device, node, now_s))

    def rebuild(self) -> None:
        """Create heads and cards for new devices, keep existing ones, and remove those that are
        gone.
        """
        cluster = self._context.cluster
        self._order = [
            (node.name, [device.key for device in cluster.telemetry.of_node(node.name)])
            for node in cluster.node_list()
        ]
        wanted = {key for _, keys in self._order for key in keys}
        _drop(self._cards, lambda key: key not in wanted)
        _drop(self._heads, lambda name: name not in cluster.nodes)
        for name, keys in self._order:
            if name not in self._heads:
                self._heads[name] = GroupHead()
                self._heads[name].setParent(self)
            for key in keys:
                # A node that was removed and added again has new Device objects.
                if key not in self._cards or self._cards[key].device is not cluster.telemetry[key]:
                    self._cards[key] = self._make_card(cluster.telemetry[key])
            self.refresh_node(name)
        self._place()

    def _make_card(self, device: Device) -> DeviceCard:
        if device.key in self._cards:
            self._cards.pop(device.key).deleteLater()
        cluster = self._context.cluster
        status = describe_device(device, cluster.nodes[device.key.node], cluster.now_s())
        card = DeviceCard(self._context.theme, device, status)
        card.setParent(self)
        card.activated.connect(lambda: self.device_opened.emit(device.key))
        return card

    # ------------------------------------------------------------ geometry

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._place()

    def event(self, event: QEvent) -> bool:
        # Sent when a heading changes its size, for instance after a change of the font.
        if event.type() == QEvent.Type.LayoutRequest:
            self._place()
        return super().event(event)

    def sizeHint(self) -> QSize:
        return QSize(3 * (MIN_WIDTH_PX + GAP_PX), self._height())

    def keep_free(self, right_px: int) -> None:
        """Reserve room for a scroll bar, so that cards do not move when it appears."""
        self._free_px = right_px
        self._place()

    def _room_px(self) -> int:
        return self.width() - self._free_px

    def _height(self) -> int:
        places = arrange([len(keys) for _, keys in self._order], choose_columns(self._room_px()))
        bottoms = (
            place.top_px + HEAD_PX + place.num_rows * (HEIGHT_PX + GAP_PX) - GAP_PX
            for place in places
        )
        return max(bottoms, default=0)

    def _place(self) -> None:
        columns = choose_columns(self._room_px())
        width = (self._room_px() - (columns - 1) * GAP_PX) / columns
        places = arrange([len(keys) for _, keys in self._order], columns)
        previous: QWidget | None = None
        for (name, keys), place in zip(self._order, places, strict=True):
            left = place.column * (width + GAP_PX)
            span = place.num_columns * (width + GAP_PX) - GAP_PX
            self._heads[name].setGeometry(round(left), place.top_px, round(span), HEAD_PX)
            self._heads[name].show()
            for index, key in enumerate(keys):
                card = self._cards[key]
                x = left + (index % place.num_columns) * (width + GAP_PX)
                row = index // place.num_columns
                y = place.top_px + HEAD_PX + row * (HEIGHT_PX + GAP_PX)
                # Both edges are rounded, not the width: rounding errors must not add up in a row.
                card.setGeometry(round(x), y, round(x + width) - round(x), HEIGHT_PX)
                card.show()
                # Tab order follows reading order, not the order of creation.
                if previous is not None:
                    QWidget.setTabOrder(previous, card)
                previous = card
        # The scroll area resizes this widget; only a minimum height makes it scroll instead.
        self.setMinimumHeight(self._height())


def _drop(widgets: dict[K, W], is_gone: Callable[[K], bool]) -> None:
    for key in [key for key in widgets if is_gone(key)]:
        widgets.pop(key).deleteLater()
