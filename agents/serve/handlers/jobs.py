"""Handle requests for long work outside a run: merge, quantize, preview data, download a model.

The work runs in the training environment, as `PYTHON -m MODULE JOB.json`. It prints JSON lines:
those of kind `progress` become events, and one of kind `failed` is the error of the request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from agents.contract.artifacts import MakeJob, MergeJob
from agents.contract.data import PreviewJob
from agents.contract.environments import DeviceTrial, EnvironmentTrial, TrialJob
from agents.contract.hub import HubModel, read_snapshot
from agents.contract.json_text import read_said
from agents.contract.node import CalibrationJob, EnvironmentReport
from agents.contract.run_layout import checkpoint_name
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.environment import keep_trial, read_adopted
from agents.node.facts import read_gpus
from agents.node.files import (
    describe_file,
    job_folder,
    list_files,
    remove_abandoned,
    remove_layers,
    split_destination,
)
from agents.program import command
from agents.serve.channel import Call
from agents.shared.files.bounded_work import KILLED, KILLED_HINT, KILLED_MESSAGE
from agents.shared.files.python_child import python_variables
from agents.state import Home, archive_path, require_name, write_json
from agents.supervisor.leases import announce, borrow_device

# Start of the last line of a traceback; libraries may print more lines after it.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b")


def export_merged(call: Call) -> dict[str, Any]:
    """Merge a checkpoint's adapter into its model; return the folder and its files."""
    job = from_wire(MergeJob, call.args, "job")
    require_name(job.run_id, "The run id")
    destination = call.home.path.joinpath(*split_destination(job.destination))
    checkpoint = call.home.checkpoints(job.run_id) / checkpoint_name(job.step)
    if not checkpoint.is_dir():
        raise ExpectedError(f"This node has no checkpoint of run {job.run_id} at step {job.step}.")
    told = {**to_wire(job), "destination": str(destination), "checkpoint": str(checkpoint)}
    with job_folder(call.home) as folder:
        job_file = folder / "job.json"
        write_json(job_file, told)
        argv = command(job.python, "agents.quantizers.merge", str(job_file))
        try:
            _run(call, argv, f"The merge of {job.run_id}", device="cpu")
        finally:
            remove_abandoned(destination)
    files = [describe_file(destination, path) for path in list_files(call.home, destination)]
    if not files:
        raise ExpectedError(f"The merge of run {job.run_id} wrote nothing to {destination}.")
    return {"path": job.destination, "files": files}


def export_made(call: Call) -> dict[str, Any]:
    """Quantize a merged model and prove the result; return the folder and its files.

    It needs the GPU for itself: it waits for other exports, and is refused beside a run.
    """
    job = from_wire(MakeJob, call.args, "job")
    destination = call.home.path.joinpath(*split_destination(job.destination))
    packages = [str(call.home.path / job.packages)] if job.packages else []
    work = f"the export of run {job.origin.run_id}"
    with _borrow_in_turn(call, job.device_id, work), job_folder(call.home) as folder:
        job_file = folder / "job.json"
        alone = "cpu" if job.device == "cpu" else "cuda:0"  # the only one that it sees
        write_json(job_file, {**to_wire(job), "device": alone})
        argv = command(job.python, "agents.quantizers.make", str(job_file))
        try:
            what = f"Making {job.method} of {job.origin.run_id}"
            _run(call, argv, what, packages, device=job.device)
        finally:
            remove_abandoned(destination)
            # After a crash or a lost connection the next try continues with these layers.
            if call.children.is_cancelled:
                remove_layers(destination)
    files = [describe_file(destination, path) for path in list_files(call.home, destination)]
    return {"path": job.destination, "files": files}


def preview_data(call: Call) -> dict[str, Any]:
    """Tokenize data as a run would; return the preview."""
    job = from_wire(PreviewJob, call.args, "job")
    module = "agents.trainer.data.preview"
    return _report(call, job.python, module, to_wire(job), "The preview of the data")


def calibrate(call: Call) -> dict[str, Any]:
    """Measure the speed of a free GPU."""
    job = from_wire(CalibrationJob, call.args, "job")
    node = socket.gethostname()
    with borrow_device(call.home, job.device_id, "a measurement", node, lambda name: False):
        module = "agents.trainer.calibration"
        return _report(call, job.python, module, to_wire(job), f"The measurement of {job.device}")


def fetch_hub_model(call: Call) -> dict[str, Any]:
    """Download a model of the hub into its cache on this node; return what the cache has then.

    Raises:
        ExpectedError: there is no training environment, or the model cannot be downloaded.
    """
    job = from_wire(HubModel, call.args, "args")
    adopted = read_adopted(call.home)
    if adopted is None or adopted.python is None:
        raise ExpectedError("There is no training environment on this node to download with.")
    with job_folder(call.home) as folder:
        job_file = folder / "job.json"
        write_json(job_file, to_wire(job))
        argv = command(adopted.python, "agents.trainer.data.hub_fetch", str(job_file))
        _run(call, argv, f"The download of {job.model}")
    return {"snapshot": read_snapshot(job.model, os.environ)}


def try_environment(call: Call) -> EnvironmentReport:
    """Import what training needs and do one tiny step on each free device; keep what came of it.

    Raises:
        ExpectedError: there is no environment, or a package cannot be imported.
    """
    adopted = read_adopted(call.home)
    if adopted is None or adopted.python is None:
        raise ExpectedError("There is no training environment on this node to try.")
    gpus, _ = read_gpus(call.home)
    node = socket.gethostname()
    devices = []
    with contextlib.ExitStack() as held:
        for gpu in gpus:
            trial = DeviceTrial(device=f"cuda:{gpu.index}", name=gpu.name)
            try:
                held.enter_context(
                    borrow_device(call.home, gpu.uuid, "a trial", node, lambda name: False)
                )
            except ExpectedError as busy:
                trial = replace(trial, problem=f"not tried: {busy.message}")
            devices.append(trial)
        cpu = DeviceTrial(device="cpu", name="CPU")
        job = TrialJob(devices=tuple(devices) or (cpu,))
        found = _report(
            call, adopted.python, "agents.trainer.trial", to_wire(job), "The trial of training"
        )
    return keep_trial(call.home, from_wire(EnvironmentTrial, found, "report"))


@contextlib.contextmanager
def _borrow_in_turn(call: Call, device_id: str, work: str) -> Iterator[None]:
    """Hold the lease of a GPU inside the block, after other jobs; the CPU needs none."""
    if device_id == "cpu":
        yield
        return
    told = ""

    def wait(name: str) -> bool:
        nonlocal told
        if name != told:
            call.progress(f"waiting until {name} has finished with the GPU", "wait")
            told = name
        # Nobody waits for the result once the request was cancelled or the master is gone.
        return not call.children.is_closed

    with borrow_device(call.home, device_id, work, socket.gethostname(), wait):
        yield


def _report(
    call: Call,
    python: str,
    module: str,
    job: dict[str, Any],
    what: str,
) -> dict[str, Any]:
    """Run a program, `MODULE JOB.json REPORT.json`, and return the report."""
    with job_folder(call.home) as folder:
        job_file, report = folder / "job.json", folder / "report.json"
        write_json(job_file, job)
        _run(call, command(python, module, str(job_file), str(report)), what)
        found: dict[str, Any] = json.loads(report.read_bytes())
        return found


def job_environ(
    home: Home, packages: Sequence[str] = (), device: str | None = None
) -> dict[str, str]:
    """Return the environment variables for a program of ours.

    Args:
        home: of the agent.
        packages: folders beside our modules.
        device: the only device that the program sees, such as `cuda:1` (which becomes its `cuda:0`)
            or `cpu`: merely initializing CUDA takes half a GB of a GPU. None: all of them.
    """
    environ = {
        **python_variables(archive_path(), *packages),
        "RACKLESS_AGENT_HOME": str(home.path),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML counts, and as ranks are started
    }
    if device is not None:
        environ["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else device.removeprefix("cuda:")
    return environ


def _run(
    call: Call,
    argv: list[str],
    what: str,
    packages: Sequence[str] = (),
    device: str | None = None,
) -> None:
    def tell(line: str) -> None:
        said = read_said(line)
        if said.get("kind") == "progress":
            call.progress(str(said.get("message", "")), str(said.get("phase", "")))

    environ = job_environ(call.home, packages, device)
    # Work on a GPU holds its lease, which says the same.
    with announce(call.home, "cpu", f"{what[:1].lower()}{what[1:]}"):
        code, lines = call.children.run(argv, environ=environ, on_line=tell)
    if code == 0:
        return
    # Also with a non-zero exit code, the program's own words say more than its last line.
    failures = [said for said in map(read_said, lines) if said.get("kind") == "failed"]
    told = failures[-1] if failures else explain_end(what, code, lines)
    raise ExpectedError(str(told.get("message", "")), str(told.get("hint", "")))


def explain_end(what: str, code: int, lines: Sequence[str]) -> dict[str, str]:
    """Return the error of a program that ended without a `failed` line.

    >>> explain_end("Making awq", 1, ["ValueError: no such head", "INFO: closing"])["message"]
    'Making awq failed: ValueError: no such head'
    >>> explain_end("Making awq", -9, [])["message"]
    'Making awq was killed from outside, most likely because the PC ran out of memory.'
    """
    if code == -KILLED:
        return {"message": f"{what} failed: {KILLED_MESSAGE}.", "hint": KILLED_HINT}
    if code == -signal.SIGKILL:
        return {
            "message": f"{what} was killed from outside, most likely because the PC ran out of "
            "memory.",
            "hint": "Close other programs there, or choose another node",
        }
    errors = [line for line in lines if _EXCEPTION.match(line)]
    last = (errors or lines or ["it said nothing"])[-1][:400]
    return {"message": f"{what} failed: {last}"}
