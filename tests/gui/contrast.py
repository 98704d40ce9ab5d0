"""How well colours stand apart: as WCAG 2.2 computes it, and as it is really drawn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PySide6.QtCore import QPoint, QRect
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QLabel, QPushButton, QTabBar, QTableView, QToolButton, QWidget

from app.gui.kit.status import StatusPill

TEXT, MEANING = 4.5, 3.0
"""Least contrast of text, and of glyphs and lines that mean something."""
LEAST_LETTERS = 4
"""Of a text that is judged as it is drawn: a dash has no stem of full colour."""
Pixels = NDArray[np.uint8]


def luminance(color: str) -> float:
    """Return the relative luminance of `#rrggbb`, 0 to 1."""
    return float(_luminances(np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)]]))[0])


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminances(rgb: NDArray[np.int_] | Pixels) -> NDArray[np.float64]:
    parts = rgb / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return np.asarray(linear @ np.array([0.2126, 0.7152, 0.0722]))


def find_faint(root: QWidget) -> Iterator[str]:
    """Draw a window and complain of texts that stand out too little from their ground."""
    image = root.grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
    raw = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.width(), 4)
    scale = image.devicePixelRatio()
    for text, area in dict(_texts(root)).items():
        at = area.intersected(root.rect())
        rows = slice(round(at.top() * scale), round((at.bottom() + 1) * scale))
        columns = slice(round(at.left() * scale), round((at.right() + 1) * scale))
        pixels = raw[rows, columns, 2::-1].reshape(-1, 3)
        if at.width() >= 24 and at.height() >= 12 and len(pixels):
            drawn = strongest(pixels)
            if drawn < TEXT:
                yield f"contrast {drawn:.2f}: '{text}'"


def strongest(pixels: Pixels) -> float:
    """Return the contrast between the commonest colour and the one that stands out most."""
    codes = pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
    kinds, counts = np.unique(codes, return_counts=True)
    rgb = np.stack([kinds >> 16 & 255, kinds >> 8 & 255, kinds & 255], axis=1)
    lights = _luminances(rgb) + 0.05
    ground = lights[int(np.argmax(counts))]
    return float(np.max(np.maximum(lights / ground, ground / lights)))


def _texts(root: QWidget) -> Iterator[tuple[str, QRect]]:
    for widget in root.findChildren(QWidget):
        if not widget.isVisible() or widget.visibleRegion().isEmpty():
            continue
        seen = widget.visibleRegion().boundingRect()
        if isinstance(widget, (QLabel, QPushButton, QToolButton)):
            if len(widget.text().strip()) >= LEAST_LETTERS and seen.height() >= 12:
                # inside the edge of a button, which may be louder than its words
                yield widget.text().strip(), _in(root, widget, seen.adjusted(3, 3, -3, -3))
        elif isinstance(widget, StatusPill):
            yield widget.accessibleName(), _in(root, widget, seen.adjusted(26, 0, 0, 0))
        elif isinstance(widget, QTabBar):
            for place in range(widget.count()):
                area = widget.tabRect(place).adjusted(2, 2, -2, -4)
                yield f"tab {widget.tabText(place)}", _in(root, widget, area)
        elif isinstance(widget, QTableView):
            yield from _cells(root, widget)


def _cells(root: QWidget, table: QTableView) -> Iterator[tuple[str, QRect]]:
    model, viewport = table.model(), table.viewport()
    for row in range(min(model.rowCount(), 6)):
        for column in range(model.columnCount()):
            index = model.index(row, column)
            text, area = str(index.data()), table.visualRect(index).adjusted(4, 2, -4, -3)
            is_seen = viewport.rect().contains(area)
            if is_seen and len(text) >= LEAST_LETTERS:
                yield f"{text} in {table.accessibleName()}", _in(root, viewport, area)


def _in(root: QWidget, widget: QWidget, area: QRect) -> QRect:
    return QRect(widget.mapTo(root, QPoint()) + area.topLeft(), area.size())
