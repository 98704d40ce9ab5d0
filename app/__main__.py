"""The `rackless` command: runs the named command, or opens the window without arguments."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command that the arguments name and return its exit code."""
    from app.cli.main import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
