"""The repair of Windows' own settings: a script that the user runs once on that PC."""

from __future__ import annotations

from app.provisioning.repairs import Repair
from app.provisioning.windows.script import script_name


def run_script(node: str, memory_gib: int | None = None) -> Repair:
    """Return the repair that prepares the Windows of a node.

    Args:
        node: name of the node.
        memory_gib: new memory of WSL, in GiB; None to keep it.
    """
    memory = f" --memory {memory_gib}" if memory_gib is not None else ""
    return Repair(
        id="windows-script" if memory_gib is None else "windows-memory",
        title="Prepare its Windows"
        if memory_gib is None
        else f"Let WSL use {memory_gib} GiB of memory",
        explanation="A script changes what only Windows can change: the network of WSL, its life, "
        "its firewall and its sleep. Save it here with: rackless nodes windows-script "
        f"{node}{memory} and copy it to that PC. It shows each change and asks, and -Undo takes "
        "all of it back.",
        where="windows",
        script=f"powershell -ExecutionPolicy Bypass -File .\\{script_name(node)}",
    )
