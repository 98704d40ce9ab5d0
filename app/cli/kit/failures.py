"""Print every error on stderr: as text, or with `--json` as one JSON line.

A JSON line has four texts: `what` is wrong, `where` (a file, node or run, else the command), what
to do `next`, and a stable `code`, which programs compare with. All codes are in
`docs/automation.md`. Notices, such as a restored store, have the same form with the code `notice`,
so that stderr never mixes JSON with other text.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from agents.shared.files.full_disk import removing_half
from agents.shared.files.secrets import hide_secrets
from app.errors import Interrupted, RacklessError, UserError
from app.text import show_foreign

FAULT = RacklessError.code
INTERRUPTED = Interrupted.code
NOTICE = "notice"
MOST_REPORTS = 20
"""Maximum number of kept reports of faults; older ones are deleted."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One error, as users and programs read it."""

    what: str
    where: str
    next: str
    code: str
    topic: str = ""
    """Section of the troubleshooting page; empty: none. Programs find it by the code."""


def describe(error: BaseException, command: str, report: str = "") -> Failure:
    """Return the words of an error.

    Args:
        error: what ended the command.
        command: its name, such as `rackless runs show`.
        report: file with the traceback of an internal error; empty: it is printed below.
    """
    if isinstance(error, UserError):
        hint = error.hint or f"See: {command} --help"
        return Failure(error.message, error.where or command, hint, error.code, error.topic)
    if isinstance(error, KeyboardInterrupt):
        what = "interrupted; runs that were started keep training"
        return Failure(what, command, "See: rackless runs list", INTERRUPTED)
    is_declared = isinstance(error, RacklessError)
    said = str(error) if is_declared else f"{type(error).__name__}: {error}"
    code = error.code if isinstance(error, RacklessError) else FAULT
    lines = "that file" if report else "the lines below"
    hint = f"Please report it with {lines}."
    return Failure(f"internal error: {said}", report, hint, code, "report")


def trace_of(error: BaseException) -> str:
    """Return the traceback; that of the node, where the error happened there."""
    there = getattr(error, "traceback", "")
    text = str(there or "".join(traceback.format_exception(error))).rstrip()
    return show_foreign(hide_secrets(text), keep="\n")


def print_json(failure: Failure, stream: TextIO | None = None) -> None:
    """Print one line of JSON on stderr, or on `stream`."""
    # Declared by hand: `to_wire` would load what --help does not need.
    fields = {
        "what": failure.what,
        "where": failure.where,
        "next": failure.next,
        "code": failure.code,
    }
    _say(json.dumps(fields), stream)


def print_words(failure: Failure) -> None:
    """Print for people on stderr."""
    # Indented, so that text from a node cannot pass for a line of Rackless.
    _say(f"rackless: {failure.what}".replace("\n", "\n    "))
    if failure.next:
        _say(f"  what to do: {failure.next}".replace("\n", "\n    "))
    if failure.topic:
        _say(f"  more: rackless help {failure.topic}")


def print_notice(text: str, *, as_json: bool) -> None:
    """Print a notice for the user, after which the command continues."""
    if as_json:
        print_json(Failure(text, "rackless", "", NOTICE))
    else:
        _say(f"rackless: {text}")


@contextlib.contextmanager
def logging_json() -> Iterator[None]:
    """Print warnings of Rackless and of libraries as JSON lines; Python prints them as text."""
    import logging  # --help does not need it

    class JsonLog(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            if error is None:
                print_notice(record.getMessage(), as_json=True)
            else:
                print_json(describe(error, "rackless", write_report(error, "rackless")))

    # Python's handler of last resort, in use because commands configure no other.
    before, logging.lastResort = logging.lastResort, JsonLog(logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.lastResort = before
        logging.captureWarnings(False)


def wants_json(argv: Sequence[str]) -> bool:
    """Return whether `--json` is among the options, however wrong the others are.

    >>> wants_json(["runs", "--json"]), wants_json(["chat", "--", "--json"])
    (True, False)
    """
    options = argv[: argv.index("--")] if "--" in argv else argv
    return "--json" in options


def write_report(error: BaseException, command: str) -> str:
    """Write the trace of a fault to a file of its own; return its path (else `command`)."""
    import tempfile  # here and below: most commands do not fail

    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {command}\n{trace_of(error)}\n"
    try:
        return str(_write(_report_folder(), text))
    except OSError:
        pass  # the home may be what is broken
    try:
        return str(_write(Path(tempfile.gettempdir()), text))
    except OSError:
        return command


def _report_folder() -> Path:
    from app.paths import Paths, default_home, private_folder

    folder = private_folder(Paths(default_home()).reports)
    old = sorted(folder.glob("fault-*.txt"))[: -MOST_REPORTS + 1]
    for path in old:
        path.unlink(missing_ok=True)
    return folder


def _write(folder: Path, text: str) -> Path:
    import tempfile

    # mkstemp: a new file that only this user can read, also in a folder that all share.
    prefix = time.strftime("fault-%Y%m%d-%H%M%S-")
    handle, path = tempfile.mkstemp(".txt", prefix, folder)
    with (
        removing_half(Path(path)),
        os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.write(text)
    return Path(path)


def _say(text: str, stream: TextIO | None = None) -> None:
    stream = stream or sys.stderr
    text = show_foreign(hide_secrets(text), keep="\n")
    # A file name or a message may hold what the terminal's encoding has no sign for.
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
