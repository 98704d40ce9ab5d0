"""The `attack` fixture, and the table of all attacks that pytest prints at the end."""

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

_PROPERTY = "attack"
_WIDTH = 110


@pytest.fixture
def attack(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record one attack: `attack(given="...", tried="...", happened=str(error))`."""

    def record(*, given: str, tried: str, happened: str) -> None:
        texts = (given, tried, " ".join(happened.split()))
        record_property(_PROPERTY, ["".join(map(_visible, text)) for text in texts])

    return record


def _visible(sign: str) -> str:
    """Return what shows a character of an attack, which may be one that acts on a terminal."""
    return sign if sign.isprintable() else ascii(sign)[1:-1]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print given, tried and happened of every attack, in the order in which they ran."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    lines = []
    for report in reports:
        for name, value in getattr(report, "user_properties", []):
            if name == _PROPERTY and report.when == "call":
                given, tried, happened = value
                lines.append(f"{report.outcome.upper()}  {given}")
                for label, text in (("tried", tried), ("happened", happened)):
                    lines += textwrap.wrap(
                        f"{label}: {text}",
                        _WIDTH,
                        initial_indent="    ",
                        subsequent_indent="      ",
                    )
    if lines:
        terminalreporter.section("attacks")
        terminalreporter.write_line("\n".join(lines))
