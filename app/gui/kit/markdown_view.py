"""A Markdown viewer with spacing between headings, paragraphs, lists and tables.

The text is untrusted: HTML in it is shown literally, an image is replaced by its description, and
only links to web pages remain links.
"""

from __future__ import annotations

from PySide6.QtGui import (
    QFont,
    QTextBlock,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextFragment,
    QTextFrameFormat,
    QTextTable,
)

from app.gui.kit.reader import Reader, is_web_page

MARGIN_PX = 20
INDENT_PX = 20
"""Width of one level of a list, in pixels; Qt's own is 40."""
ITEM_PX = 6
"""Space below an item of a list, in pixels."""
ABOVE_HEADING_PX = 16
BELOW_PX = 8
CELL_PX = 5
MAX_CHARS, MAX_LINES, MAX_CELLS = 64_000, 2_000, 4_000
"""Largest text that is rendered: Qt's layout takes time by the square of lists and tables, and a
larger one would hold up the window."""
_LIMITS = (MAX_CHARS, MAX_LINES, MAX_CELLS)
_FEATURES = (
    QTextDocument.MarkdownFeature.MarkdownDialectGitHub
    | QTextDocument.MarkdownFeature.MarkdownNoHTML
)


class MarkdownView(Reader):
    def show_markdown(self, text: str) -> None:
        """Render `text`.

        Qt's importer leaves no margins between blocks, and style sheets do not reach a document
        made from Markdown, so the margins are set block by block.
        """
        document = self.document()
        if not _is_small(text):
            self.setPlainText(_shorten(text))
            return
        document.setMarkdown(text, _FEATURES)
        document.setDocumentMargin(MARGIN_PX)
        document.setIndentWidth(INDENT_PX)
        cursor = QTextCursor(document)
        # One edit: otherwise each change would lay out the document again.
        cursor.beginEditBlock()
        _disarm(document)
        _space_blocks(document)
        _lighten_bold(document)
        cursor.endEditBlock()
        self.moveCursor(QTextCursor.MoveOperation.Start)


def _is_small(text: str) -> bool:
    sizes = (len(text), text.count("\n") + text.count("\r"), text.count("|"))
    return all(size <= limit for size, limit in zip(sizes, _LIMITS, strict=True))


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]}\n\nThe rest of this text is not shown: it is too long."


def _disarm(document: QTextDocument) -> None:
    """Replace images by their descriptions, and links that are not to web pages by their texts."""
    fragments = [f for block in _blocks(document) for f in _fragments(block)]
    # From the end, since a description is longer than its image.
    for fragment in reversed(fragments):
        form = fragment.charFormat()
        is_link = form.isAnchor() and not is_web_page(form.anchorHref())
        if form.isImageFormat() or is_link:
            cursor = QTextCursor(document)
            cursor.setPosition(fragment.position())
            end = fragment.position() + fragment.length()
            cursor.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
            text = _describe_image(form) if form.isImageFormat() else fragment.text()
            cursor.insertText(text, QTextCharFormat())


def _describe_image(form: QTextCharFormat) -> str:
    described = form.stringProperty(QTextFormat.Property.ImageAltText)
    return f"[image: {described}]" if described else "[image]"


def _blocks(document: QTextDocument) -> list[QTextBlock]:
    blocks, block = [], document.begin()
    while block.isValid():
        blocks.append(block)
        block = block.next()
    return blocks


def _fragments(block: QTextBlock) -> list[QTextFragment]:
    fragments, found = [], block.begin()
    while not found.atEnd():
        fragments.append(found.fragment())
        found += 1
    return fragments


def _space_blocks(document: QTextDocument) -> None:
    tables: dict[int, QTextTable] = {}
    for number, block in enumerate(_blocks(document)):
        cursor = QTextCursor(block)
        # The cells of a table are blocks, too; it is formatted once, as a whole.
        if cursor.currentTable() is not None:
            table = cursor.currentTable()
            tables[table.firstPosition()] = table
            continue
        form = QTextBlockFormat()
        is_heading = cursor.blockFormat().headingLevel() > 0
        form.setTopMargin(ABOVE_HEADING_PX if is_heading and number else 0)
        form.setBottomMargin(ITEM_PX if cursor.currentList() is not None else BELOW_PX)
        # Merged, so that heading level and indent of the block stay.
        cursor.mergeBlockFormat(form)
    for table in tables.values():
        _space_table(table)


def _lighten_bold(document: QTextDocument) -> None:
    """Use the boldest face that the window's font has: Qt would smear one for a bolder text."""
    form = QTextCharFormat()
    form.setFontWeight(QFont.Weight.DemiBold)
    for fragment in (one for block in _blocks(document) for one in _fragments(block)):
        if fragment.charFormat().fontWeight() > QFont.Weight.DemiBold:
            cursor = QTextCursor(document)
            cursor.setPosition(fragment.position())
            end = fragment.position() + fragment.length()
            cursor.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
            cursor.mergeCharFormat(form)


def _space_table(table: QTextTable) -> None:
    form = table.format()
    form.setCellPadding(CELL_PX)
    form.setCellSpacing(0)
    form.setTopMargin(CELL_PX)
    form.setBorderCollapse(True)
    form.setBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
    form.setBottomMargin(BELOW_PX)
    table.setFormat(form)
