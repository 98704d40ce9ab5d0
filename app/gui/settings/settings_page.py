"""Settings page, generated from the declarations in `app/settings.py`."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QDesktopServices, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app.gui.forms.setting_row import SettingRow
from app.gui.kit import primitives
from app.gui.kit.banner import Banner
from app.gui.session.context import Context
from app.gui.settings.hub_token_row import HubTokenRow
from app.settings import SETTINGS, Setting

WIDTH_PX = 760


class SettingsPage(QWidget):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self.rows: dict[str, SettingRow] = {}
        self.token = HubTokenRow(context)
        self.banner = Banner(context.theme)
        column = QVBoxLayout(self)
        primitives.set_page_margins(column, self)
        column.addWidget(primitives.make_label("Settings", "title"))
        column.addWidget(self.banner)
        column.addWidget(self._make_scroll(), 1)
        context.preferences.changed.connect(self._show)
        if context.preferences.problem:
            self.banner.show_message("warning", context.preferences.problem)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        # The token may have been changed by `hf auth login` since the page was last open.
        self.token.refresh()

    # ------------------------------------------------------------ layout

    def _make_scroll(self) -> QScrollArea:
        content = QWidget()
        content.setObjectName("content")
        content.setMaximumWidth(WIDTH_PX)
        column = QVBoxLayout(content)
        column.setContentsMargins(0, 0, 16, 0)
        column.setSpacing(8)
        # dict.fromkeys keeps the order of declaration, a set would not.
        for section in dict.fromkeys(setting.section for setting in SETTINGS):
            rows = [self._make_row(s) for s in SETTINGS if s.section == section]
            self._add_section(column, section, rows)
        self._add_section(column, "Hugging Face hub", [self.token])
        self._add_section(column, "This PC", [self._make_folder_row(), self._make_promise()])
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidgetResizable(True)
        scroll.setAlignment(Qt.AlignmentFlag.AlignLeft)
        scroll.setWidget(content)
        # Tab should go from setting to setting, not to the scroll area.
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        return scroll

    def _add_section(self, column: QVBoxLayout, title: str, rows: list[QWidget]) -> None:
        column.addWidget(primitives.make_label(title, "heading"))
        panel = primitives.make_panel()
        inside = QVBoxLayout(panel)
        inside.setContentsMargins(0, 2, 0, 2)
        inside.setSpacing(0)
        for number, row in enumerate(rows):
            if number:
                inside.addWidget(primitives.make_separator())
            inside.addWidget(row)
        column.addWidget(panel)
        column.addSpacing(12)

    def _make_row(self, setting: Setting) -> QWidget:
        row = self.rows[setting.key] = SettingRow(setting)
        row.show_value(self._context.preferences.get(setting.key))
        row.chosen.connect(partial(self._context.preferences.set, setting.key))
        return row

    def _make_folder_row(self) -> QWidget:
        folder = str(self._context.home or "")
        box = QWidget()
        row = QHBoxLayout(box)
        row.setContentsMargins(16, 12, 16, 12)
        row.setSpacing(8)
        words = QVBoxLayout()
        words.setSpacing(2)
        words.addWidget(primitives.make_label("Data folder", "subheading"))
        words.addWidget(primitives.make_selectable(primitives.ElidedLabel(folder, "code")))
        words.addWidget(
            primitives.make_label(
                "Holds nodes, runs, logs, metrics and settings. To use another folder, set the "
                "environment variable RACKLESS_HOME.",
                "caption",
                wraps=True,
            )
        )
        row.addLayout(words, 1)
        theme = self._context.theme
        row.addWidget(
            primitives.Button(
                theme, "Copy path", lambda: primitives.copy_to_clipboard(folder), icon="copy"
            )
        )
        row.addWidget(
            primitives.Button(theme, "Open", partial(_open_folder, folder), icon="folder")
        )
        return box

    def _make_promise(self) -> QWidget:
        box = QWidget()
        column = QVBoxLayout(box)
        column.setContentsMargins(16, 12, 16, 12)
        column.setSpacing(2)
        column.addWidget(primitives.make_label("You stay in control", "subheading"))
        text = (
            "Rackless never updates itself and sends no data about you anywhere. Nodes always "
            "run the agent of this version; their training environment changes only when you set "
            "it up."
        )
        column.addWidget(primitives.make_label(text, "caption", wraps=True))
        return box

    def _show(self, key: str) -> None:
        self.rows[key].show_value(self._context.preferences.get(key))


def _open_folder(folder: str) -> None:
    QDesktopServices.openUrl(QUrl.fromLocalFile(folder))
