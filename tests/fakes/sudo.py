"""A `sudo` that asks for a password as the real one does, and gives no rights."""

from __future__ import annotations

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
  if [ "$typed" != "$WANTED" ]; then
    echo 'Sorry, try again.' >&2; echo 'sudo: no password was provided' >&2; exit 1
  fi
fi
if [ -n "$REFUSED" ]; then echo 'user is not in the sudoers file.' >&2; exit 1; fi
exec $BECOME "$@"
"""


def write_sudo(
    folder: Path, password: str = "", *, refused: bool = False, become: str = ""
) -> Path:
    """Put a fake `sudo` into a folder for the PATH.

    Args:
        password: that it demands; empty: none.
        refused: whether the user is not in the sudoers file.
        become: program that runs its arguments with other rights; empty: those of the caller.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head, _, rest = _SCRIPT.partition("\n")
    words = {"WANTED": password, "REFUSED": "1" if refused else "", "BECOME": become}
    given = "\n".join(f"{name}={shlex.quote(word)}" for name, word in words.items())
    file = folder / "sudo"
    file.write_text(f"{head}\n{given}\n{rest}", encoding="utf-8")
    file.chmod(0o755)
    return folder
