"""Dispatch the commands of the archive.

Imports are lazy, because the start of Python takes most of the time between connection and `hello`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from agents.errors import ExpectedError
from agents.state import open_home

USAGE = (
    "usage: serve NONCE | record | supervise ATTEMPT_DIR | election ATTEMPT_DIR"
    " | receive DESTINATION | send PATH | repair | spread | shared JOB | probe PATH"
)


def run_command(argv: list[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage."""
    os.umask(0o077)  # logs and data of users are private, whatever the login shell sets
    command, arguments = (argv[0] if argv else ""), argv[1:]
    if command == "serve" and len(arguments) == 1:
        return _serve(arguments[0])
    if command == "record" and not arguments:
        from agents.telemetry.recorder import record

        return record(open_home())
    if command == "supervise" and len(arguments) in (1, 2):
        from agents.supervisor.supervise import supervise

        return supervise(*arguments)
    if command == "election" and len(arguments) == 1:
        from agents.election.process import elect

        return elect(arguments[0])
    if command == "repair" and not arguments:
        from agents.node.repair_command import repair

        return repair(sys.stdin.buffer)
    if command == "spread" and not arguments:
        from agents.spread.process import spread

        return spread(open_home(), sys.stdin.buffer, sys.stdout.buffer)
    # Both read from shares, whose server may be lost.
    if command in ("shared", "probe") and len(arguments) == 1:
        return _check_shares(command, Path(arguments[0]))
    if command in ("receive", "send") and len(arguments) == 1:
        return _transfer(command, arguments[0])
    sys.stderr.write(USAGE + "\n")
    return 2


def _serve(nonce: str) -> int:
    from agents.serve.handshake import greet

    # `hello` is sent before the import of the server, which takes longer.
    greeted = greet(nonce)
    if greeted is None:
        return 1
    from agents.serve.server import serve

    serve(*greeted)
    return 0


def _check_shares(command: str, path: Path) -> int:
    from agents.node import shared_files

    if command == "shared":
        shared_files.find_shared(open_home(), path)
        code = 0
    else:
        problem = shared_files.probe(path)
        sys.stdout.write(problem)
        code = 1 if problem else 0
    sys.stdout.flush()
    # A thread that waits for a file server would block a normal exit.
    os._exit(code)


def _transfer(command: str, path: str) -> int:
    from agents.node import files

    try:
        home = open_home()
        if command == "send":
            files.send(home, path, sys.stdout.buffer)
            return 0
        answer = {"ok": True, "path": files.receive(home, path, sys.stdin.buffer)}
    except ExpectedError as error:
        answer = {"ok": False, "message": error.message, "hint": error.hint}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0 if answer["ok"] else 1
