"""Links into the troubleshooting page, which any widget can open without knowing the window."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, QUrl, Slot
from PySide6.QtGui import QDesktopServices

SCHEME = "rackless-help"


def open_help(topic: str) -> None:
    """Open the page at a topic, in the window of this process that handles its links."""
    QDesktopServices.openUrl(QUrl(f"{SCHEME}:{topic}"))


class HelpLinks(QObject):
    """Hands the topic of each opened link to `show`, as long as it lives."""

    def __init__(self, show: Callable[[str], object], parent: QObject) -> None:
        super().__init__(parent)
        self._show = show
        # PySide takes a str here, contrary to its stubs.
        QDesktopServices.setUrlHandler(SCHEME, self, "open_link")  # type: ignore[arg-type]

    @Slot(QUrl)
    def open_link(self, url: QUrl) -> None:
        self._show(url.path())
