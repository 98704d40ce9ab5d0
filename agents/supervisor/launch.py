"""Start an attempt's supervisor exactly once, however often the request comes.

In this order, under the run's launch lock: fence, devices leased, intent durable, supervisor
started. What fails before the intent leaves nothing behind. A second request for the same attempt
finds the intent and answers with the state; if the first one died between intent and start, the
second starts the supervisor.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agents.contract.run import AttemptIntent, AttemptStatus
from agents.contract.run_layout import (
    ATTEMPTS,
    CHECKPOINTS,
    EXIT_FILE,
    INTENT_FILE,
    STARTED_FILE,
    checkpoint_name,
)
from agents.contract.wire import to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.state import Home, locked, require_name, write_json
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.election_process import start_election
from agents.supervisor.fence import raise_fence, read_fence
from agents.supervisor.launcher import choose_interface
from agents.supervisor.leases import lease_devices, release
from agents.supervisor.ownership import keep_all_owned
from agents.supervisor.start import start_supervisor

LOCK_TIMEOUT_S = 40.0


def launch(home: Home, intent: AttemptIntent) -> AttemptStatus:
    """Start this node's part of an attempt and return its status.

    Raises:
        ExpectedError: something that it needs is missing, a device is busy, or a newer attempt
            exists.
    """
    require_name(intent.run_id, "The run id")
    _check(home, intent)
    # Ranks whose supervisor was killed hold their devices; older ones of this run are ended below.
    keep_all_owned(home, besides=intent.run_id)
    attempt = AttemptFolder(home, intent.run_id, intent.attempt)
    run = home.run(intent.run_id)
    # Asked first: a launch makes the folder even if it is then refused.
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
        if any(attempt.file(name).exists() for name in (STARTED_FILE, EXIT_FILE)):
            return
        devices = [r.device_id for r in intent.ranks if r.node == intent.node]
        held = lease_devices(attempt.home, attempt.tag, devices, intent.node)
        try:
            _write_intent(attempt, intent)
            start_election(attempt, intent)
            start_supervisor(attempt, held)
        finally:
            release(held)  # the supervisor has inherited the locks


def _check(home: Home, intent: AttemptIntent) -> None:
    """Refuse an intent that cannot work, before anything is written."""
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
    # Only absolute paths can be checked here; a hub's model name is relative.
    for what, path in (("model", intent.model_path), ("training data", intent.train_path)):
        if os.path.isabs(path) and not os.path.exists(path):
            raise ExpectedError(f"The {what} is missing on node {node}: {path} does not exist.")
    choose_interface(intent)
    if intent.resume_step is not None:
        folder = home.checkpoints(intent.run_id) / checkpoint_name(intent.resume_step)
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


def _write_intent(attempt: AttemptFolder, intent: AttemptIntent) -> None:
    # Before the intent: from here on an older attempt can commit no checkpoint.
    raise_fence(attempt.home, attempt.run_id, attempt.number)
    is_new = not attempt.folder.exists()
    try:
        attempt.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(attempt.file(INTENT_FILE), to_wire(intent))
    except OSError as error:
        raise explain_os_error(error, f"making the folder {attempt.folder}") from error
    except ExpectedError:
        if is_new:
            shutil.rmtree(attempt.folder, ignore_errors=True)
        raise


def _remove_empty(run: Path) -> None:
    """Remove the folder of a run that was never launched here."""
    if not (run / ATTEMPTS).exists() and not (run / CHECKPOINTS).exists():
        shutil.rmtree(run, ignore_errors=True)
