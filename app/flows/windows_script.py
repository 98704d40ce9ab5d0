"""Texts about the script that prepares Windows for a node in WSL."""

from __future__ import annotations

from app.events import NodeSnapshot
from app.provisioning.windows.offer import ScriptOptions, WindowsScript


def runs_in_wsl(node: NodeSnapshot) -> bool:
    """Return whether a node is known to be a distro of WSL.

    >>> runs_in_wsl(NodeSnapshot(name="a", transport="wsl", address="Ubuntu", state="online"))
    True
    """
    return node.transport == "wsl" or (node.facts is not None and node.facts.wsl is not None)


def read_options(memory_gib: int, at_logon: bool) -> ScriptOptions:
    """Return the options of a form; memory 0 leaves it to WSL."""
    return ScriptOptions(memory_gib=memory_gib or None, start="logon" if at_logon else "boot")


def list_steps(script: WindowsScript) -> str:
    """Return the possible changes of the script, a line each."""
    return "\n".join(
        f"  {step.title}{' (administrator)' if step.needs_admin else ''}" for step in script.steps
    )


def introduce_script(node: str) -> str:
    """Introduce the script; `node`: a known node, or empty for a PC that will become one."""
    values = f"the values of {node}" if node else "the name that the PC will have"
    return (
        f"Some settings of WSL can be changed on Windows only. This script has {values} and the "
        "addresses of your other nodes. On that PC it shows each change and asks; it can:"
    )


def how_to_add(script: WindowsScript) -> str:
    """Return how the PC of a script becomes a node once the script has run."""
    return (
        f"Then add it here as {script.node}: USER@ADDRESS-OF-THAT-PC:2222, where USER is the one "
        "inside Ubuntu."
    )


def how_to_run(file_name: str) -> str:
    """Return how to run a saved script on its PC."""
    command = f"powershell -ExecutionPolicy Bypass -File .\\{file_name}"
    return (
        "Copy it to that PC, and run it there in PowerShell as the user who owns the distro:\n"
        f"  {command} -DryRun\n"
        f"  {command}\n"
        "-Undo takes everything back. docs/windows.md explains each step."
    )
