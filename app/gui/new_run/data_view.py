"""Data preview of a run: statistics, and three rows with the learned tokens marked.

Before a start it also shows the caveats of the run, such as parts that are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from agents.contract.data import DataPreview, ShownRow
from app.gui.kit.reader import Reader
from app.gui.kit.theme import Theme, ThemeColors
from app.planning.candidate import Caveats
from app.presentation.data_text import describe_data, spell_out, title_of
from app.presentation.model_text import describe_caveats
from app.text import capitalize

_LEARNED = '<span style="background-color:{};font-weight:600">'
# Not by colour alone, for colour-blind users: learned text is bold as well.
LEGEND = f"<p>{_LEARNED}Marked text</span> is learned; the rest is context.</p>"
"""Explanation of the marks, with a place for their colour."""
_NOTHING = "A preview appears here once the first rank has read the data."


def data_html(found: DataPreview, palette: ThemeColors, caveats: Caveats | None = None) -> str:
    """Return a data preview in the HTML subset that Qt's text widgets support."""
    facts = "".join(
        f'<tr><td style="color:{palette.muted};padding-right:16px">{capitalize(caption)}</td>'
        f"<td>{escape(text)}</td></tr>"
        for caption, text in describe_data(found)
    )
    legend = LEGEND.format(palette.good_tint)
    return (
        f"<table>{facts}</table>{_caveats_html(caveats)}{legend}{shown_html(found.rows, palette)}"
    )


def shown_html(rows: Sequence[ShownRow], palette: ThemeColors, *, is_titled: bool = True) -> str:
    """Return rows with their learned parts marked, below a title each if `is_titled`."""
    learned = _LEARNED.format(palette.good_tint)
    shown = []
    for row in rows:
        for conversation in row.conversations:
            parts = (
                f"{learned if part.learned else '<span>'}{escape(spell_out(part.text))}</span>"
                for part in conversation.parts
            )
            if is_titled:
                title = escape(title_of(row, conversation))
                shown.append(f'<p style="color:{palette.muted}">{title}</p>')
            shown.append(f'<p style="white-space:pre-wrap">{"".join(parts)}</p>')
    return "".join(shown)


def _caveats_html(caveats: Caveats | None) -> str:
    """Return what to know before a start; empty: nothing, or not known yet."""
    parts = []
    for title, lines in describe_caveats(caveats) if caveats is not None else ():
        parts.append(f'<p style="font-weight:600;margin-bottom:2px">{escape(title)}</p>')
        parts += [f'<p style="margin:2px 0 2px 0">{escape(line)}</p>' for line in lines]
    return "".join(parts)


class DataView(Reader):
    """Shows a data preview, or a placeholder until `show_data` is called."""

    def __init__(self, theme: Theme, nothing: str = _NOTHING) -> None:
        super().__init__()
        self._theme = theme
        self._nothing = nothing
        self._found: DataPreview | None = None
        self._caveats: Caveats | None = None
        self.setAccessibleName("Data preview")
        # Colours are written into the HTML, so a new theme needs a new document.
        theme.changed.connect(self._draw)
        self._draw()

    def show_data(self, found: DataPreview | None) -> None:
        """Show a preview; None: not known yet."""
        # Setting equal HTML again would scroll back to the top.
        if found != self._found:
            self._found = found
            self._draw()

    def show_caveats(self, caveats: Caveats) -> None:
        """Show the caveats of the run below the figures of the data."""
        if caveats != self._caveats:
            self._caveats = caveats
            self._draw()

    def _draw(self) -> None:
        if self._found is None:
            self.setPlainText(self._nothing)
        else:
            self.setHtml(data_html(self._found, self._theme.palette, self._caveats))
