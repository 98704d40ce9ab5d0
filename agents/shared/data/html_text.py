"""Return the text of an HTML page: without markup, scripts and hidden parts."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_HIDDEN = frozenset(
    ["script", "style", "head", "template", "noscript", "svg", "math", "iframe", "object", "select"]
)
_BLOCKS = frozenset(
    [
        "address",
        "article",
        "aside",
        "blockquote",
        "br",
        "dd",
        "div",
        "dl",
        "dt",
        "figcaption",
        "figure",
        "footer",
        "form",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "header",
        "hr",
        "li",
        "main",
        "nav",
        "ol",
        "p",
        "pre",
        "section",
        "table",
        "td",
        "th",
        "tr",
        "ul",
    ]
)
_PARAGRAPHS = _BLOCKS - frozenset(["br", "dd", "dt", "li", "td", "th", "tr"])
_BLANK = re.compile(r"[ \t\r\n\f]+")
_GAP = re.compile(r" *\n(?: *\n)+ *")


def read_html(page: str) -> str:
    """Return the visible text of a page, with one line per block and blanks lines at paragraphs.

    >>> read_html("<head><title>x</title></head><h1>Rivers</h1><p>They\\n <b>run</b>.<br>So.</p>")
    'Rivers\\n\\nThey run.\\nSo.'
    >>> read_html("<pre>a\\n  b</pre>a &lt; b<script>x()</script>")
    'a\\n  b\\n\\na < b'
    """
    parser = _TextParser()
    parser.feed(page)
    parser.close()
    return _GAP.sub("\n\n", "".join(parser.parts)).strip()


class _TextParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden: list[str] = []
        self._num_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _HIDDEN:
            self._hidden.append(tag)
        self._num_pre += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        # A page may lack the end of an inner part.
        if tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        self._num_pre = max(0, self._num_pre - (tag == "pre"))
        self._break(tag)

    def _break(self, tag: str) -> None:
        # The head of a page needs no end: its first block ends it.
        if tag in _BLOCKS and self._hidden == ["head"]:
            self._hidden.clear()
        if tag in _BLOCKS and not self._hidden:
            self.parts.append("\n\n" if tag in _PARAGRAPHS else "\n")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        text = data if self._num_pre else _BLANK.sub(" ", data)
        is_begun = bool(self.parts) and not self.parts[-1].endswith("\n")
        self.parts.append(text if self._num_pre or is_begun else text.lstrip())
