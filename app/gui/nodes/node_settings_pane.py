"""Settings that can differ for the selected node; they are stored on this PC."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from PySide6.QtWidgets import QVBoxLayout

from app.core.action import CoreApi
from app.errors import RacklessError
from app.gui.forms.setting_row import SettingRow
from app.gui.kit.banner import Banner
from app.gui.kit.primitives import make_label, make_panel, make_separator
from app.gui.repairs.node_pane import NodePane
from app.gui.session.context import Context
from app.settings import SETTINGS, Setting, Value

PANEL_PX = 760
_OF_NODES = tuple(setting for setting in SETTINGS if setting.per_node)
_SAME = "same"
"""Choice of a node without a value of its own."""


class NodeSettingsPane(NodePane):
    """The settings of one node, each with the choice of the value for all nodes."""

    asks_each_time = True  # the value for all nodes may have changed on the Settings page

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.summary = make_label(role="muted", wraps=True)
        self.banner = Banner(context.theme)
        self.rows = {s.key: _make_row(s) for s in _OF_NODES}
        self._panel = make_panel()
        self._panel.setMaximumWidth(PANEL_PX)
        inside = QVBoxLayout(self._panel)
        inside.setContentsMargins(0, 2, 0, 2)
        inside.setSpacing(0)
        for number, (key, row) in enumerate(self.rows.items()):
            if number:
                inside.addWidget(make_separator())
            inside.addWidget(row)
            row.chosen.connect(partial(self._store, key))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addWidget(self.summary)
        column.addWidget(self.banner)
        column.addWidget(self._panel)
        column.addStretch(1)
        self.show_node("")

    def show_node(self, name: str) -> None:
        """Show another node; empty: none is selected."""
        super().show_node(name)
        self._panel.setVisible(bool(name))
        self.summary.setText(
            f"Settings of {name} that differ from the other nodes."
            if name
            else "Select a node to see its settings."
        )

    def refresh(self) -> None:
        """Read the settings of the node."""
        name = self._shown = self._name
        self.banner.hide()
        if name:
            self.read(lambda core, report: read_settings(core, name), self._take, self._fail)
        else:
            self.stop_reading()

    def _take(self, own: dict[str, Value]) -> None:
        for setting in _OF_NODES:
            row, shared = self.rows[setting.key], self._context.preferences.get(setting.key)
            label = setting.labels[setting.choices.index(str(shared))]
            row.rename_choice(_SAME, f"As on all nodes: {label.lower()}")
            row.show_value(own.get(setting.key, _SAME))

    def _store(self, key: str, value: Value) -> None:
        name, own = self._shown, None if value == _SAME else value
        self.banner.hide()
        self._context.bridge.run(
            lambda core, report: store_setting(core, name, key, own),
            failure=self._fail_to_store,
        )

    def _fail_to_store(self, error: RacklessError) -> None:
        self.refresh()  # show the stored value, which may differ from the chosen one
        self._fail(error)

    def _fail(self, error: RacklessError) -> None:
        self.banner.show_error(error)


async def read_settings(core: CoreApi, name: str) -> dict[str, Value]:
    """Return the values that a node has of its own, by key."""
    found = {setting.key: core.settings.of_nodes(setting.key) for setting in _OF_NODES}
    return {key: values[name] for key, values in found.items() if name in values}


async def store_setting(core: CoreApi, name: str, key: str, value: Value | None) -> None:
    """Store the value of a node; None: use the value for all nodes."""
    core.settings.set_of_node(name, key, value)


def _make_row(setting: Setting) -> SettingRow:
    choices, labels = (_SAME, *setting.choices), ("", *setting.labels)
    return SettingRow(replace(setting, choices=choices, labels=labels))
