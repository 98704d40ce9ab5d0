"""The tray icon with its menu, and desktop notifications.

While the window is in front, or where the desktop has no tray, notifications appear above the page,
and the window's entry in the task bar asks for attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from PySide6.QtCore import QObject, QPointF, QRectF, Qt, QTimer
from PySide6.QtGui import QColor, QIcon, QPainter, QPen, QPixmap, QPolygonF
from PySide6.QtWidgets import QApplication, QMenu, QSystemTrayIcon

from app.events import RunSnapshot
from app.gui.kit.primitives import escape_mnemonic, plain_for_desktop
from app.gui.kit.theme import Theme
from app.gui.session.banner_task import last_while, last_with_run
from app.gui.session.context import Context
from app.gui.shell.shell import Shell
from app.telemetry.notices import SETTING_OF, Notice, Notices
from app.telemetry.state import Tone
from app.telemetry.stream import DeviceKey
from app.telemetry.whole import Whole, describe_progress, describe_whole
from app.text import capitalize

SIZE_PX = 64
RING_PX = 8.0
BADGE_PX = 34.0
STEPS = 20
"""Number of steps of the ring; few, so that the icon is seldom sent to the desktop."""

# The panel may be light or dark independently of the window, so no theme applies.
_TRACK, _DONE = QColor(128, 128, 140, 110), QColor("#4f7bff")
_WARNING, _ERROR, _EDGE = QColor("#e8a100"), QColor("#d93a3a"), QColor("#ffffff")


def picture_key(whole: Whole) -> tuple[str, int | None]:
    """Return the values that the icon depends on; equal keys mean equal icons."""
    badge = whole.tone if whole.tone in ("warning", "error") else ""
    return badge, None if whole.share is None else round(whole.share * STEPS)


def draw_tray_icon(theme: Theme, whole: Whole) -> QIcon:
    """Return the icon for the state of all nodes and runs."""
    badge, step = picture_key(whole)
    pixmap = QPixmap(SIZE_PX, SIZE_PX)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    area = QRectF(pixmap.rect())
    inset = 0.0 if step is None else RING_PX + 5
    mark = round(SIZE_PX - 2 * inset)
    painter.drawPixmap(QPointF(inset, inset), theme.pixmap("rackless", "text", mark))
    if step is not None:
        ring = area.adjusted(RING_PX / 2, RING_PX / 2, -RING_PX / 2, -RING_PX / 2)
        painter.setPen(QPen(_TRACK, RING_PX))
        painter.drawEllipse(ring)
        pen = QPen(_DONE, RING_PX)
        pen.setCapStyle(Qt.PenCapStyle.FlatCap)
        painter.setPen(pen)
        # Qt counts in sixteenths of a degree, anticlockwise from three o'clock.
        # At least one step, so that a run that has just started shows an arc.
        painter.drawArc(ring, 90 * 16, -round(360 * 16 * max(step, 1) / STEPS))
    if badge:
        corner = QRectF(SIZE_PX - BADGE_PX, SIZE_PX - BADGE_PX, BADGE_PX, BADGE_PX)
        (_draw_cross if badge == "error" else _draw_triangle)(painter, corner)
    painter.end()
    return QIcon(pixmap)


def _draw_triangle(painter: QPainter, area: QRectF) -> None:
    inner = area.adjusted(3, 3, -3, -3)
    top = QPointF(inner.center().x(), inner.top())
    painter.setPen(QPen(_EDGE, 4, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
    painter.setBrush(_WARNING)
    painter.drawPolygon(QPolygonF([top, inner.bottomRight(), inner.bottomLeft()]))


def _draw_cross(painter: QPainter, area: QRectF) -> None:
    painter.setPen(QPen(_EDGE, 3))
    painter.setBrush(_ERROR)
    painter.drawEllipse(area.adjusted(2, 2, -2, -2))
    arm = area.adjusted(12, 12, -12, -12)
    painter.setPen(QPen(_EDGE, 4, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
    painter.drawLine(arm.topLeft(), arm.bottomRight())
    painter.drawLine(arm.topRight(), arm.bottomLeft())


REFRESH_MS = 1000
"""Minimum interval between two updates of icon and menu, in milliseconds."""
SHOWN_MS = 10_000
"""Display time of a notification, in milliseconds; some desktops ignore it."""
_SIGNS: dict[Tone, QSystemTrayIcon.MessageIcon] = {
    "warning": QSystemTrayIcon.MessageIcon.Warning,
    "error": QSystemTrayIcon.MessageIcon.Critical,
}


class Tray(QObject):
    """Created once the core is open, after the first frame."""

    def __init__(
        self, context: Context, window: Shell, icon: QSystemTrayIcon | None = None
    ) -> None:
        super().__init__(window)
        self._context, self._window = context, window
        self._cluster = context.cluster
        self._notices = Notices()
        # For a click on a notification: Qt does not say on which, so it is the newest one.
        self._opens: Callable[[], object] = window.come_forward
        self._key: object = None
        self._shown: tuple[str, ...] = ()
        self.icon = icon or QSystemTrayIcon(self)
        self.menu = QMenu(window)
        self.icon.setContextMenu(self.menu)
        self.icon.activated.connect(self._clicked)
        self.icon.messageClicked.connect(lambda: self._opens())
        self._timer = QTimer(self, interval=REFRESH_MS, singleShot=True)
        self._timer.timeout.connect(self.refresh)
        # What ended before the window opened is not news.
        for run in self._cluster.run_list():
            self._notices.take_run(run, self._cluster.now_s())
        self._connect()
        self.refresh()
        self.icon.show()
        window.close_policy.has_tray = QSystemTrayIcon.isSystemTrayAvailable

    def _connect(self) -> None:
        cluster = self._cluster
        cluster.run_changed.connect(self._take_run)
        cluster.run_deleted.connect(self._notices.forget_run)
        cluster.devices_changed.connect(self._take_devices)
        for signal in (cluster.run_changed, cluster.run_deleted, cluster.node_changed):
            signal.connect(self._refresh_soon)
        cluster.devices_changed.connect(self._refresh_soon)
        self._window.hidden.connect(self._notify_hidden)
        self._window.finished.connect(self.icon.hide)

    # ------------------------------------------------------------ state

    def _refresh_soon(self) -> None:
        if not self._timer.isActive():
            self._timer.start()

    def refresh(self) -> None:
        """Update icon, tooltip and menu; parts that did not change are not sent to the desktop."""
        cluster = self._cluster
        runs = [cluster.current_run(run_id) or run for run_id, run in cluster.runs.items()]
        whole = describe_whole(cluster.nodes.values(), runs, cluster.telemetry)
        if picture_key(whole) != self._key:
            self._key = picture_key(whole)
            self.icon.setIcon(draw_tray_icon(self._context.theme, whole))
        active = self._active_runs()
        lines = (whole.text, *(describe_progress(run) for run in active))
        # A menu that is refilled while open closes on some desktops.
        if lines != self._shown and not self.menu.isVisible():
            self._shown = lines
            self.icon.setToolTip(plain_for_desktop(f"Rackless: {whole.text}"))
            self._fill_menu(whole.text)

    def _active_runs(self) -> list[RunSnapshot]:
        """Return the active runs for display, without the figures of silent nodes."""
        cluster = self._cluster
        return [cluster.current_run(run.run_id) or run for run in cluster.active_runs()]

    def _fill_menu(self, text: str) -> None:
        window = self._window
        self.menu.clear()
        self.menu.addAction(escape_mnemonic(capitalize(text))).setEnabled(False)
        for run in self._active_runs():
            action = self.menu.addAction(escape_mnemonic(describe_progress(run)))
            action.triggered.connect(partial(self._open_run, run.run_id))
        self.menu.addSeparator()
        self.menu.addAction("Open Rackless").triggered.connect(window.come_forward)
        self.menu.addAction("New run").triggered.connect(self._ask_new_run)
        self.menu.addSeparator()
        self.menu.addAction("Quit Rackless").triggered.connect(window.quit)

    # ------------------------------------------------------------ notifications

    def _take_run(self, run_id: str) -> None:
        notice = self._notices.take_run(self._cluster.runs[run_id], self._cluster.now_s())
        if notice is not None:
            self.notify(notice)

    def _take_devices(self, keys: list[DeviceKey]) -> None:
        devices = [self._cluster.telemetry[key] for key in keys]
        for notice in self._notices.take_devices(devices, self._cluster.now_s()):
            self.notify(notice)

    def notify(self, notice: Notice) -> None:
        """Show a notice, in the active window or on the desktop, unless its kind is disabled."""
        if not self._context.preferences.get(SETTING_OF[notice.kind]):
            return
        self._opens = partial(self._open_run, notice.run_id)
        if not notice.run_id:
            self._opens = partial(self._open_node, notice.node)
        if self._window.isActiveWindow() or not self._window.close_policy.has_tray():
            banner = self._window.banner
            banner.show_message(notice.tone, notice.title, notice.text, ("Open", self._opens))
            self._last_with(notice)
            QApplication.alert(self._window)
            return
        sign = _SIGNS.get(notice.tone, QSystemTrayIcon.MessageIcon.Information)
        self._show(notice.title, notice.text, sign)

    def _last_with(self, notice: Notice) -> None:
        """Hide the banner of a notice once its state is over."""
        context, banner, cluster = self._context, self._window.banner, self._cluster
        if notice.run_id:
            last_with_run(context, banner, notice.run_id)
            return

        def is_so() -> bool:
            devices = cluster.telemetry.of_node(notice.node)
            alerts = [alert for d in devices for alert in (*d.alerts, *d.node_alerts)]
            return any(alert.kind == notice.kind for alert in alerts)

        last_while(context, banner, is_so)

    def _notify_hidden(self, said: tuple[str, str] | None) -> None:
        if said is not None:
            self._opens = self._window.come_forward
            title, text = said
            sign = QSystemTrayIcon.MessageIcon.Information
            self._show(title, text, sign)

    def _show(self, title: str, text: str, sign: QSystemTrayIcon.MessageIcon) -> None:
        self.icon.showMessage(plain_for_desktop(title), plain_for_desktop(text), sign, SHOWN_MS)

    # ------------------------------------------------------------ clicks

    def _clicked(self, reason: QSystemTrayIcon.ActivationReason) -> None:
        # The context click opens the menu.
        if reason != QSystemTrayIcon.ActivationReason.Context:
            self._window.come_forward()

    def _open_run(self, run_id: str) -> None:
        self._window.banner.hide()
        self._window.come_forward()
        # It may have been deleted since the notification.
        if run_id in self._cluster.runs:
            self._window.open_run(run_id)

    def _open_node(self, name: str) -> None:
        self._window.banner.hide()
        self._window.come_forward()
        if name in self._cluster.nodes:
            self._window.open_node(name)

    def _ask_new_run(self) -> None:
        self._window.come_forward()
        self._window.actions_["new_run"].trigger()
