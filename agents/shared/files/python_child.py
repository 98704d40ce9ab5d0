"""Start Python programs so that they import the agent's and installed modules, and no others.

`python -m` and `python -c` put the current folder first on the search path, and PYTHONPATH may name
any other: a `torch.py` in the folder of a run file, or in foreign data, would run with the user's
rights. So every start passes these variables and a safe `cwd`. They are inherited, so that
processes started by libraries (torch's compile workers) are covered, too.

The user's own site-packages stay on the path, since a training environment may be there.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence

SAFE_FOLDER = os.path.abspath(os.sep)
"""Working folder for a program that needs none. Python 3.10 does not know PYTHONSAFEPATH and
searches modules here first; only an administrator can write to it."""
# To Python, an empty value is the same as none, but it overrides an inherited one.
_CLEARED = ("PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONEXECUTABLE", "PYTHONBREAKPOINT")


def python_variables(*folders: str) -> dict[str, str]:
    """Return the environment variables of a Python child, to override the inherited ones.

    Args:
        folders: folders or archives to import from, before its own packages.

    >>> python_variables("/a", "/b")["PYTHONPATH"].split(os.pathsep)
    ['/a', '/b']
    """
    named = os.pathsep.join(folder for folder in folders if folder)
    return {
        **dict.fromkeys(_CLEARED, ""),
        "PYTHONPATH": named,
        # From Python 3.11 on.
        "PYTHONSAFEPATH": "1",
    }


def python_environ(environ: Mapping[str, str], *folders: str) -> dict[str, str]:
    """Return the whole environment of a Python child; see `python_variables`."""
    return {**environ, **python_variables(*folders)}


def own_folders(environ: Mapping[str, str]) -> list[str]:
    """Return the folders that `python_variables` gave to this process, to pass them to a child.

    >>> own_folders({"PYTHONPATH": f"/a{os.pathsep}{os.pathsep}.{os.pathsep}/b"}) == ["/a", "/b"]
    True
    """
    # An empty or relative entry would be the current folder, and never comes from there.
    return [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]


def source_folder() -> str:
    """Return the folder of `app` and `agents`, or the archive of `agents`."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def same_source() -> Sequence[str]:
    """Return the folders that a child with the same interpreter needs to import this program.

    None if it is installed: before the standard library, site-packages could hide it.
    """
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    source = source_folder()
    return () if source in installed else (source,)
