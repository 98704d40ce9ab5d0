"""The story of a run's interruptions as a timeline, as a tab of the run page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QGridLayout, QLabel, QVBoxLayout, QWidget

from app.core.runs import ListInterruptions
from app.gui.kit.primitives import make_label, make_scroll_area, make_selectable
from app.gui.kit.theme import Theme
from app.gui.session.context import Context
from app.interruption import Interruption
from app.presentation.interruption_text import StoryMoment, summarize_story, tell_story
from app.text import show_moment

_NOTHING = (
    "This run has not been interrupted. If it loses a rank or a node, what happened, what was done "
    "and what it cost is listed here."
)
MARK_PX = 16
TITLE_PX = 150
"""Minimum width of the titles of moments, in pixels."""


class RecoveryPane(QWidget):
    """Newest interruption first, each as its moments from loss to training again."""

    summarized = Signal(str)
    """The story in one line; empty: no interruption."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._run_id = ""
        self._shown: list[tuple[StoryMoment, bool]] | None = None
        self._labels: list[QWidget] = []
        self.note = make_label(_NOTHING, "muted", wraps=True)
        body = QWidget()
        self._grid = QGridLayout(body)
        self._grid.setContentsMargins(0, 0, 12, 0)
        self._grid.setHorizontalSpacing(12)
        self._grid.setVerticalSpacing(0)
        self._grid.setColumnMinimumWidth(2, TITLE_PX)
        self._grid.setColumnStretch(3, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addWidget(self.note)
        column.addWidget(make_scroll_area(body), 1)

    def open_run(self, run_id: str) -> None:
        """Show another run."""
        self._run_id = run_id
        self._show(run_id, ())
        self.refresh()

    def refresh(self) -> None:
        """Query the interruptions again."""
        run_id = self._run_id
        if run_id:
            self._context.bridge.do(
                ListInterruptions(run_id=run_id),
                partial(self._show, run_id),
                failure=lambda error: None,  # deleted meanwhile: the page closes
            )

    def texts(self) -> list[str]:
        """Return title and text of all moments, in the order of the pane."""
        return [f"{moment.title}: {moment.text}" for moment, _ in self._shown or ()]

    def _show(self, run_id: str, found: Sequence[Interruption]) -> None:
        # The answer is for a run that is no longer shown.
        if run_id != self._run_id:
            return
        self.note.setVisible(not found)
        self.summarized.emit(summarize_story(found))
        stories = [tell_story(one) for one in reversed(found)]
        rows = [(moment, moment is story[0]) for story in stories for moment in story]
        if rows == self._shown:
            return  # the user may be selecting text
        self._shown = rows
        self._fill(rows)

    def _fill(self, rows: Sequence[tuple[StoryMoment, bool]]) -> None:
        for label in self._labels:
            self._grid.removeWidget(label)
            label.hide()  # deleteLater waits for the event loop; until then it would overlap
            label.deleteLater()
        self._labels = []
        now_s = self._context.cluster.now_s()
        for place, (moment, is_first) in enumerate(rows):
            is_last = place + 1 == len(rows) or rows[place + 1][1]
            at = show_moment(moment.time_s, now_s) if moment.time_s is not None else "now"
            text = make_selectable(make_label(moment.text, wraps=True))
            text.setAccessibleName(f"{at}, {moment.title}: {moment.text}")
            mark = _Mark(self._context.theme, moment, above=not is_first, below=not is_last)
            for side, label in enumerate((_caption(at), mark, _title(moment.title), text)):
                if side != 1:
                    label.setContentsMargins(0, 6, 0, 18 if is_last else 6)
                    self._grid.addWidget(label, place, side, Qt.AlignmentFlag.AlignTop)
                else:
                    self._grid.addWidget(label, place, side)
                self._labels.append(label)
        self._grid.setRowStretch(len(rows), 1)


def _caption(text: str) -> QLabel:
    return make_label(text, "muted")


def _title(text: str) -> QLabel:
    return make_label(text, "subheading")


class _Mark(QWidget):
    """Glyph of a moment, joined by a line to those above and below."""

    def __init__(self, theme: Theme, moment: StoryMoment, *, above: bool, below: bool) -> None:
        super().__init__()
        self._theme, self._moment = theme, moment
        self._above, self._below = above, below
        self.setFixedWidth(MARK_PX)
        theme.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return QSize(MARK_PX, MARK_PX + 12)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        center, top = self.width() / 2, 6.0
        painter.setPen(QPen(self._theme.palette.color("border_strong"), 1.5))
        if self._above:
            painter.drawLine(QPointF(center, 0), QPointF(center, top - 2))
        if self._below:
            painter.drawLine(QPointF(center, top + MARK_PX + 2), QPointF(center, self.height()))
        tone = self._moment.tone
        self._theme.paint_icon(painter, tone, tone, QRectF(0, top, MARK_PX, MARK_PX))
