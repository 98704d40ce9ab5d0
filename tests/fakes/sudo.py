"""A `sudo` that asks for a password as the real one does; it knows only the password's hash."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

_SCRIPT = """#!/bin/sh
# Options in the order in which Rackless passes them: -k, then -n or -S -p ''.
asks=
while :; do case $1 in
-k) shift;;
-n) shift; if [ -n "$WANTED" ]; then echo 'sudo: a password is required' >&2; exit 1; fi;;
-S) shift; asks=1;;
-p) shift; shift;;
*) break;;
esac; done
if [ -n "$asks" ]; then
  IFS= read -r typed || exit 1
  sleep $PAUSE_S
  # printf is part of the shell: the password is in no process's arguments.
  if [ "$(printf %s "$typed" | sha256sum)" != "$WANTED  -" ]; then
    echo 'Sorry, try again.' >&2; echo 'sudo: no password was provided' >&2; exit 1
  fi
fi
if [ -n "$REFUSED" ]; then echo 'user is not in the sudoers file.' >&2; exit 1; fi
exec $BECOME "$@"
"""


def write_sudo(
    folder: Path,
    password: str = "",
    *,
    refused: bool = False,
    become: str = "",
    pause_s: float = 0.0,
) -> Path:
    """Put a fake `sudo` into a folder for the PATH.

    Args:
        password: that it demands; empty: none.
        refused: whether the user is not in the sudoers file.
        become: program that runs its arguments with other rights; empty: those of the caller.
        pause_s: time for which it has the password in memory, in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head, _, rest = _SCRIPT.partition("\n")
    words = {
        "WANTED": hashlib.sha256(password.encode()).hexdigest() if password else "",
        "REFUSED": "1" if refused else "",
        "BECOME": become,
        "PAUSE_S": f"{pause_s:g}",
    }
    given = "\n".join(f"{name}={shlex.quote(word)}" for name, word in words.items())
    file = folder / "sudo"
    file.write_text(f"{head}\n{given}\n{rest}", encoding="utf-8")
    file.chmod(0o755)
    return folder
