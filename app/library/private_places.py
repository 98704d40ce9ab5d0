"""Tell files that are nobody's training data: keys, tokens, profiles, and the system's own.

A run file may come from a stranger, and what it names is copied to other PCs. Refused are the
folders of the kernel and the system's settings; what is hidden, where programs keep keys and
profiles; programs' folders on Windows and macOS; and the home of Rackless. Hidden caches of data
tools are data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath

from agents.contract.hub import hub_cache
from agents.shared.files.folder_files import is_network_path
from app.paths import default_home

HINT = "Copy what is meant for training to a folder of yours that is not hidden, and name it there."
_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/boot", "/run", "/private/etc", "/System")
_SYSTEM_DISKS = ("/run/media", "/dev/shm")
"""Folders of the system that hold users' files: removable disks, and memory."""
_PROGRAMS = ("AppData", "Application Data", "Library")
"""Where Windows and macOS keep the files of programs in a home; neither is hidden by its name."""
_CACHES = ((".git", "annex", "objects"), (".dvc", "cache"))
"""Hidden folders in which tools for data keep the data; links of a user's folder lead there."""


def explain_private(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return why a file or folder of this PC is never sent; empty: it may be.

    Args:
        name: path as it was written.
        environ: locates the caches; None: environment of this process.
    """
    # Before anything is asked of it: Windows would log in to that computer.
    if os.name == "nt" and is_network_path(name):
        return "is on another computer, which would be asked with your password"
    environ = os.environ if environ is None else environ
    try:
        path = Path(os.path.expanduser(name)).absolute().resolve()
        known = (hub_cache(environ).resolve(), _package_data())
    except (OSError, ValueError, RuntimeError):
        return ""  # it cannot be opened either
    if any(path.is_relative_to(folder) for folder in known):
        return ""
    home = default_home().resolve()
    if path.is_relative_to(home):
        return f"is in {home}, where Rackless keeps its own files"
    return _explain_place(path)


def _package_data() -> Path:
    """Return the folder of what ships with Rackless, such as the demo's data."""
    return Path(__file__).resolve().parents[2] / "resources"


def _explain_place(path: PurePath) -> str:
    if _is_below(path, _SYSTEM) and not _is_below(path, _SYSTEM_DISKS):
        return "is a file of the operating system"
    parts = path.parts
    for number, part in enumerate(parts):
        if part.startswith(".") and not any(
            parts[number : number + len(cache)] == cache for cache in _CACHES
        ):
            hidden = PurePath(*parts[: number + 1])
            return f"is hidden ({hidden}): programs keep keys, tokens and profiles there"
    if _is_of_programs(path):
        return "is in a folder where programs keep their settings, keys and profiles"
    return ""


def _is_below(path: PurePath, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _is_of_programs(path: PurePath) -> bool:
    """Return whether a path is in a home's folder of programs, of this user or another.

    >>> [_is_of_programs(PurePath(name)) for name in (
    ...     "/Users/anna/Library/Keychains/x.json", "/home/anna/Library/poems.jsonl")]
    [True, False]
    """
    # On Linux a folder with such a name is the user's own.
    parts = path.parts
    return any(
        users in ("Users", "Documents and Settings") and below in _PROGRAMS
        for users, below in zip(parts, parts[2:], strict=False)
    )
