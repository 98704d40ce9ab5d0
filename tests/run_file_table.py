"""The table of keys in docs/run-file.md, made from the keys themselves.

Write it after a change of a key: `.venv/bin/python -m tests.run_file_table`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from agents.contract.key import MAX_COUNT, Key, RunKey
from agents.contract.spec import run_keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "run-file.md"
BEGIN = "<!-- keys: written by python -m tests.run_file_table -->"
END = "<!-- end of keys -->"
_NAMED = {"file": "file, folder or hub id", "folder": "folder or hub id"}


def make_table() -> str:
    """Return the table, in Markdown."""
    rows = [
        f"| `{key.name}` | {_values(key)} | {_default(key)} | {_meaning(key.about)} |"
        for key in run_keys().values()
    ]
    return "\n".join(["| key | values | default | meaning |", "|---|---|---|---|", *rows])


def split_page(text: str) -> tuple[str, str, str]:
    """Return a page before its table, the table, and the page after it.

    >>> split_page(f"a{BEGIN}b{END}c"), split_page("a")
    (('a', 'b', 'c'), ('a', '', ''))
    """
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table.strip(), after


def _values(key: RunKey) -> str:
    summaries = dict(key.about.choices)
    if key.kind == "choice":
        words = dict.fromkeys((*summaries, *map(str, key.words)))
        return "<br>".join(f"`{word}`{_summary(word, summaries)}" for word in words)
    if key.kind == "tick":
        return "boolean"
    if key.kind in ("whole", "decimal"):
        return _range(key.about) + (f" ({key.about.unit})" if key.about.unit else "")
    if key.kind == "sources":
        return "list of sources"
    if key.kind == "numbers":
        return "list of numbers"
    if key.kind == "text":
        return _NAMED.get(key.about.names, "text")
    words = [f"`{word}`" for word in key.words] + ["text" for one in key.options if one is str]
    return " or ".join([*words, "list of names"])


def _summary(word: str, summaries: dict[str, str]) -> str:
    """Return what follows a word: its summary, without the word itself."""
    name, _, rest = summaries.get(word, "").partition(": ")
    text = rest if name.lower() == word.lower() else summaries.get(word, "")
    return f": {text}" if text else ""


def _range(about: Key) -> str:
    top = about.maximum if (about.maximum or MAX_COUNT) < MAX_COUNT else None
    if about.below is not None:
        return f"{about.minimum} to below {about.below}"
    if about.above is not None:
        return f"above {about.above}" + (f", up to {top:,}" if top else "")
    return f"{about.minimum} to {top:,}" if top else f"from {about.minimum}"


def _default(key: RunKey) -> str:
    value: Any = key.default
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value == ():
        return key.about.placeholder
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _meaning(about: Key) -> str:
    return f"{about.help} {about.details}".strip()


if __name__ == "__main__":
    before, _, after = split_page(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n{make_table()}\n{END}{after}", encoding="utf-8")
