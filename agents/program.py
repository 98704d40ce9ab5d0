"""Start a program that imports torch: `python -m agents.program MODULE ARGUMENT...`.

MODULE has a `main` that takes the arguments and returns the exit code. All that its imports make
stays until the process ends, so Python does not look through it for garbage: not again and again
while it grows, which takes a fifth of the time of the imports, nor later.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


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
    name, *arguments = argv
    with imports_that_stay():
        module = importlib.import_module(name)
    code: int = module.main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
