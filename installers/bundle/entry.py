"""The program of the desktop bundle: the `rackless` command, and `-m MODULE` for its own children.

The app starts some of its parts as `sys.executable -m MODULE`, which here is this program.
"""

import os
import runpy
import sys


def main() -> int:
    """Run the command line, or one module of the app."""
    free_children()
    if sys.argv[1:2] == ["-m"] and len(sys.argv) > 2:
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return 0
    from app.__main__ import main as run

    return run()


def free_children() -> None:
    """Give programs of the system their own libraries back.

    The bundle's loader puts its folder first in LD_LIBRARY_PATH and keeps the former value beside
    it; `python3`, `ssh` or a browser would load our copies of their libraries.
    """
    former = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
    if former is not None:
        os.environ["LD_LIBRARY_PATH"] = former
    else:
        os.environ.pop("LD_LIBRARY_PATH", None)


if __name__ == "__main__":
    sys.exit(main())
