"""Commands that are shown to be typed or pasted: every word is quoted for the shell that reads it.

A name of a file, a device or a model may contain `$(...)`, a semicolon or a space. So a shown
command is built here from its words, never by joining texts.
"""

from __future__ import annotations

import os
import re
import shlex

from app.text import show_foreign

# PowerShell reads `@`, `%`, `,` and others in a bare word; these only stand for themselves.
_BARE = re.compile(r"[A-Za-z0-9_./:\\-]+")
# PowerShell takes typographic quotes for plain ones.
_QUOTES = re.compile("(['\u2018\u2019\u201a\u201b])")


def posix_command(*words: object) -> str:
    """Return a command for a shell of Linux or macOS, on any PC.

    Control characters, which would act on a terminal, are shown as escapes.

    >>> posix_command("ls", "my models", "$(id)", 7)
    "ls 'my models' '$(id)' 7"
    """
    return shlex.join(show_foreign(str(word)) for word in words)


def powershell_command(*words: object) -> str:
    """Return a command for PowerShell.

    >>> powershell_command("rackless", "start", "C:/my runs/it's.yaml", "$(id)")
    "rackless start 'C:/my runs/it''s.yaml' '$(id)'"
    """
    return " ".join(_quote_powershell(show_foreign(str(word))) for word in words)


def command_here(*words: object) -> str:
    """Return a command for the usual shell of this PC."""
    return powershell_command(*words) if os.name == "nt" else posix_command(*words)


def _quote_powershell(word: str) -> str:
    return word if _BARE.fullmatch(word) else "'" + _QUOTES.sub(r"\1\1", word) + "'"
