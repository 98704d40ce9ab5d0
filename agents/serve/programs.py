"""Run a program of the agent for a request, mostly in the training environment.

The program, `PYTHON -m MODULE JOB`, prints JSON lines: those of kind `progress` become events, and
one of kind `failed` is the error of the request.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from typing import Any

from agents.contract.json_text import read_said
from agents.errors import ExpectedError
from agents.node.files import job_folder
from agents.program import command
from agents.serve.channel import Call
from agents.serve.program_watch import ProgramWatch
from agents.shared.files.bounded_work import KILLS
from agents.shared.files.python_child import python_variables
from agents.state import Home, archive_path, write_json
from agents.supervisor.leases import announce

# Start of the last line of a traceback; libraries may print more lines after it.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b")


def run_program(
    call: Call, argv: list[str], what: str, packages: Sequence[str] = (), device: str | None = None
) -> None:
    """Run a program, turning its lines of kind `progress` into events of the request.

    Raises:
        ExpectedError: it failed, with its own line of kind `failed` if it wrote one.
    """
    watch = ProgramWatch(what, lambda text: call.progress(text, ""))

    def relay(line: str) -> None:
        watch.note_line()
        said = read_said(line)
        if said.get("kind") == "progress":
            call.progress(str(said.get("message", "")), str(said.get("phase", "")))

    environ = job_environ(call.home, packages, device)
    # Work on a GPU is visible by its lease; the CPU's is announced.
    with announce(call.home, "cpu", f"{what[:1].lower()}{what[1:]}"):
        code, lines = call.children.run(argv, environ=environ, on_line=relay, on_look=watch.look)
    if code == 0:
        return
    # The program's own message is better than its last line of output.
    failures = [said for said in map(read_said, lines) if said.get("kind") == "failed"]
    error = failures[-1] if failures else explain_end(what, code, lines)
    raise ExpectedError(str(error.get("message", "")), str(error.get("hint", "")))


def report_of(
    call: Call, python: str, module: str, job: dict[str, Any], what: str
) -> dict[str, Any]:
    """Run a program, `MODULE JOB.json REPORT.json`, and return the report."""
    with job_folder(call.home) as folder:
        job_file, report = folder / "job.json", folder / "report.json"
        write_json(job_file, job)
        run_program(call, command(python, module, str(job_file), str(report)), what)
        found: dict[str, Any] = json.loads(report.read_bytes())
        return found


def job_environ(
    home: Home, packages: Sequence[str] = (), device: str | None = None
) -> dict[str, str]:
    """Return the environment variables of a program of the agent.

    Args:
        home: home of the agent.
        packages: folders with packages in addition to the agent's modules.
        device: the only device that the program sees, such as `cuda:1`, which becomes its `cuda:0`,
            or `cpu`, since initializing CUDA takes half a GB of a GPU. None: all devices.
    """
    environ = {
        **python_variables(archive_path(), *packages),
        "RACKLESS_AGENT_HOME": str(home.path),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of NVML and of ranks
    }
    if device is not None:
        environ["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else device.removeprefix("cuda:")
    return environ


def explain_end(what: str, code: int, lines: Sequence[str]) -> dict[str, str]:
    """Return the error of a program that ended without a `failed` line.

    >>> explain_end("Making awq", 1, ["ValueError: no such head", "INFO: closing"])["message"]
    'Making awq failed: ValueError: no such head'
    >>> explain_end("Making awq", -9, [])["message"]
    'Making awq was killed from outside, most likely because the PC ran out of memory.'
    """
    if -code in KILLS:
        reason, hint = KILLS[-code]
        return {"message": f"{what} failed: {reason}.", "hint": hint}
    if code == -signal.SIGKILL:
        return {
            "message": f"{what} was killed from outside, most likely because the PC ran out of "
            "memory.",
            "hint": "Close other programs there, or choose another node",
        }
    errors = [line for line in lines if _EXCEPTION.match(line)]
    last = (errors or lines or ["it said nothing"])[-1][:400]
    return {"message": f"{what} failed: {last}"}
