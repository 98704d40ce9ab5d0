"""Sentences on screen, in messages and on the wire use one plain term for one thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# A phrase -> the wording in its place. Words are matched whole, in any case.
BANNED = {
    "the PC before you": "this PC",
    "it is called in lists": "name shown in lists",
    "for the first time": "has not connected before",
    "The fingerprint is right": "fingerprint matches",
    "to look at": "to check, not verified",
    "looked at": "verified, checked",
    "Foretold": "forecast",
    "Off by": "difference",
    "it is in no table": "no reference figure for this device",
    "as it should": "normally",
    "run goes on": "run keeps training",
    "runs go on": "runs keep training",
    "runs on it go on": "runs on it keep training",
    "done again": "replayed",
    "Do logged steps again": "replay the last steps",
    "Same to the last bit": "bit-exact resume",
    "gives it up": "discards it",
    "to be told from": "nearly lossless",
    "KL if rounded": "KL of plain rounding",
    "What speaks against": "issues",
    "to compare by": "test prompts",
    "Most tokens": "max tokens",
    "How they answer": "generation settings",
    "activations twice": "recompute activations",
    "memory forces": "memory requires",
    "Gradients travel": "gradient compression",
    "like a cosine": "cosine decay",
    "lengths apart from directions": "magnitude and direction",
    "Tell when": "notify when",
    "Patience with": "timeout",
    "held against": "compared with",
    "hold against": "compare with",
    "mistake of ours": "internal error",
    "not known yet what": "not known",
    "any more": "no longer",
    "of no use": "cannot be used",
    "broken off": "cancelled, interrupted",
    "leads nowhere": "is not a usable path",
    "happening": "event",
    "the least is": "the minimum is",
    "the most is": "the maximum is",
    "come by": "arrive",
    "gave up": "timed out, failed",
    "whatever": "name what it is",
}
_PATTERN = re.compile(rf"\b({'|'.join(map(re.escape, BANNED))})\b", re.IGNORECASE)


def sentences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each string constant of a module that is not a docstring, with its line."""
    documents = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in documents:
            yield node.lineno, node.value


@pytest.mark.parametrize("package", ["app", "agents"])
def test_no_sentence_uses_a_banned_phrase(package: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {hit[0]!r}, better: {better}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for line, text in sentences(ast.parse(file.read_text(encoding="utf-8")))
        for hit in _PATTERN.finditer(text)
        for phrase, better in BANNED.items()
        if phrase.lower() == hit[0].lower()
    ]
    assert not found, "\n".join(found)


def test_the_scan_sees_parts_of_formatted_strings() -> None:
    tree = ast.parse('"""Foretold here is a docstring."""\nx = f"{y} was foretold"\n')
    assert [text for _, text in sentences(tree) if _PATTERN.search(text)] == [" was foretold"]
