"""Output of a command: human text, or with `--json` one document and nothing else on stdout.

Progress and notes go to stderr, so that stdout has only the answer. Streams are JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any, TextIO

from app.cli.kit.failures import describe, print_json
from app.errors import UserError
from app.text import show_foreign

SHARE = 0.1
"""Least progress between two lines of a phase, as a share of it."""
SHARE_EVERY_S = 5.0
"""Minimum interval between two lines of a phase that moves fast, in seconds."""
SILENCE_S = 30.0
"""Time without any line after which the next message is printed, in seconds."""
MOST_ALIKE = 6
"""Maximum number of phases with the same first word whose beginning is printed: pip begins one for
each package. Later ones are printed only to break a silence."""
# Not the digits of a name, such as `pc-2` or `Q4_K_M`.
_NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.-]*[A-Za-z_])")
_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%|(\d+(?:\.\d+)?) (?:of|/) (\d+(?:\.\d+)?)")
_GAP = "  "
# To the start of the line, then erase to its end (ECMA-48).
_WIPE = "\r\x1b[K"
_STANDARD_OUTPUTS = (-11, -12)
_VIRTUAL_TERMINAL = 0x0004
"""ENABLE_VIRTUAL_TERMINAL_PROCESSING of SetConsoleMode."""


def prepare_console() -> None:
    """Make the standard streams usable, which Windows needs in two cases."""
    # pythonw.exe, which runs `rackless watch` as a task, has no streams.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # Open for as long as the program runs, as the stream that it stands for.
            mode = "r" if name == "stdin" else "w"
            nowhere = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, nowhere)
    # A console of Windows 10 shows escape sequences as characters until a program asks otherwise.
    if sys.platform == "win32":
        _enable_escapes()


if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    def _enable_escapes() -> None:
        kernel32 = ctypes.windll.kernel32
        kernel32.GetStdHandle.restype = wintypes.HANDLE
        for number in _STANDARD_OUTPUTS:
            handle, mode = wintypes.HANDLE(kernel32.GetStdHandle(number)), wintypes.DWORD()
            # Both fail for a file or a pipe, which needs no mode.
            if kernel32.GetConsoleMode(handle, ctypes.byref(mode)):
                kernel32.SetConsoleMode(handle, mode.value | _VIRTUAL_TERMINAL)


class Output:
    """Streams of one command; `as_json` chooses the form of its answer."""

    def __init__(self, as_json: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.as_json = as_json
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._sparse = SparseLines()
        for stream in (self._out, self._err):
            # A terminal without a dash or degree sign in its encoding shows "?" instead of failing.
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                # A stream that was detached or closed.
                with contextlib.suppress(ValueError):
                    reconfigure(errors="replace")

    def document(self, value: Any) -> None:
        """Print the one JSON document of this command; nothing in human form."""
        if self.as_json:
            self._print(json.dumps(plain(value), indent=1))

    def line(self, value: Any) -> None:
        """Print one JSON line of a stream; nothing in human form."""
        if self.as_json:
            self._print(json.dumps(plain(value), separators=(",", ":")))

    def text(self, text: str) -> None:
        """Print for people; nothing with --json."""
        # Escaped: a name or message from a node must not control the terminal.
        if not self.as_json:
            self._print(show_foreign(text, keep="\n"))

    def raw(self, data: bytes) -> None:
        """Print a part of a log or an answer without a newline; nothing with --json.

        A terminal gets control characters as escapes, a file or a program the unchanged bytes.
        """
        if self.as_json:
            return
        # What only looks like a stream, as in tests, has neither.
        is_terminal, binary = self._out.isatty(), getattr(self._out, "buffer", None)
        if binary is not None and not is_terminal:
            # Text and bytes have buffers of their own: earlier text must come first.
            self._out.flush()
            self._put(lambda: (binary.write(data), binary.flush()))
            return
        # A lone carriage return, with which a progress bar overwrites itself, begins a new line.
        text = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        self._write(show_foreign(text, keep="\n\t"))

    def _write(self, text: str) -> None:
        if not self.as_json:
            self._put(lambda: (self._out.write(text), self._out.flush()))

    def note(self, text: str) -> None:
        """Print progress for people on stderr; nothing with --json."""
        if not self.as_json:
            print(show_foreign(text, keep="\n"), file=self._err, flush=True)

    def report(self, event: object) -> None:
        """Print the progress of an action on stderr; other events are for those who know them."""
        from agents.contract.messages import Progress  # as in `plain`

        if isinstance(event, Progress):
            self.progress(event.message)

    def progress(self, text: str, phase: str = "", share: float | None = None) -> None:
        """Print how far the work is on stderr; without a terminal only a few lines of many.

        Args:
            text: a sentence.
            phase: part of the work; empty: read from the text.
            share: progress of the phase from 0 to 1; None: read from the text.
        """
        if self.as_json:
            return
        if self._err.isatty() or self._sparse.allows(text, phase, share):
            self.note(text)

    def progress_text(self, text: str, phase: str = "", share: float | None = None) -> None:
        """Print how far the work is on stdout, where that is the command's answer."""
        if not self.as_json and self._sparse.allows(text, phase, share):
            self.text(text)

    def trouble(self, error: UserError, command: str) -> None:
        """Print an error after which the command continues, such as an unanswered question."""
        self.note(f"{error} {error.hint}".strip())
        if self.as_json:
            print_json(describe(error, command), self._err)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], empty: str = "") -> None:
        """Print aligned columns, or `empty` when there is no row; nothing with --json."""
        if not rows:
            self.text(empty)
            return
        self.text("\n".join(aligned([head, *rows])))

    @property
    def is_terminal(self) -> bool:
        return not self.as_json and self._out.isatty()

    def bar(self, text: str) -> None:
        """Show a line that the next one replaces.

        It is cut to the terminal's width: a wrapped line could not be erased.
        """
        columns = shutil.get_terminal_size().columns
        self._write(f"{_WIPE}{show_foreign(text)[: columns - 1]}")

    def wipe(self) -> None:
        """Erase the line that `bar` has shown."""
        self._write(_WIPE)

    def _print(self, text: str) -> None:
        # Flushed: the reader of a pipe follows a run live.
        self._put(lambda: print(text, file=self._out, flush=True))

    def _put(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BrokenPipeError:
            raise  # its reader has gone, which is no error
        except OSError as error:
            raise UserError(
                f"the output cannot be written: {error.strerror}",
                "Free space where it goes, or send it elsewhere.",
            ) from error


class SparseLines:
    """Chooses the few lines of progress that a log or a pipe gets; one instance for one command.

    The first line of a phase is printed, then one after each tenth of it or half a minute of
    silence. Messages without an explicit phase that differ only in their numbers belong to one
    phase, such as `sending the model to alpha: 12 of 90 MB`.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._shares: dict[str, float] = {}
        self._first_words: Counter[str] = Counter()
        self._printed_s: float | None = None

    def allows(self, text: str, phase: str = "", share: float | None = None) -> bool:
        """Return whether to print a message, and count it as printed if so.

        Args:
            text: the message.
            phase: part of the work; empty: read from the text.
            share: progress of the phase from 0 to 1; None: read from the text, where it says so.
        """
        phase = phase or _name_phase(text)
        share = _read_share(text) if share is None else share
        if not self._is_due(phase, share):
            return False
        self._printed_s = self._now()
        if phase not in self._shares:
            self._first_words[_first_word(phase)] += 1
        self._shares[phase] = share or 0.0
        return True

    def _is_due(self, phase: str, share: float | None) -> bool:
        if self._printed_s is None:
            return True
        silent_s = self._now() - self._printed_s
        if silent_s >= SILENCE_S:
            return True
        if phase not in self._shares:
            return self._first_words[_first_word(phase)] < MOST_ALIKE
        is_further = share is not None and share >= self._shares[phase] + SHARE
        return is_further and silent_s >= SHARE_EVERY_S


def _first_word(phase: str) -> str:
    return phase.split(maxsplit=1)[0] if phase.strip() else ""


def _name_phase(text: str) -> str:
    """Return what messages of one phase have in common.

    >>> _name_phase("Merged 3 of 32 layers"), _name_phase("not on pc-2: it needs 12 GiB")
    ('Merged', 'not on pc-2: it needs # GiB')
    """
    match = _SHARE.search(text)
    return _NUMBER.sub("#", text) if match is None else text[: match.start()].strip()


def _read_share(text: str) -> float | None:
    """Return the share that a message states.

    >>> _read_share("installing packages: 15 of 60"), _read_share("to alpha: 6.0 / 12.0 GiB")
    (0.25, 0.5)
    """
    match = _SHARE.search(text)
    if match is None:
        return None
    percent, done, total = match.groups()
    if percent is not None:
        return float(percent) / 100
    return float(done) / float(total) if float(total) else None


def can_ask() -> bool:
    """Return whether there is a terminal at which the user can answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str) -> bool:
    """Ask a yes or no question on the terminal; without a terminal the answer is no."""
    if not can_ask():
        return False
    # On stderr: stdout is the answer alone, and may be piped away.
    print(f"{show_foreign(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def ask_password(question: str) -> str | None:
    """Ask for a password on the terminal without showing it; None: there is no terminal."""
    if not can_ask():
        return None
    import getpass  # 5 ms that no other command needs

    return getpass.getpass(show_foreign(question), stream=sys.stderr)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as a line, its cells padded to the widest of their column.

    >>> aligned([["NAME", "STATE"], ["alpha", "online"]])
    ['NAME   STATE', 'alpha  online']
    """
    # A line break in a foreign name would look like another row.
    rows = [[show_foreign(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def plain(value: Any) -> Any:
    """Convert `value` to what JSON can hold; a number that is not finite becomes null.

    >>> plain({"loss": float("nan"), "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        from agents.contract.messages import to_wire  # 40 ms that --help does not need

        return plain(to_wire(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    # JSON has no NaN or infinity; Python would write words that other parsers refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
