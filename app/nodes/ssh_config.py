"""Read `~/.ssh/config` as OpenSSH reads it, as far as it decides where and as whom to log in.

`ssh -G` would be shorter, but it runs every `Match exec` that applies, so it can neither ask before
one nor list the hosts; it fails at each option and condition of a newer OpenSSH; and it reads the
home of the passwd entry. asyncssh's reader runs these programs too, stops at a comment behind a
value, splits the backslashes of Windows paths, takes commas in `Host` lines as separators and lets
a `ProxyJump` win over an earlier `ProxyCommand`. The rules here are those of OpenSSH's readconf.c
and `man 5 ssh_config`; the tests compare with `ssh -G`. Host names are not made canonical
(`CanonicalizeHostname`), since the resolver has a search list, too.
"""

from __future__ import annotations

import fnmatch
import getpass
import glob
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.shared.files.folder_files import read_regular
from app.errors import UserError
from app.shell_words import command_here

MAX_DEPTH = 16
"""Number of files that may include each other, as in OpenSSH."""
# Options whose first value counts, and whose value is one word.
_SINGLE = frozenset({"hostname", "user", "port", "identitiesonly", "identityagent", "tag"})
# The value is the rest of the line, with its quotes. The first of both counts.
_PROXIES = frozenset({"proxycommand", "proxyjump"})
_FLAGS = frozenset({"all", "canonical", "final"})
_CONDITIONS = frozenset({"host", "originalhost", "user", "localuser", "tagged", "exec"})
# A keyword may be quoted, and blanks or one equals sign stand between it and its value.
_KEYWORD = re.compile(r'[ \t\r\f]*"?([^\s"=]+)"?(?:[ \t]*=[ \t]*|[ \t]+|$)(.*)', re.DOTALL)
# A backslash is itself unless it stands before a quote, a backslash or, outside of quotes, a blank.
_PART = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\\["'\\ ]|[^ \t"'])"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    path: Path
    folder: Path
    """Folder of the relative paths that it includes."""


@dataclass(slots=True)
class HostConfig:
    """Values of the files for one host; None if they have none."""

    host: str
    """Name as typed after `ssh`."""
    values: dict[str, str] = field(default_factory=dict)
    """First value of each option, by its name in lower case."""
    identity_files: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Positions of unknown conditions, which count as false."""

    @property
    def hostname(self) -> str:
        """Host name or address to connect to."""
        return expand_tokens(self.values.get("hostname", "%h"), {"h": self.host}).lower()

    @property
    def is_agent_limited(self) -> bool:
        """True if only the keys of the named files may be tried."""
        return self.values.get("identitiesonly", "no").lower() in ("yes", "true")


RunProgram = Callable[[str], bool]
"""Callback that runs a command of `Match exec` and returns True if it succeeded."""


def read_host(
    host: str,
    files: tuple[ConfigFile, ...],
    run_program: RunProgram,
    *,
    user: str | None = None,
    port: int | None = None,
) -> HostConfig:
    """Return the values of the files for `host`.

    Args:
        host: name as typed after `ssh`.
        files: files to read, the first one first; missing ones are skipped.
        run_program: called for each `Match exec` that can change the result.
        user: user that was given with the name, which wins over the files.
        port: port that was given with the name.

    Raises:
        UserError: a file cannot be read, or a line in it is damaged.
    """
    config = HostConfig(host=host)
    if user is not None:
        config.values["user"] = user
    if port is not None:
        config.values["port"] = str(port)
    reader = _HostReader(config, run_program)
    reader.read(files)
    if reader.wants_final:
        # OpenSSH reads everything once more, starting from the values of the first pass.
        config.values["hostname"] = config.hostname.replace("%", "%%")
        reader.is_final = True
        reader.read(files)
    return config


def list_hosts(files: tuple[ConfigFile, ...]) -> tuple[str, ...]:
    """Return the names that the files have a `Host` line for, without patterns, in their order.

    Raises:
        UserError: a file cannot be read, or a line in it is damaged.
    """
    found: dict[str, None] = {}
    for file in files:
        for word, rest, where in _every_line(file, 0):
            if word == "host":
                names = _words(rest, where)
                found.update(dict.fromkeys(n for n in names if not re.search(r"[*?!]", n)))
    return tuple(found)


def expand_tokens(text: str, tokens: Mapping[str, str]) -> str:
    """Replace `%h` and the like; raise UserError for one that has no meaning here.

    >>> expand_tokens("%n.lan", {"n": "gamer"})
    'gamer.lan'
    """

    def value(match: re.Match[str]) -> str:
        if match[1] == "%":
            return "%"
        if match[1] in tokens:
            return tokens[match[1]]
        raise UserError(
            f"{match[0]!r} in {text!r} of your SSH configuration has no meaning there",
            "Correct it in ~/.ssh/config; see: man 5 ssh_config, TOKENS",
        )

    return re.sub(r"%(.?)", value, text)


def tokens_of(config: HostConfig) -> dict[str, str]:
    """Return the value of each `%` token for a host whose configuration was read."""
    local = socket.gethostname()
    own = local_user() or ""
    tokens = {
        "d": str(Path.home()),
        "h": config.hostname,
        "j": "",
        "k": config.host,
        "L": local.partition(".")[0],
        "l": local,
        "n": config.host,
        "p": config.values.get("port", "22"),
        "r": config.values.get("user", own),
        "u": own,
    }
    if hasattr(os, "getuid"):
        tokens["i"] = str(os.getuid())
    return tokens


def local_user() -> str | None:
    """Return the name of the user on this PC, or None if the system has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None


class _HostReader:
    """One pass over all files for one host."""

    def __init__(self, config: HostConfig, run_program: RunProgram) -> None:
        self._config = config
        self._run_program = run_program
        self.wants_final = False
        self.is_final = False

    def read(self, files: tuple[ConfigFile, ...]) -> None:
        for file in files:
            self._read_file(file, 0)

    def _read_file(self, file: ConfigFile, depth: int) -> None:
        is_active = True
        for word, rest, where in _lines(file):
            if word == "host":
                is_active = match_patterns(self._config.host, _words(rest, where))
            elif word == "match":
                is_active = self._matches(rest, where)
            elif not is_active:
                continue
            elif word == "include":
                for included in _included(file, _words(rest, where), depth, where):
                    self._read_file(included, depth + 1)
            else:
                self._set(word, rest, where)

    def _set(self, option: str, rest: str, where: str) -> None:
        values = self._config.values
        if option in _PROXIES:
            if not _PROXIES & values.keys():
                values[option] = rest
        elif option in _SINGLE:
            values.setdefault(option, _words(rest, where)[0])
        elif option == "identityfile":
            path = _words(rest, where)[0]
            if path not in self._config.identity_files:
                self._config.identity_files.append(path)

    # ------------------------------------------------------------ conditions

    def _matches(self, rest: str, where: str) -> bool:
        """Return True if all conditions of a `Match` line hold."""
        words = iter(_words(rest, where))
        holds = True
        for word in words:
            name, equals, argument = word.partition("=")
            negated, name = name.startswith("!"), name.lstrip("!").lower()
            if name in _FLAGS:
                result = self._flag(name)
            else:
                argument = argument if equals else next(words, "")
                if not argument:
                    raise _damaged(where, f"Match {name} lacks its pattern")
                # A condition that cannot change the outcome is not tried: it may run a program.
                result = holds and self._condition(name, argument, where)
                # An unknown condition of a newer OpenSSH fails, and so does its negation.
                holds = holds and name in _CONDITIONS
            holds = holds and result != negated
        return holds

    def _flag(self, name: str) -> bool:
        if name == "final":
            self.wants_final = True
        return name == "all" or self.is_final

    def _condition(self, name: str, argument: str, where: str) -> bool:
        config, own = self._config, local_user() or ""
        if name == "exec":
            return self._run_program(expand_tokens(argument, tokens_of(config)))
        if name not in _CONDITIONS:
            note = f"Match {name} ({where})"
            config.unknown += [note] if note not in config.unknown else []
            return False
        if name in ("host", "originalhost"):
            argument = argument.lower()
        texts = {
            "host": config.hostname,
            "originalhost": config.host.lower(),
            "user": config.values.get("user", own),
            "localuser": own,
            "tagged": config.values.get("tag", ""),
        }
        return match_patterns(texts[name], argument.split(","))


def match_patterns(text: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern matches the whole text, and no pattern after a `!` does.

    >>> match_patterns("gpu-7", ["gpu-?"]), match_patterns("gpu-7", ["gpu-*", "!gpu-7"])
    (True, False)
    """
    # OpenSSH has only * and ?; brackets are escaped, since fnmatch would take them for a set.
    plain = {one: one.removeprefix("!").replace("[", "[[]") for one in patterns}
    fit = [one for one, pattern in plain.items() if fnmatch.fnmatchcase(text, pattern)]
    return bool(fit) and not any(one.startswith("!") for one in fit)


# ---------------------------------------------------------------- lines


def _lines(file: ConfigFile) -> Iterator[tuple[str, str, str]]:
    """Yield (keyword in lower case, rest of the line, `file:line`) of each line with a value."""
    try:
        text = read_regular(file.path).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"The SSH configuration {file.path} cannot be read: {error.strerror or error}",
            f"Give yourself access to it: {command_here('chmod', '600', file.path)}",
        ) from error
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{file.path}:{number}"
        match = _KEYWORD.match(line.rstrip(" \t\r\f"))
        if match is None or match[1].startswith("#"):
            continue
        if not match[2]:
            raise _damaged(where, f"{match[1]} has no value")
        yield match[1].lower(), match[2], where


def _every_line(file: ConfigFile, depth: int) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of a file and of its includes, regardless of conditions."""
    for word, rest, where in _lines(file):
        if word == "include":
            for included in _included(file, _words(rest, where), depth, where):
                yield from _every_line(included, depth + 1)
        else:
            yield word, rest, where


def _included(
    file: ConfigFile, patterns: list[str], depth: int, where: str
) -> Iterator[ConfigFile]:
    if depth >= MAX_DEPTH:
        raise _damaged(where, f"more than {MAX_DEPTH} files include each other")
    for pattern in patterns:
        path = os.path.join(file.folder, os.path.expanduser(pattern))
        for found in sorted(glob.glob(path)):
            if os.path.isfile(found):
                yield ConfigFile(path=Path(found), folder=file.folder)


def _words(rest: str, where: str) -> list[str]:
    words = split_words(rest)
    if not words:
        raise _damaged(where, "quotes do not end, or there is no value")
    return words


def split_words(text: str) -> list[str]:
    r"""Split as OpenSSH's argv_split: quotes group, and a `#` begins a comment.

    Returns an empty list if a quote does not end.

    >>> split_words(r'"a b" C:\keys\one a\ b"c"d#e # mine'), split_words('a "b')
    (['a b', 'C:\\keys\\one', 'a bcd#e'], [])
    """
    words = []
    text = text.lstrip(" \t")
    while text and not text.startswith("#"):
        match = re.match(f"{_PART}+", text)
        if match is None or text[match.end() :][:1] not in ("", " ", "\t"):
            return []
        words.append(re.sub(_PART, _unquote, match[0]))
        text = text[match.end() :].lstrip(" \t")
    return words


def _unquote(part: re.Match[str]) -> str:
    if part[0][0] in "\"'":
        return re.sub(r"""\\(["'\\])""", r"\1", part[0][1:-1])
    return part[0][-1]


def _damaged(where: str, what: str) -> UserError:
    return UserError(
        f"Your SSH configuration is damaged at {where}: {what}",
        "Correct that line; 'ssh -G HOST' shows how OpenSSH reads it",
        where=where,
    )
