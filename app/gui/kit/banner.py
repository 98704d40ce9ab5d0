"""A message above a page: the event, its place, the next step, and a button that takes it.

A message about a state disappears with that state: code that shows one also says how long it holds,
by `Banner.lasts_while`. A message about an event, such as a saved file, stays until dismissed.
"""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt, SignalInstance
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout

from app.errors import RacklessError, UserError
from app.gui.kit.help_link import open_help
from app.gui.kit.primitives import (
    Button,
    IconButton,
    make_label,
    make_selectable,
    set_style_property,
)
from app.gui.kit.theme import Theme
from app.telemetry.state import Tone


class Banner(QFrame):
    """One message at a time; hidden until the first, and again once dismissed."""

    def __init__(self, theme: Theme, *, can_close: bool = True) -> None:
        super().__init__()
        self.setObjectName("banner")
        self._theme = theme
        self._tone: Tone = "calm"
        self._glyph = QLabel()
        self._glyph.setFixedSize(20, 20)
        # Selectable, so that an error can be copied into a report.
        self._message = make_selectable(make_label(role="subheading", wraps=True))
        self._hint = make_selectable(make_label(wraps=True))
        self._action = Button(theme, "", self._act, role="")
        self._acted: Callable[[], object] | None = None
        self._topic = ""
        self._more = Button(
            theme,
            "More about this",
            lambda: open_help(self._topic),
            role="link",
            tip="Open the troubleshooting page at this problem",
        )
        self._is_so: Callable[[], bool] | None = None
        self._follows = False
        words = QVBoxLayout()
        words.setSpacing(2)
        words.addWidget(self._message)
        words.addWidget(self._hint)
        row = QHBoxLayout(self)
        row.setContentsMargins(14, 10, 10, 10)
        row.setSpacing(12)
        row.addWidget(self._glyph, 0, Qt.AlignmentFlag.AlignTop)
        row.addLayout(words, 1)
        row.addWidget(self._more)
        row.addWidget(self._action)
        close = IconButton(theme, "close", "Dismiss this message", self.hide)
        row.addWidget(close, 0, Qt.AlignmentFlag.AlignTop)
        close.setVisible(can_close)  # not before it has a parent: it would open as a window
        theme.changed.connect(self._paint_glyph)
        self.hide()

    def show_error(self, error: RacklessError) -> None:
        """Show an error, its hint, and a link to the page that explains it."""
        hint, topic = (error.hint, error.topic) if isinstance(error, UserError) else ("", "")
        self.show_message("error", str(error), hint, topic=topic)

    def show_message(
        self,
        tone: Tone,
        message: str,
        hint: str = "",
        action: tuple[str, Callable[[], object]] | None = None,
        topic: str = "",
    ) -> None:
        """Replace the message.

        Args:
            tone: kind of the message.
            message: what happened.
            hint: what to do next.
            action: label of a button and its handler.
            topic: section of the troubleshooting page; empty: no section.
        """
        self._topic = topic
        self._more.setVisible(bool(topic))
        self._is_so = None
        self._tone = tone
        self._message.setText(message)
        self._hint.setText(hint)
        self._hint.setVisible(bool(hint))
        self._action.setVisible(action is not None)
        if action is not None:
            self._action.setText(action[0])
            self._acted = action[1]
        set_style_property(self, "tone", tone)
        # A screen reader does not see the colour, so the tone is part of the name.
        self.setAccessibleName(f"{tone}: {message} {hint}".strip())
        self._paint_glyph()
        self.show()

    def lasts_while(self, is_so: Callable[[], bool], *changes: SignalInstance) -> None:
        """Hide the present message as soon as `is_so` returns False.

        Args:
            is_so: whether the state that the message is about still holds.
            changes: signals after which it is asked again; the same ones for every message.
        """
        self._is_so = is_so
        if not self._follows:
            self._follows = True
            for signal in changes:
                signal.connect(self._recheck)

    def _recheck(self, changed: object = None) -> None:
        if self._is_so is not None and not self._is_so():
            self._is_so = None
            self.hide()

    def show_notice(self, notice: tuple[Tone, str, str] | None) -> None:
        """Show (tone, message, hint); None hides the banner."""
        if notice is None:
            self.hide()
        else:
            self.show_message(*notice)

    def message(self) -> str:
        """Return the message and its hint; empty while the banner is hidden."""
        return f"{self._message.text()} {self._hint.text()}".strip() if self.isVisible() else ""

    def _act(self) -> None:
        if self._acted is not None:
            self._acted()

    def _paint_glyph(self) -> None:
        scale = self.devicePixelRatioF()
        self._glyph.setPixmap(self._theme.pixmap(self._tone, self._tone, 20, scale))
