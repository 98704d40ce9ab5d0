"""Start a program that imports torch: `python -m agents.program MODULE ARGUMENT...`.

MODULE has a `main` that takes the arguments and returns the exit code. Objects created by imports
live until the process ends, so the garbage collector skips them during the imports, which saves a
fifth of their time, and afterwards.

These programs can simply be restarted, while a run on the same PC may be days old. So if memory
runs out, the kernel should kill them first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from agents import foreign_code

OOM_SCORE = 500
"""Adjustment that makes the kernel kill this process first if memory runs out, at most 1000; see
proc_pid_oom_score_adj(5). Ranks and a user's own programs have about 0."""


def command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the argv that runs a program with another Python."""
    return [python, "-m", "agents.program", module, *arguments]


@contextlib.contextmanager
def imports_that_stay() -> Iterator[None]:
    """Exclude objects that the block's imports create from garbage collection."""
    gc.disable()
    try:
        yield
    finally:
        # Before enable: frozen objects are never scanned again.
        gc.freeze()
        gc.enable()


def main(argv: list[str]) -> int:
    """Import the module and run it."""
    os.umask(0o077)  # data, checkpoints and models of users are private
    # Some containers mount /proc read-only.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")
    # Before the import below, which may load libraries that run foreign code.
    foreign_code.install()
    name, *arguments = argv
    with imports_that_stay():
        module = importlib.import_module(name)
    code: int = module.main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
