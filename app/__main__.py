"""The `rackless` command: runs the named command, or opens the window without arguments.

No `from __future__ import` here: it would look for a module before the search path is safe.
"""

import os
import sys


def main() -> int:
    """Run the command that the arguments name and return its exit code."""
    leave_current_folder()
    from app.cli.main import run

    os.umask(0o077)  # what Rackless writes is private, exports too, whatever the login shell sets
    return run(sys.argv[1:])


def leave_current_folder() -> None:
    """Take the current folder off the search path, unless it is the one that holds this package.

    `python -m app` puts it there, and so does an empty PYTHONPATH entry: a `json.py` among a
    stranger's data would run.
    """
    ours = os.path.realpath(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was deleted
        return
    installed = tuple(os.path.join(os.path.realpath(p), "") for p in (sys.prefix, sys.base_prefix))
    if here == ours or os.path.join(here, "").startswith(installed):
        return
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]


if __name__ == "__main__":
    sys.exit(main())
