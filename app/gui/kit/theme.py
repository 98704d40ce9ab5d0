"""Colours, fonts and icons of the window, in light and dark.

Everything is read from `resources/` once, before the first window opens, so that switching the
colour scheme reads no file. Custom-painted widgets look up `palette` when they paint, and repaint
on `changed`. Sizes are logical pixels on a grid of 8; Qt scales them on high-density screens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from string import Template

from PySide6.QtCore import QByteArray, QObject, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontDatabase,
    QGuiApplication,
    QIcon,
    QPainter,
    QPixmap,
    QStaticText,
)
from PySide6.QtGui import QPalette as QtPalette
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QApplication

RESOURCES = Path(__file__).resolve().parents[3] / "resources"
SCHEMES = {
    "system": Qt.ColorScheme.Unknown,
    "light": Qt.ColorScheme.Light,
    "dark": Qt.ColorScheme.Dark,
}
"""Colour scheme for each value of the setting `theme`."""
MAX_CACHED_PIXMAPS = 48
"""Maximum number of cached pixmaps; one of a card takes 0.3 MB, 1.2 MB on a 2x screen."""
MAX_CACHED_TEXTS = 4096
"""Maximum number of cached text layouts, about 300 bytes each."""
FAMILIES = ["Inter", "Segoe UI", "Cantarell", "Noto Sans", "DejaVu Sans"]
MONOSPACE = ["DejaVu Sans Mono", "Cascadia Mono", "Consolas", "Liberation Mono", "monospace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThemeColors:
    """Colours by purpose, as `#rrggbb`; the keys of the files in resources/themes."""

    name: str
    window: str
    surface: str
    sunken: str
    hover: str
    selected: str
    border: str
    scroll: str
    border_strong: str
    text: str
    muted: str
    accent: str
    accent_hover: str
    on_accent: str
    good: str
    warning: str
    error: str
    good_tint: str
    warning_tint: str
    error_tint: str
    busy_tint: str
    calm_tint: str
    chart_utilisation: str
    chart_memory: str
    chart_temperature: str
    chart_tokens: str
    chart_muted: str
    chart_grid: str

    @property
    def busy(self) -> str:
        return self.accent

    @property
    def calm(self) -> str:
        return self.muted

    def color(self, name: str) -> QColor:
        """Return the colour of a field."""
        return _color(str(getattr(self, name)))


# The colours are shared: copy one before changing it, as `paint_marks` does.
@lru_cache(maxsize=256)
def _color(text: str) -> QColor:
    return QColor(text)


def read_palette(name: str) -> ThemeColors:
    """Read a theme file; its keys must be exactly the fields of ThemeColors."""
    text = (RESOURCES / "themes" / f"{name}.json").read_text(encoding="ascii")
    return ThemeColors(**json.loads(text))


class Theme(QObject):
    """Palette, fonts and icons of the application; one instance, passed to every widget."""

    changed = Signal()

    def __init__(self, application: QApplication) -> None:
        super().__init__(application)
        self._application = application
        self._palettes = {name: read_palette(name) for name in ("light", "dark")}
        self._style = Template((RESOURCES / "themes" / "window.qss").read_text(encoding="ascii"))
        self._icons = {
            path.stem: path.read_text(encoding="ascii")
            for path in sorted((RESOURCES / "icons").glob("*.svg"))
        }
        for path in sorted((RESOURCES / "fonts").glob("*.otf")):
            QFontDatabase.addApplicationFont(str(path))
        self._fonts: dict[tuple[int, int, bool], QFont] = {}
        self._texts: dict[tuple[str, int, int], tuple[QStaticText, float, float]] = {}
        self._cache: dict[tuple[object, ...], QPixmap] = {}
        self._pixmaps: dict[tuple[str, str, int, float], QPixmap] = {}
        self.palette = self._palettes["light"]
        # The only style that follows palette and style sheet alike on every platform.
        application.setStyle("Fusion")
        application.setFont(self.font(13))
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._follow)
        self._follow(QGuiApplication.styleHints().colorScheme())

    def choose(self, scheme: Qt.ColorScheme) -> None:
        """Use light or dark, or the system's scheme for `Unknown`."""
        QGuiApplication.styleHints().setColorScheme(scheme)
        # Called here as well, since Qt signals only a scheme that differs from the present one.
        self._follow(
            scheme
            if scheme != Qt.ColorScheme.Unknown
            else QGuiApplication.styleHints().colorScheme()
        )

    def choose_named(self, name: str) -> None:
        """Use one of SCHEMES."""
        self.choose(SCHEMES[name])

    def font(self, size_px: int, weight: int = 400, *, monospace: bool = False) -> QFont:
        """Return a cached font with digits of equal width."""
        key = (size_px, weight, monospace)
        if key not in self._fonts:
            self._fonts[key] = self._make_font(size_px, weight, monospace)
        return self._fonts[key]

    def paint_text(
        self,
        painter: QPainter,
        line: QRectF,
        text: str,
        size_px: int,
        color: str,
        *,
        weight: int = 400,
        is_right: bool = False,
    ) -> None:
        """Draw a text on one line, vertically centred in `line`.

        Layouts are cached: the same figures recur, and laying out is most of the cost.
        """
        # The colour is not part of the key: QStaticText is painted with the pen of the moment.
        key = (text, size_px, weight)
        if key not in self._texts:
            if len(self._texts) >= MAX_CACHED_TEXTS:
                self._texts.clear()
            static = QStaticText(text)
            static.setTextFormat(Qt.TextFormat.PlainText)
            static.prepare(font=self.font(size_px, weight))
            self._texts[key] = (static, static.size().width(), static.size().height())
        static, width, height = self._texts[key]
        painter.setFont(self.font(size_px, weight))
        painter.setPen(self.palette.color(color))
        left = line.right() - width if is_right else line.left()
        painter.drawStaticText(QPointF(left, line.center().y() - height / 2), static)

    def cached_pixmap(self, key: tuple[object, ...], make: Callable[[], QPixmap]) -> QPixmap:
        """Return the pixmap cached under `key`, made by `make` the first time in this theme."""
        if key not in self._cache:
            if len(self._cache) >= MAX_CACHED_PIXMAPS:
                self._cache.clear()
            self._cache[key] = make()
        return self._cache[key]

    def _make_font(self, size_px: int, weight: int, monospace: bool) -> QFont:
        font = QFont(MONOSPACE if monospace else FAMILIES)
        font.setPixelSize(size_px)
        font.setWeight(QFont.Weight(weight))
        if not monospace:
            font.setFeature(QFont.Tag("tnum"), 1)  # tabular digits: changing figures do not jump
        return font

    def icon(self, name: str, color: str = "text", size_px: int = 20) -> QIcon:
        """Return an icon in a colour of the palette, greyed out when disabled."""
        icon = QIcon()
        for mode, shade in ((QIcon.Mode.Normal, color), (QIcon.Mode.Disabled, "border_strong")):
            # Both densities: a window may be dragged to another screen.
            for scale in (1, 2):
                icon.addPixmap(self.pixmap(name, shade, size_px, scale), mode)
        return icon

    def pixmap(self, name: str, color: str, size_px: int, scale: float = 1) -> QPixmap:
        """Return a cached icon of `size_px` logical pixels for a device pixel ratio of `scale`."""
        shade = str(getattr(self.palette, color))
        # By shade and not by the colour's name, so that a change of theme leaves no stale icons.
        key = (name, shade, size_px, scale)
        if key not in self._pixmaps:
            self._pixmaps[key] = self._draw(name, shade, size_px, scale)
        return self._pixmaps[key]

    def _draw(self, name: str, shade: str, size_px: int, scale: float) -> QPixmap:
        pixmap = QPixmap(QSize(round(size_px * scale), round(size_px * scale)))
        pixmap.fill(Qt.GlobalColor.transparent)
        painter = QPainter(pixmap)
        # Nothing around the icon sets a colour, so Qt would paint currentColor black.
        text = self._icons[name].replace("currentColor", shade)
        QSvgRenderer(QByteArray(text.encode("ascii"))).render(painter, QRectF(pixmap.rect()))
        painter.end()
        pixmap.setDevicePixelRatio(scale)
        return pixmap

    def paint_icon(self, painter: QPainter, name: str, color: str, area: QRectF) -> None:
        """Draw a square icon into `area`."""
        scale = painter.device().devicePixelRatio()
        painter.drawPixmap(area.topLeft(), self.pixmap(name, color, round(area.width()), scale))

    def _follow(self, scheme: Qt.ColorScheme) -> None:
        self.palette = self._palettes["dark" if scheme == Qt.ColorScheme.Dark else "light"]
        values = {field.name: getattr(self.palette, field.name) for field in fields(ThemeColors)}
        for key, icon in (("down_arrow", "chevron"), ("up_arrow", "chevron-up"), ("tick", "tick")):
            file = RESOURCES / "icons" / f"{icon}-{self.palette.name}.svg"
            values[key] = file.as_posix()  # style sheets cannot recolour an SVG: one file per theme
        self._cache.clear()  # cached pixmaps were painted in the other palette
        self._application.setPalette(_qt_palette(self.palette))
        self._application.setStyleSheet(self._style.substitute(values))
        self.changed.emit()


def _qt_palette(palette: ThemeColors) -> QtPalette:
    role = QtPalette.ColorRole
    result = QtPalette()
    for part, color in (
        (role.Window, palette.window),
        (role.WindowText, palette.text),
        (role.Base, palette.surface),
        (role.AlternateBase, palette.sunken),
        (role.Text, palette.text),
        (role.Button, palette.surface),
        (role.ButtonText, palette.text),
        (role.PlaceholderText, palette.muted),
        (role.Highlight, palette.selected),
        (role.HighlightedText, palette.text),
        (role.ToolTipBase, palette.surface),
        (role.ToolTipText, palette.text),
        (role.Link, palette.accent),
        (role.Accent, palette.accent),
    ):
        result.setColor(part, QColor(color))
    # Last: setting a role without a group, as above, sets it for disabled widgets, too.
    result.setColor(QtPalette.ColorGroup.Disabled, role.Text, QColor(palette.muted))
    result.setColor(QtPalette.ColorGroup.Disabled, role.ButtonText, QColor(palette.muted))
    return result
