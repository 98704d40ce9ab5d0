"""Start an attempt's supervisor exactly once, even if the request is repeated.

The order under the run's launch lock: check the fence, lease the devices, write the intent, start
the supervisor. A failure before the intent leaves nothing behind. A repeated request finds the
started attempt and returns its status; if the first one died between intent and start, the second
starts the supervisor.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agents.contract import run_layout
from agents.contract.run import AttemptIntent, AttemptStatus
from agents.contract.wire import to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.state import Home, locked, require_name, write_json
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.election_process import start_election
from agents.supervisor.fence import add_master_key, raise_fence, read_fence, read_halt
from agents.supervisor.launcher import choose_interface
from agents.supervisor.leases import lease_devices, release
from agents.supervisor.ownership import keep_all_owned
from agents.supervisor.start import start_supervisor

LOCK_TIMEOUT_S = 40.0


def launch(home: Home, intent: AttemptIntent) -> AttemptStatus:
    """Start this node's part of an attempt and return its status.

    Raises:
        ExpectedError: a required file is missing, a device is busy, or a newer attempt exists.
    """
    require_name(intent.run_id, "The run id")
    _check(home, intent)
    # Ranks without a supervisor would keep their devices busy; older ones of this run end below.
    keep_all_owned(home, except_run=intent.run_id)
    attempt = AttemptFolder(home, intent.run_id, intent.attempt)
    run = home.run(intent.run_id)
    # Checked first: a launch creates the folder even if it is refused afterwards.
    is_new = not run.exists()
    try:
        _launch_locked(attempt, intent)
    except BaseException:
        if is_new:
            _remove_empty(run)
        raise
    return read_status(attempt)


def _launch_locked(attempt: AttemptFolder, intent: AttemptIntent) -> None:
    run = attempt.home.run(intent.run_id)
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making the folder {run}") from error
    with locked(run / "launch.lock", LOCK_TIMEOUT_S, f"Run {intent.run_id} is being launched."):
        _refuse_older(attempt, intent)
        _refuse_halted(attempt, intent)
        if any(
            attempt.file(name).exists() for name in (run_layout.STARTED_FILE, run_layout.EXIT_FILE)
        ):
            return  # a repeated request: the attempt has started already
        devices = [r.device_id for r in intent.ranks if r.node == intent.node]
        held = lease_devices(attempt.home, attempt.tag, devices, intent.node)
        try:
            _write_intent(attempt, intent)
            start_election(attempt, intent)
            start_supervisor(attempt, held)
        finally:
            release(held)  # the supervisor has inherited the locks


def _check(home: Home, intent: AttemptIntent) -> None:
    """Refuse an intent that cannot work before anything is written."""
    node = intent.node
    if intent.attempt < 1:
        raise ExpectedError(f"Attempt {intent.attempt} cannot be launched: attempts count from 1.")
    if [r.rank for r in intent.ranks] != list(range(len(intent.ranks))):
        raise ExpectedError(f"The ranks of attempt {intent.attempt} are not 0, 1, 2, ... in order.")
    if not any(r.node == node for r in intent.ranks):
        raise ExpectedError(f"No rank of run {intent.run_id} belongs to node {node}.")
    if not os.access(intent.python, os.X_OK) or os.path.isdir(intent.python):
        raise ExpectedError(
            f"Node {node} has no training environment at {intent.python}.",
            f"Build it: rackless nodes setup {node}",
        )
    # A relative path is the name of a model on the hub, which cannot be checked here.
    spec = intent.spec
    for what, name, path in (
        ("model", spec.model, intent.model_path),
        ("training data", spec.data.train, intent.train_path),
        *(
            ("training data", source.path, path)
            for source, path in zip(spec.data.sources[1:], intent.more_paths, strict=False)
        ),
    ):
        if os.path.isabs(path) and not os.path.exists(path):
            is_copy = "" if path == name else "the copy of "
            raise ExpectedError(
                f"The {what} is missing on node {node}: {is_copy}{name} does not exist."
            )
    choose_interface(intent)
    if intent.resume_step is not None:
        folder = home.checkpoints(intent.run_id) / run_layout.checkpoint_name(intent.resume_step)
        if not folder.is_dir():
            raise ExpectedError(
                f"Node {node} has no checkpoint of step {intent.resume_step}: {folder}"
            )


def _refuse_older(attempt: AttemptFolder, intent: AttemptIntent) -> None:
    newest = read_fence(attempt.home, intent.run_id)
    if intent.attempt < newest:
        raise ExpectedError(
            f"Attempt {intent.attempt} of run {intent.run_id} is out of date: node {intent.node} "
            f"already knows attempt {newest}.",
            f"Another master may have resumed the run; see: rackless runs show {intent.run_id}",
        )


def _refuse_halted(attempt: AttemptFolder, intent: AttemptIntent) -> None:
    if intent.attempt <= read_halt(attempt.home, intent.run_id):
        raise ExpectedError(
            f"Run {intent.run_id} was stopped, so node {intent.node} does not start attempt "
            f"{intent.attempt}.",
            f"Resume it: rackless runs resume {intent.run_id}",
        )


def _write_intent(attempt: AttemptFolder, intent: AttemptIntent) -> None:
    # Before the intent: from here on, an older attempt cannot commit checkpoints.
    raise_fence(attempt.home, attempt.run_id, attempt.number)
    if intent.proof is not None:
        add_master_key(attempt.home, attempt.run_id, intent.proof.mandate.key)
    is_new = not attempt.folder.exists()
    try:
        attempt.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(attempt.file(run_layout.INTENT_FILE), to_wire(intent))
    except OSError as error:
        raise explain_os_error(error, f"making the folder {attempt.folder}") from error
    except ExpectedError:
        if is_new:
            shutil.rmtree(attempt.folder, ignore_errors=True)
        raise


def _remove_empty(run: Path) -> None:
    """Remove the folder of a run that was never launched on this node."""
    if not (run / run_layout.ATTEMPTS).exists() and not (run / run_layout.CHECKPOINTS).exists():
        shutil.rmtree(run, ignore_errors=True)
