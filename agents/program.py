"""Start a program that imports torch: `python -m agents.program MODULE ARGUMENT...`.

MODULE has a `main` that takes the arguments and returns the exit code. All that its imports make
stays until the process ends, so Python does not look through it for garbage: not again and again
while it grows, which takes a fifth of the time of the imports, nor later.

These programs can be started again, and a run on the same PC may be days old: where memory runs
out, the kernel is to end them first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

OOM_SCORE = 500
"""Of 1,000; see proc_pid_oom_score_adj(5). Ranks and what a user starts have 0 or little more."""


def command(python: str, module: str, *arguments: str) -> list[str]:
    """Return what starts a program with another Python."""
    return [python, "-m", "agents.program", module, *arguments]


@contextlib.contextmanager
def imports_that_stay() -> Iterator[None]:
    """Leave what is imported inside the block out of every search for garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main(argv: list[str]) -> int:
    """Import the module and run it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")
    name, *arguments = argv
    with imports_that_stay():
        module = importlib.import_module(name)
    code: int = module.main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
