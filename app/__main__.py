"""The `rackless` command: runs the named command, or opens the window without arguments.

`from __future__ import` is missing here, since it would search for a module before the search path
is safe.
"""

import os
import sys


def main() -> int:
    """Run the command named by the arguments and return its exit code."""
    leave_current_folder()
    from app.cli.main import run

    os.umask(0o077)  # all files of Rackless are private, exports too, with any login shell
    return run(sys.argv[1:])


def leave_current_folder() -> None:
    """Remove the current folder from the search path, unless it holds this package."""
    # `python -m app` and an empty PYTHONPATH entry put it there, so that a `json.py` among a
    # stranger's data would run.
    ours = os.path.realpath(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # the current folder was deleted
        return
    installed = tuple(os.path.join(os.path.realpath(p), "") for p in (sys.prefix, sys.base_prefix))
    if here == ours or os.path.join(here, "").startswith(installed):
        return
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]


if __name__ == "__main__":
    sys.exit(main())
