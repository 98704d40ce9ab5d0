"""Live transcript of a conversation: prompts, answers and their speed."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from PySide6.QtGui import QTextCursor

from app.gui.kit.reader import Reader
from app.gui.kit.theme import Theme

_NOTHING = "No questions yet."


@dataclass(slots=True)
class Exchange:
    """One question and its answer so far."""

    prompt: str
    text: str = ""
    figures: str = ""
    """Speed and length, shown below a complete answer."""
    problem: str = ""
    is_alone: bool = False
    """Asked on its own, outside the conversation."""


class Transcript(Reader):
    """Grows at its end, and keeps its place if the user has scrolled up."""

    def __init__(self, theme: Theme, name: str) -> None:
        super().__init__()
        self._theme = theme
        self.exchanges: list[Exchange] = []
        self.setAccessibleName(name)
        theme.changed.connect(self.draw)
        self.draw()

    def turns(self) -> list[tuple[str, str]]:
        """Return the turns of the conversation: questions and answers, alternating."""
        # Only a complete answer has figures; a question without one is not sent again.
        whole = [one for one in self.exchanges if one.figures and not one.is_alone]
        return [(one.prompt, one.text) for one in whole]

    def ask(self, prompt: str, *, is_alone: bool = False) -> None:
        """Start a new exchange; `is_alone`: outside the conversation."""
        self.exchanges.append(Exchange(prompt, is_alone=is_alone))
        self.draw()
        self._go_to_end()

    def append_piece(self, piece: str) -> None:
        """Append a piece to the current answer."""
        # Asked before the text grows, since growing moves the end away.
        follows = self._is_at_end()
        self.exchanges[-1].text += piece
        # Inserted as text: a redraw for every piece would lay out the whole chat each time.
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.insertText(piece)
        if follows:
            self._go_to_end()

    def finish(self, text: str = "", figures: str = "", problem: str = "") -> None:
        """Complete the last exchange with its answer, or with the reason for having none."""
        if not self.exchanges:
            return
        follows, last = self._is_at_end(), self.exchanges[-1]
        last.text = text or last.text
        last.figures, last.problem = figures, problem
        self.draw()
        if follows:
            self._go_to_end()

    def forget(self) -> None:
        """Clear the transcript."""
        self.exchanges.clear()
        self.draw()

    def draw(self) -> None:
        """Redraw all exchanges."""
        palette, place = self._theme.palette, self.verticalScrollBar().value()
        if not self.exchanges:
            self.setHtml(f'<p style="color:{palette.muted}">{_NOTHING}</p>')
            return
        parts = []
        for one in self.exchanges:
            parts.append(
                f'<p style="color:{palette.accent};font-weight:600;white-space:pre-wrap;'
                f'margin-top:10px;margin-bottom:2px">{escape(one.prompt)}</p>'
            )
            if one.figures:
                parts.append(_paragraph(palette.text, one.text.strip()))
                parts.append(_paragraph(palette.muted, one.figures, "font-size:12px"))
            elif one.problem:
                parts.append(_paragraph(palette.text, one.text) if one.text else "")
                parts.append(_paragraph(palette.error, one.problem))
            else:
                parts.append(_paragraph(palette.text, one.text))
        self.setHtml("".join(parts))
        # `setHtml` scrolls to the top.
        self.verticalScrollBar().setValue(place)

    def _is_at_end(self) -> bool:
        bar = self.verticalScrollBar()
        return bar.value() >= bar.maximum() - 4

    def _go_to_end(self) -> None:
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum())


def _paragraph(color: str, text: str, style: str = "") -> str:
    shown = escape(text) or "&nbsp;"
    return (
        f'<p style="color:{color};white-space:pre-wrap;margin-top:2px;margin-bottom:2px;{style}">'
        f"{shown}</p>"
    )
