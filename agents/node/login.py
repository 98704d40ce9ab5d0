"""Read the variables of the login that change how training behaves, and the files that set them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from agents.contract.node import PLAIN_PATH, PLAIN_VALUE, VARIABLE_NAME, LoginVariable
from agents.shared.login_variables import find_odd

# Files that shells, PAM, systemd and sshd read at a login; `~` is the user's home.
_FILES = (
    *("~/.ssh/environment", "~/.bashrc", "~/.bash_profile", "~/.bash_login", "~/.profile"),
    *("~/.zshenv", "~/.zprofile", "~/.zshrc", "~/.config/fish/config.fish", "~/.pam_environment"),
    *("~/.config/environment.d/*.conf", "/etc/environment", "/etc/security/pam_env.conf"),
    *("/etc/profile", "/etc/profile.d/*.sh", "/etc/bash.bashrc", "/etc/bashrc", "/etc/zshenv"),
    *("/etc/zsh/*", "/etc/environment.d/*.conf", "/etc/ssh/sshd_config"),
    "/etc/ssh/sshd_config.d/*.conf",
)
_MAX_BYTES = 256 << 10


def read_login_variables(
    environ: Mapping[str, str], user_home: Path, root: Path = Path("/")
) -> tuple[LoginVariable, ...]:
    """Return the variables that training leaves out or that are worth a line of the check."""
    odd = {n: rule for n, rule in find_odd(environ).items() if re.fullmatch(VARIABLE_NAME, n)}
    # Login files are read only if one of them matters.
    texts = dict(_read_files(user_home, root)) if odd else {}
    return tuple(
        LoginVariable(
            name=name,
            # Other values may be secrets or paths.
            value=_plain(PLAIN_VALUE, environ[name]) if rule.fate == "agreed" else "",
            file=next((file for file, text in texts.items() if _sets(text, name)), ""),
        )
        for name, rule in odd.items()
    )


def _plain(form: str, text: str) -> str:
    return text if re.fullmatch(form, text) else ""


def _read_files(user_home: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file that exists and can be read."""
    for pattern in _FILES:
        base, name = (user_home, pattern[2:]) if pattern.startswith("~") else (root, pattern[1:])
        with contextlib.suppress(OSError):
            for path in sorted(base.glob(name)):
                shown = f"{'~' if base == user_home else ''}/{path.relative_to(base)}"
                # A pipe or a device could block.
                if path.is_file() and re.fullmatch(PLAIN_PATH, shown):
                    with path.open("rb") as file:
                        yield shown, file.read(_MAX_BYTES).decode("utf-8", "replace")


def _sets(text: str, name: str) -> bool:
    """Return whether a line assigns the variable, in the words of any of these files."""
    assigned = rf"^[^#\n]*\b{name}(\s*=|\s+\S|\s+DEFAULT=)"
    return re.search(assigned, text, re.MULTILINE) is not None
