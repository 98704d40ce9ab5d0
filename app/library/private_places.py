"""Recognize private files that are never sent as data: keys, tokens, profiles, system files.

A run file may come from a stranger, and the files that it names are copied to other PCs. Refused
are folders of the kernel, of system settings and of services, hidden files and folders, folders of
programs on Windows and macOS, files named after the secrets in them, and the home of Rackless.
Hidden caches of data tools are allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath

from agents.contract.hub import hub_cache
from agents.shared.files.folder_files import is_network_path
from app.paths import default_home

HINT = (
    "Copy the files for training to a folder of yours that is not hidden, under names that say "
    "what is in them, and name that."
)
_SYSTEM = (
    *("/proc", "/sys", "/dev", "/etc", "/boot", "/run", "/var", "/lost+found", "/System"),
    *("/private/etc", "/private/var", "/Library"),
)
_SYSTEM_DISKS = (
    *("/run/media", "/dev/shm", "/var/home", "/var/roothome", "/var/mnt", "/var/tmp", "/var/data"),
    *("/var/folders", "/private/var/folders", "/private/var/tmp", "/var/lib/rackless"),
)
"""System folders that hold users' files: disks, shared memory, homes of Fedora's desktops, and
temporary files."""
_WINDOWS = ("windows", "programdata", "system volume information", "$recycle.bin")
_SECRET_NAME = re.compile(
    r"(?:^|-)(?:secrets?|credentials?|passwords?|passwd|passphrases?|logins|cookies|keychain|keyring"
    r"|keystore|kubeconfig|htpasswd|netrc|wallet|(?:api|access|private|auth)-?keys?|service-account"
    r"|(?:access|api|auth|hf|hub)-?tokens?|id-(?:rsa|ed25519|ecdsa)|recovery-codes|seed-phrase)"
    r"(?:-|$)|^token$"
)
"""Names of files in which programs and people keep secrets, with `-` between words."""
_SECRET_KINDS = (".json", ".txt", ".text", ".csv", ".tsv", ".md")
"""Kinds of files that hold settings and lists, too; rows of `.jsonl` and `.parquet` are data."""
_MOST_WORDS = 4
"""Words of a name above which it is a title, such as `what-my-passwords-say-of-me`."""
_PROGRAMS = ("AppData", "Application Data", "Library")
"""Folders of programs in a home on Windows and macOS, whose names do not begin with a dot."""
_CACHES = ((".git", "annex", "objects"), (".dvc", "cache"))
"""Hidden folders in which git-annex and DVC keep data; the user's folder holds links to them."""


def explain_private(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return why a file or folder of this PC is never sent; empty: it may be.

    Args:
        name: path as the user wrote it.
        environ: environment that locates the caches; None: that of this process.
    """
    # Before any access, with which Windows would log in to that computer.
    if os.name == "nt" and is_network_path(name):
        return "is on another computer, which would be asked with your password"
    environ = os.environ if environ is None else environ
    try:
        path = Path(os.path.expanduser(name)).absolute().resolve()
        known = (hub_cache(environ).resolve(), _package_data())
    except (OSError, ValueError, RuntimeError):
        return ""  # such a path cannot be opened either
    if any(path.is_relative_to(folder) for folder in known):
        return ""
    home = default_home().resolve()
    if path.is_relative_to(home):
        return f"is in {home}, where Rackless keeps its own files"
    return _explain_place(path)


def _package_data() -> Path:
    """Return the folder of files that ship with Rackless, such as the demo's data."""
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
    if len(parts) > 1 and path.drive and parts[1].lower() in _WINDOWS:
        return "is a file of the operating system"
    return explain_name(path)


def explain_name(path: PurePath) -> str:
    """Return why the name of a file says that it is private; empty: it does not."""
    is_secret = _is_named_secret(path)
    return f"is named like a file of passwords or keys ({path.name})" if is_secret else ""


def _is_named_secret(path: PurePath) -> bool:
    """Return whether the name of a file says that it holds secrets.

    >>> [_is_named_secret(PurePath(name)) for name in (
    ...     "secrets.json", "client_secret_5.json", "hf-token.txt", "tokens.json", "secrets.jsonl")]
    [True, True, True, False, False]
    """
    if path.suffix.lower() not in _SECRET_KINDS:
        return False
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", path.stem)
    words = re.findall(r"[a-z]+[0-9]*|[0-9]+", name.lower())
    return len(words) <= _MOST_WORDS and bool(_SECRET_NAME.search("-".join(words)))


def _is_below(path: PurePath, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _is_of_programs(path: PurePath) -> bool:
    """Return whether a path is in a folder of programs in any user's home.

    >>> [_is_of_programs(PurePath(name)) for name in (
    ...     "/Users/anna/Library/Keychains/x.json", "/home/anna/Library/poems.jsonl")]
    [True, False]
    """
    # On Linux, whose homes are in /home, a folder with such a name is an ordinary one.
    parts = path.parts
    return any(
        users in ("Users", "Documents and Settings") and below in _PROGRAMS
        for users, below in zip(parts, parts[2:], strict=False)
    )
