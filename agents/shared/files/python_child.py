"""Start Python programs of ours so that they import our modules, installed ones, and no others.

`python -m` and `python -c` put the current folder first on the search path, and PYTHONPATH may name
any other: a `torch.py` that lies beside a run file, or among a stranger's data, would run with the
user's rights. So every start passes these variables and a `cwd` of ours. They are inherited, so
what a library starts of its own accord (torch's compile workers) is covered, too.

The user's own site-packages stay on the path, since a training environment may live there.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence

SAFE_FOLDER = os.path.abspath(os.sep)
"""Working folder for a program that needs none. Python 3.10 does not know PYTHONSAFEPATH and looks
for modules here first; only an administrator can write to it."""
# An empty value is the same to Python as none, and can override an inherited one.
_CLEARED = ("PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONEXECUTABLE", "PYTHONBREAKPOINT")


def python_variables(*folders: str) -> dict[str, str]:
    """Return the environment variables of a Python child, to be put over the inherited ones.

    Args:
        folders: folders or archives that it imports from, before its own packages.

    >>> python_variables("/a", "/b")["PYTHONPATH"].split(os.pathsep)
    ['/a', '/b']
    """
    named = os.pathsep.join(folder for folder in folders if folder)
    return {
        **dict.fromkeys(_CLEARED, ""),
        "PYTHONPATH": named,
        "PYTHONSAFEPATH": "1",
    }


def python_environ(environ: Mapping[str, str], *folders: str) -> dict[str, str]:
    """Return the whole environment of a Python child; see `python_variables`."""
    return {**environ, **python_variables(*folders)}


def own_folders(environ: Mapping[str, str]) -> list[str]:
    """Return the folders that this process was itself given by `python_variables`, for a child.

    >>> own_folders({"PYTHONPATH": f"/a{os.pathsep}{os.pathsep}.{os.pathsep}/b"}) == ["/a", "/b"]
    True
    """
    # An empty or relative entry would be the current folder, and is never one of ours.
    return [one for one in environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(one)]


def source_folder() -> str:
    """Return the folder that holds `app` and `agents`, or the archive that holds `agents`."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def same_source() -> Sequence[str]:
    """Return what a child with this same interpreter needs in order to import our packages.

    Nothing where they are installed: before the standard library, site-packages could hide it.
    """
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    source = source_folder()
    return () if source in installed else (source,)
