"""A browser for untrusted text: it loads no resources, and opens only web pages, outside.

Qt would read every image and style sheet that a text names: a device fills all memory, a pipe never
ends, and a network path sends this user's name and password hash to the author of the text.
"""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QByteArray, Qt, QUrl
from PySide6.QtGui import QDesktopServices, QImage, QTextDocument
from PySide6.QtWidgets import QTextBrowser

from app.gui.kit.primitives import set_tooltip


class Reader(QTextBrowser):
    """Shows a text; a link to a web page opens in the user's browser, any other does nothing."""

    def __init__(self) -> None:
        super().__init__()
        # Both off: the widget itself neither follows a link nor hands one to the system.
        self.setOpenLinks(False)
        self.setOpenExternalLinks(False)
        self.anchorClicked.connect(_open)
        # The text of a link may say anything, so its address is shown before a click.
        self.highlighted.connect(lambda url: set_tooltip(self, _describe(url)))

    def loadResource(self, type: int, name: QUrl | str) -> Any:
        """Return an empty resource for every name."""
        # Not None for an image: Qt's painter would then open the name as a file by itself.
        if type == QTextDocument.ResourceType.ImageResource.value:
            return _nothing()
        return QByteArray()


def is_web_page(address: QUrl | str) -> bool:
    """Return whether a link may be opened: an https address of a host, without a password."""
    url = QUrl(address)
    return url.isValid() and url.scheme() == "https" and bool(url.host()) and not url.userInfo()


def _nothing() -> QImage:
    image = QImage(1, 1, QImage.Format.Format_ARGB32)
    image.fill(Qt.GlobalColor.transparent)
    return image


def _open(url: QUrl) -> None:
    if is_web_page(url):
        QDesktopServices.openUrl(url)


def _describe(url: QUrl) -> str:
    return url.toDisplayString() if is_web_page(url) else ""
