"""Read values that may be missing, from files and programs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from agents.shared.files.python_child import SAFE_FOLDER, python_environ

ASK_TIMEOUT_S = 4.0
"""Default time limit of a program, in seconds."""
MAX_READ_BYTES = 1 << 20
# The PATH of a non-interactive SSH session often lacks these.
_MORE_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/lib/wsl/lib"


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a program."""

    code: int
    output: str
    problem: str
    """Text on stderr."""


def read_text(path: str) -> str | None:
    """Return the stripped text of a file, or None if it is unreadable."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_READ_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


def read_int(path: str) -> int | None:
    """Return the integer in a file, or None."""
    with contextlib.suppress(ValueError):
        return int(read_text(path) or "")
    return None


def list_folder(path: str) -> list[str] | None:
    """Return the sorted names in a folder, or None if it is unreadable."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return None


def find_program(name: str) -> str | None:
    """Return the path of a program, searching administrators' folders, too."""
    return shutil.which(name, path=_path())


def ask(argv: Sequence[str], timeout_s: float = ASK_TIMEOUT_S) -> Answer | None:
    """Run a program and return its answer, or None if it is missing or exceeds its time."""
    program = find_program(argv[0])
    if program is None:
        return None
    # The C locale, because callers parse words and numbers of the output.
    words = {"LC_ALL": "C", "PATH": _path()}
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**python_environ(os.environ), **words},
            cwd=SAFE_FOLDER,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return Answer(done.returncode, _decode(done.stdout), _decode(done.stderr))


def _path() -> str:
    return f"{os.environ.get('PATH') or os.defpath}:{_MORE_PATH}"


def _decode(output: bytes) -> str:
    return output[:MAX_READ_BYTES].decode("utf-8", "replace").strip()
