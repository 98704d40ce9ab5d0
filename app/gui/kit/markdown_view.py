"""A Markdown viewer with spacing between headings, paragraphs, lists and tables."""

from __future__ import annotations

from PySide6.QtGui import QTextBlockFormat, QTextCursor, QTextFrameFormat, QTextTable
from PySide6.QtWidgets import QTextBrowser

MARGIN_PX = 20
ABOVE_HEADING_PX = 16
BELOW_PX = 8
CELL_PX = 5


class MarkdownView(QTextBrowser):
    def show_markdown(self, text: str) -> None:
        """Render `text`.

        Qt's importer leaves no margins between blocks, and style sheets do not reach a document
        made from Markdown, so the margins are set block by block.
        """
        self.setMarkdown(text)
        document = self.document()
        document.setDocumentMargin(MARGIN_PX)
        for number in range(document.blockCount()):
            cursor = QTextCursor(document.findBlockByNumber(number))
            # The cells of a table are blocks, too: each formats the whole table, to the same
            # result.
            if cursor.currentTable() is not None:
                _space_table(cursor.currentTable())
                continue
            form = QTextBlockFormat()
            is_heading = cursor.blockFormat().headingLevel() > 0
            form.setTopMargin(ABOVE_HEADING_PX if is_heading and number else 0)
            form.setBottomMargin(2 if cursor.currentList() is not None else BELOW_PX)
            # Merged, so that heading level and indent of the block stay.
            cursor.mergeBlockFormat(form)


def _space_table(table: QTextTable) -> None:
    form = table.format()
    form.setCellPadding(CELL_PX)
    form.setCellSpacing(0)
    form.setTopMargin(CELL_PX)
    form.setBorderCollapse(True)
    form.setBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
    form.setBottomMargin(BELOW_PX)
    table.setFormat(form)
