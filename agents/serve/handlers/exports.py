"""Handlers of requests for artifacts: merge a checkpoint's adapter, quantize the merged model."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from agents.contract.requests.exports import ExportedFiles, MakeJob, MergeJob
from agents.contract.run import FileEntry
from agents.contract.run_layout import checkpoint_name
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
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
from agents.serve.handlers import handles
from agents.serve.programs import run_program
from agents.state import Home, require_name, write_json
from agents.supervisor.leases import borrow_device


@handles(MergeJob)
def export_merged(call: Call, job: MergeJob) -> ExportedFiles:
    """Merge a checkpoint's adapter into its model; return the folder and its files."""
    require_name(job.run_id, "The run id")
    # Checked, since a path in a request must not leave the agent's home.
    destination = call.home.path.joinpath(*split_destination(job.destination))
    checkpoint = call.home.checkpoints(job.run_id) / checkpoint_name(job.step)
    if not checkpoint.is_dir():
        raise ExpectedError(f"This node has no checkpoint of run {job.run_id} at step {job.step}.")
    settings = {**to_wire(job), "destination": str(destination), "checkpoint": str(checkpoint)}
    with job_folder(call.home) as folder:
        job_file = folder / "job.json"
        write_json(job_file, settings)
        argv = command(job.python, "agents.quantizers.merge", str(job_file))
        try:
            # No GPU: the merge computes on the CPU, and a run may need the memory.
            run_program(call, argv, f"The merge of {job.run_id}", device="cpu")
        finally:
            # A killed merge leaves partial files that nothing would continue.
            remove_abandoned(destination)
    files = tuple(_describe(call.home, destination))
    if not files:
        raise ExpectedError(f"The merge of run {job.run_id} wrote nothing to {destination}.")
    return ExportedFiles(path=job.destination, files=files)


@handles(MakeJob)
def export_made(call: Call, job: MakeJob) -> ExportedFiles:
    """Quantize a merged model and prove the result; return the folder and its files.

    The GPU must be idle: the export waits for other exports, and is refused during a run.
    """
    destination = call.home.path.joinpath(*split_destination(job.destination))
    packages = [str(call.home.path / job.packages)] if job.packages else []
    work = f"the export of run {job.origin.run_id}"
    with _borrow_in_turn(call, job.device_id, work), job_folder(call.home) as folder:
        job_file = folder / "job.json"
        alone = "cpu" if job.device == "cpu" else "cuda:0"  # the program sees only this GPU
        write_json(job_file, {**to_wire(job), "device": alone})
        argv = command(job.python, "agents.quantizers.make", str(job_file))
        try:
            what = f"Making {job.method} of {job.origin.run_id}"
            run_program(call, argv, what, packages, device=job.device)
        finally:
            remove_abandoned(destination)
            # After a crash or a lost connection, the next try continues with these layers.
            if call.children.is_cancelled:
                remove_layers(destination)
    files = tuple(_describe(call.home, destination))
    return ExportedFiles(path=job.destination, files=files)


@contextlib.contextmanager
def _borrow_in_turn(call: Call, device_id: str, work: str) -> Iterator[None]:
    """Hold the lease of a GPU inside the block, after other jobs; the CPU needs no lease."""
    if device_id == "cpu":
        yield
        return
    announced = ""

    def wait(name: str) -> bool:
        nonlocal announced
        if name != announced:
            call.progress(f"waiting until {name} has finished with the GPU", "wait")
            announced = name
        # The result is no longer wanted if the request was cancelled or the master is gone.
        return not call.children.is_closed

    with borrow_device(call.home, device_id, work, socket.gethostname(), wait):
        yield


def _describe(home: Home, folder: Path) -> Iterator[FileEntry]:
    return (describe_file(folder, path) for path in list_files(home, folder))
