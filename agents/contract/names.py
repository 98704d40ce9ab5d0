"""Check of names from the other side, at the point where they enter.

A name of a run, node, stream or file becomes a path or a key on the receiving side. So the
dataclasses of this package check theirs in `check_foreign`, which is called when a message is read,
and a message with a bad name is refused as a whole. Code that builds a path from a name checks it
again (`app/paths.py`, `agents/state.py`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable

MAX_ATTEMPT = 10**6
"""Maximum attempt number of a run: one attempt a minute for two years."""
MAX_STEP = 10**12 - 1
"""Maximum step: the name of a checkpoint's folder has at most twelve digits."""
MAX_RANK = 10**6 - 1
"""Maximum rank: names of logs have up to six digits."""
MAX_TIME_S = 32_503_680_000.0
"""Maximum wall clock time, in seconds since 1970: the year 3000, the last that Windows shows."""
MAX_WAIT_S = 24 * 3600.0
"""Maximum time that one side asks the other to wait, in seconds: a day."""
MAX_PORT = 65535
"""Maximum number of a port of TCP or UDP."""
MAX_FILE_BYTES = 2**50
"""Maximum size of a file, in bytes: a pebibyte."""
MAX_PATH_CHARACTERS = 1024
"""Maximum length of a path within a folder, in characters; systems allow 4096 for the whole
path."""
MAX_TEXT_CHARACTERS = 4096
"""Maximum length of a one-line text, such as the name of a card, in characters."""

# Modules, pickles, notebooks, and files that some system starts on a double click.
_CODE = frozenset(
    {".py", ".pyc", ".pyo", ".pyd", ".pyw", ".pyx", ".pyz", ".pth", ".ipynb"}
    | {".pkl", ".pickle", ".pt", ".ckpt", ".bin", ".joblib", ".so", ".dll", ".dylib", ".exe"}
    | {".com", ".msi", ".scr", ".lnk", ".url", ".desktop", ".appimage", ".jar", ".sh", ".bash"}
    | {".zsh", ".bat", ".cmd", ".ps1", ".psm1", ".vbs", ".js", ".mjs", ".hta", ".pl", ".rb"}
)
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names that are one part of a path on every system: no separator, no leading dot."""
# Windows opens a device for these, with any text after the first dot.
_RESERVED = frozenset(
    ("con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)))
)
# Linux allows 15 characters; `ip` appends `@` and the other end of a pair.
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,31}")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,127}")
_WHOLE = re.compile(r"[0-9]{1,18}")


def is_safe_name(text: str) -> bool:
    """Return whether a name is safe as one part of a path, on every system.

    >>> [is_safe_name(name) for name in ("20261121-141502-k3f", "r-1", "rank-0.log")]
    [True, True, True]
    >>> any(is_safe_name(name) for name in ("", "..", "a/b", "/a", ".a", "a\\n", "nul.txt", "a."))
    False
    """
    # Windows drops a trailing dot, so two names would be one file.
    if SAFE_NAME.fullmatch(text) is None or text.endswith("."):
        return False
    return not is_reserved(text)


def is_reserved(text: str) -> bool:
    """Return whether Windows opens a device by this name, with any text after its first dot.

    >>> is_reserved("NUL.txt"), is_reserved("nullable")
    (True, False)
    """
    return text.partition(".")[0].rstrip().lower() in _RESERVED


def is_code(path: str) -> bool:
    """Return whether a file's name is that of code, a pickle or a notebook, on any system.

    >>> [is_code(name) for name in ("a/modeling.py", "x.PY", "pytorch_model.bin", "x.ipynb")]
    [True, True, True, True]
    >>> any(is_code(name) for name in ("model.safetensors", "a.py/config.json", "Modelfile"))
    False
    """
    # Windows drops trailing dots and spaces; a library gets its version after the suffix.
    name = path.rpartition("/")[2].lower().rstrip(". ")
    return name[name.rfind(".") :] in _CODE or ".so." in name


def check_name(field: str, text: str) -> None:
    """Check a name that becomes one part of a path.

    Raises:
        ValueError: it could lead elsewhere; the message names `field`.
    """
    if not is_safe_name(text):
        raise ValueError(
            f"{field} is {text[:80]!a}; it must be 1 to 128 letters, digits, dots, dashes and "
            "underscores, beginning with a letter or digit"
        )


def check_number(field: str, number: float, least: float, most: float) -> None:
    """Check a number from the other side.

    Raises:
        ValueError: it is outside its bounds.
    """
    # Written so that NaN, which compares false, is refused.
    if not least <= number <= most:
        raise ValueError(f"{field} is {number}; it must be from {least} to {most}")


def check_time(field: str, time_s: float | None) -> None:
    """Check a wall clock time, in seconds since 1970; None passes.

    Raises:
        ValueError: it is outside 1970 to 3000, or NaN.
    """
    if time_s is not None and not 0 <= time_s <= MAX_TIME_S:
        raise ValueError(f"{field} is {time_s}; it must be a time from 1970 to the year 3000")


def check_text(field: str, text: str) -> None:
    """Check the length of a text that is shown in one line.

    Raises:
        ValueError: it is too long.
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{field} has {len(text)} characters; at most {MAX_TEXT_CHARACTERS} fit")


def is_device(name: str) -> bool:
    """Return whether a name is that of a network device, without a sign for a shell.

    >>> [is_device(name) for name in ("enp3s0", "br-4f1a", "eth0.10", "veth1@if2")]
    [True, True, True, True]
    >>> any(is_device(name) for name in ("", "-f", "a b", "$(id)", "eth0;id", "e" * 40))
    False
    """
    return _DEVICE.fullmatch(name) is not None


def check_device(field: str, name: str | None) -> None:
    """Check the name of a network device; None passes.

    Raises:
        ValueError: it has other signs than letters, digits and `._:@+-`, or is too long.
    """
    if name is not None and not is_device(name):
        raise ValueError(f"{field} is {name[:80]!a}, which is not the name of a network device")


def is_address(text: str) -> bool:
    """Return whether a text is an IP address, with a device after a percent sign or without.

    >>> is_address("192.168.1.7"), is_address("fe80::1%eth0")
    (True, True)
    >>> any(map(is_address, ("", "pc", "10.0.0.1/8", "fe80::1%$(id)", "fe80::1%", "10.0.0.1%a")))
    False
    """
    address, percent, zone = text.partition("%")
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    # Python takes any text for the zone of an address.
    return not percent or (found.version == 6 and is_device(zone))


def check_address(field: str, text: str | None) -> None:
    """Check an IP address; None passes.

    Raises:
        ValueError: it is not one, or its zone is not the name of a network device.
    """
    if text is not None and not is_address(text):
        raise ValueError(f"{field} is {text[:80]!a}, which is not an IP address")


def is_word(text: str) -> bool:
    """Return whether a text is one word of a command: a version, a package, a user, a driver.

    >>> all(map(is_word, ("580.95.05", "libnvidia-x:amd64", "anna_2", "2.13.0+cu130", "fuse.x")))
    True
    >>> any(map(is_word, ("", "-f", "a b", "$(id)", "a;b", "a" * 200, "x/../y", "~root")))
    False
    """
    return _WORD.fullmatch(text) is not None


def is_path(text: str) -> bool:
    """Return whether a text is an absolute path that can be shown and pasted, in quotes.

    >>> is_path("/home/anna/my models"), is_path("models"), is_path("/home/\x1b[2J")
    (True, False, False)
    """
    return text[:1] == "/" and len(text) <= MAX_TEXT_CHARACTERS and text.isprintable()


def drop_odd_words(record: object, *names: str) -> None:
    """Replace values that are not a word by None, which means not known.

    Only such values of a node may become a part of a command.
    """
    _drop(record, names, is_word)


def drop_odd_paths(record: object, *names: str) -> None:
    """Replace values that are not an absolute path by None, which means not known."""
    _drop(record, names, is_path)


def _drop(record: object, names: Iterable[str], is_usual: Callable[[str], bool]) -> None:
    for name in names:
        value = getattr(record, name)
        if value is not None and not is_usual(value):
            # The dataclasses are frozen, and this runs while one is being read.
            object.__setattr__(record, name, None)


def check_inside(path: str) -> None:
    """Check that a relative path stays below the folder that it is joined to.

    Raises:
        ValueError: it is absolute, climbs with `..`, or has an empty part.
    """
    parts = path.split("/")
    # Deeper paths would exhaust the stack of code that walks folders recursively.
    is_short = len(path) <= MAX_PATH_CHARACTERS
    if not is_short or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"The file name {path[:120]!a} is not allowed: it must stay below its folder"
        )


def whole_number(text: str) -> int | None:
    """Return the number in a name, or None unless it has the canonical spelling.

    >>> [whole_number(text) for text in ("12", "0", "012", "-1", "\\u0663", "1" * 30)]
    [12, 0, None, None, None, None]
    """
    if _WHOLE.fullmatch(text) is None:
        return None
    number = int(text)
    return number if str(number) == text else None
