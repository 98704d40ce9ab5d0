"""Chips for the GPUs of a PC that has several: each can be left out of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QGridLayout, QToolButton, QWidget

from app.gui.kit.primitives import set_tooltip
from app.text import short_card

_COLUMNS = 4


class GpuChips(QWidget):
    """One checkable chip per GPU; hidden unless there are several."""

    edited = Signal()

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node
        self._names: tuple[str, ...] = ()
        self.chips: list[QToolButton] = []
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(4)
        self._grid.setColumnStretch(_COLUMNS, 1)
        self.hide()

    @property
    def is_used(self) -> bool:
        """True if the PC has several GPUs."""
        return len(self.chips) > 1

    def show_gpus(self, names: Sequence[str]) -> None:
        """Show the GPUs of the PC, in the order of their numbers; new ones are chosen."""
        if tuple(names) == self._names:
            return
        self._names = tuple(names)
        for chip in self.chips:
            self._grid.removeWidget(chip)
            chip.deleteLater()
        self.chips = [self._make_chip(i, name) for i, name in enumerate(names)]
        self.setVisible(self.is_used)

    def choose(self, indices: Collection[int] | None) -> None:
        """Check the chips of these GPUs; None: all."""
        for index, chip in enumerate(self.chips):
            chip.blockSignals(True)
            chip.setChecked(indices is None or index in indices)
            chip.blockSignals(False)

    def list_entries(self) -> list[str]:
        """Return the PC if all of its GPUs are chosen, else the chosen GPUs."""
        chosen = [index for index, chip in enumerate(self.chips) if chip.isChecked()]
        if not self.is_used or len(chosen) == len(self.chips):
            return [self._node]
        return [f"{self._node}:{index}" for index in chosen]

    def _make_chip(self, index: int, name: str) -> QToolButton:
        chip = QToolButton()
        chip.setObjectName("chip")
        chip.setCheckable(True)
        chip.setChecked(True)
        chip.setCursor(Qt.CursorShape.PointingHandCursor)
        chip.setText(short_card(name))
        chip.setAccessibleName(f"GPU {index} of {self._node}: {name}")
        set_tooltip(chip, f"GPU {index}: {name}. Click to leave it out of this run.")
        chip.toggled.connect(self.edited)
        self._grid.addWidget(chip, *divmod(index, _COLUMNS))
        return chip
