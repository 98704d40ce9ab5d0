"""The archive's commands: `python3 -I ARCHIVE COMMAND ...`; also `python3 -m agents COMMAND ...`.

    serve NONCE            speak the protocol on stdin and stdout
    record                 sample the sensors until the lease expires
    supervise ATTEMPT_DIR  own the ranks of one attempt
    election ATTEMPT_DIR   recover one attempt if no master does
    receive DESTINATION    store files from stdin
    send PATH              write files to stdout
    repair                 apply or undo repairs from stdin
    spread                 take part in a transfer along a chain of nodes

The archive's own `__main__.py` is a copy of this file. Python 3.6 must be able to run it, so that a
node with an old python3 gets a message instead of a traceback: quoted annotations, no
`from __future__ import annotations`.
"""

import json
import os
import sys

OLDEST_PYTHON = (3, 10)


def main(argv: "list[str]") -> int:
    """Run one command and return the exit code."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        return refuse_python(argv, "{}.{}".format(*sys.version_info[:2]))
    # Imported here, because an old Python could not even parse it.
    from agents.commands import run_command

    return run_command(argv)


def refuse_python(argv: "list[str]", found: str) -> int:
    """Report that this node's python3 is too old, as an event to a connected master."""
    message = f"python3 on this node is {found}; Rackless needs 3.10 or newer"
    hint = "Install a newer one: sudo apt-get install python3.10 (or upgrade this PC's system)"
    if argv[:1] != ["serve"]:
        sys.stderr.write(f"{message}. {hint}\n")
        return 1
    error = {"kind": "user", "message": message, "hint": hint, "traceback": ""}
    event = {"type": "event", "kind": "fatal", "data": error, "request_id": None}
    nonce = "".join(argv[1:2])
    os.write(1, f"RACKLESS {nonce}\n{json.dumps(event)}\n".encode("ascii", "replace"))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
