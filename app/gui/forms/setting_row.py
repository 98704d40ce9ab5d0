"""One setting: title and description on the left, its control on the right."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QCheckBox, QComboBox, QHBoxLayout, QSpinBox, QVBoxLayout, QWidget

from app.gui.kit.inputs import ChoiceBox, NumberBox
from app.gui.kit.primitives import make_label
from app.settings import Setting, Value

CONTROL_PX = 220


class SettingRow(QWidget):
    chosen = Signal(object)
    """The value that the user chose."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting
        self.control: QCheckBox | QComboBox | QSpinBox = self._make_control()
        self.control.setAccessibleName(setting.title)
        self.control.setAccessibleDescription(setting.description)
        words = QVBoxLayout()
        words.setSpacing(2)
        words.addWidget(make_label(setting.title, "subheading", wraps=True))
        words.addWidget(make_label(setting.description, "caption", wraps=True))
        row = QHBoxLayout(self)
        row.setContentsMargins(16, 12, 16, 12)
        row.setSpacing(24)
        row.addLayout(words, 1)
        row.addWidget(self.control, 0, Qt.AlignmentFlag.AlignVCenter)

    def show_value(self, value: Value) -> None:
        """Set the control without emitting `chosen`."""
        # Setting a value programmatically emits the same signals as a choice of the user.
        self.control.blockSignals(True)
        if isinstance(self.control, QComboBox):
            self.control.setCurrentIndex(self.control.findData(value))
        elif isinstance(self.control, QCheckBox):
            self.control.setChecked(bool(value))
        else:
            self.control.setValue(round(float(value)))
        self.control.blockSignals(False)

    def rename_choice(self, value: str, label: str) -> None:
        """Show another label for a choice, such as one that names the present value of all."""
        if isinstance(self.control, QComboBox):
            self.control.setItemText(self.control.findData(value), label)

    def _make_control(self) -> QCheckBox | QComboBox | QSpinBox:
        setting = self._setting
        if setting.kind == "switch":
            switch = QCheckBox()
            switch.setObjectName("switch")
            switch.toggled.connect(lambda is_on: self.chosen.emit(is_on))
            return switch
        if setting.kind == "choice":
            box = ChoiceBox()
            box.setSizeAdjustPolicy(ChoiceBox.SizeAdjustPolicy.AdjustToContents)
            for value, label in zip(setting.choices, setting.labels, strict=True):
                box.addItem(label, value)
            box.currentIndexChanged.connect(lambda place: self.chosen.emit(box.itemData(place)))
            box.setMinimumWidth(CONTROL_PX)
            return box
        number = NumberBox(minimum=round(setting.minimum or 0), maximum=round(setting.maximum or 0))
        number.setSuffix(f" {setting.unit}" if setting.unit else "")
        number.setKeyboardTracking(False)  # not while typing: 1 on the way to 15
        number.setMinimumWidth(CONTROL_PX)
        number.valueChanged.connect(lambda value: self.chosen.emit(float(value)))
        return number
