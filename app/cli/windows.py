"""`rackless nodes windows-script`: save the script that prepares the Windows of a node in WSL."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.cli.kit.command import Commands, add_command, with_core
from app.cli.kit.output import Output
from app.core.action import CoreApi
from app.core.nodes import MakeWindowsScript, SaveWindowsScript
from app.flows.windows_script import how_to_run, list_steps
from app.provisioning.windows.offer import ScriptOptions


def add_windows_verb(verbs: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        verbs,
        "windows-script",
        "save the PowerShell script that prepares the Windows of a node in WSL",
        with_core(_save),
    )
    parser.add_argument("name", metavar="NAME", help="node, added already or not yet")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to; default: here, by the node's name"
    )
    parser.add_argument("--distro", metavar="NAME", help="WSL distro; default: Ubuntu-24.04")
    parser.add_argument("--port", type=int, metavar="N", help="SSH port in WSL; default: 2222")
    parser.add_argument(
        "--memory", type=int, metavar="GIB", help="memory of WSL; default: half of that PC's"
    )
    parser.add_argument(
        "--at-logon",
        action="store_true",
        help="start WSL when its user logs on: for Windows accounts without a password",
    )
    parser.add_argument(
        "--public-key", type=Path, metavar="FILE", help="key that may log in; default: yours"
    )


async def _save(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    options = ScriptOptions(
        distro=args.distro,
        ssh_port=args.port,
        memory_gib=args.memory,
        start="logon" if args.at_logon else "boot",
        public_key=args.public_key,
    )
    script = await core.do(MakeWindowsScript(name=args.name, options=options))
    file = args.out or Path(script.file_name)
    saved = await core.do(SaveWindowsScript(script=script, file=file))
    out.document(
        {
            "node": script.node,
            "file": str(saved),
            "steps": [step.id for step in script.steps],
            "notes": script.notes,
        }
    )
    out.text(f"saved {file}. It can, after asking:\n{list_steps(script)}")
    for note in script.notes:
        out.note(f"{note}.")
    out.text(how_to_run(file.name))
    return 0
