"""Write the PowerShell script that prepares the Windows of one node.

The script is `resources/windows/node.ps1` with the node's own values in two places. They travel as
JSON in ASCII within single quotes, so no value can become code; the shell script for the distro
travels in base64.
"""

from __future__ import annotations

import base64
import importlib.resources
import json
from dataclasses import asdict

from app.provisioning.windows.facts import WindowsWanted
from app.provisioning.windows.plan import (
    LEAST_DYNAMIC_PORTS,
    MIRRORED_BUILD,
    rules_for,
    settings_for,
    steps_for,
)

_VALUES, _SERVER = "@@VALUES@@", "@@SERVER@@"


def script_name(node: str) -> str:
    """Return the file name of the script for a node."""
    return f"rackless-windows-{node}.ps1"


def write_script(wanted: WindowsWanted) -> str:
    """Return the whole script: ASCII, with the line ends of Windows.

    It runs in Windows PowerShell 5.1 and in PowerShell 7.
    """
    folder = importlib.resources.files("resources") / "windows"
    template = (folder / "node.ps1").read_text(encoding="ascii")
    # A checkout on Windows may have CRLF, which sh takes for a part of the commands.
    server = (folder / "sshd.sh").read_bytes().replace(b"\r\n", b"\n")
    text = template.replace(_VALUES, quote(json.dumps(_values(wanted))))
    text = text.replace(_SERVER, base64.b64encode(server).decode("ascii"))
    return "\r\n".join(text.splitlines()) + "\r\n"


def quote(text: str) -> str:
    """Return the inside of a single-quoted string of PowerShell; only ASCII, on one line.

    >>> quote("it's")
    "it''s"

    Raises:
        ValueError: it has other characters. Typographic quotes end a string there, too.
    """
    if not text.isascii() or not text.isprintable():
        raise ValueError(f"{text[:80]!a} cannot be written into a script")
    return text.replace("'", "''")


def _values(wanted: WindowsWanted) -> dict[str, object]:
    return {
        **asdict(wanted),
        "mirrored_build": MIRRORED_BUILD,
        "least_dynamic_ports": LEAST_DYNAMIC_PORTS,
        "steps": [asdict(step) for step in steps_for(wanted)],
        "settings": {
            "mirrored": _settings(wanted, MIRRORED_BUILD),
            "older": _settings(wanted, MIRRORED_BUILD - 1),
        },
        "rules": [asdict(rule) for rule in rules_for(wanted)],
    }


def _settings(wanted: WindowsWanted, windows_build: int) -> list[dict[str, object]]:
    return [
        {"section": one.section, "key": one.key, "value": one.value, "names": one.names}
        for one in settings_for(wanted, windows_build)
    ]
