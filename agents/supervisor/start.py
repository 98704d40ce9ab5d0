"""Start the supervisor process of an attempt, and wait until it reports its start."""

from __future__ import annotations

import os
import subprocess
import time

from agents.contract.run_layout import EXIT_FILE, SUPERVISOR_LOG
from agents.errors import ExpectedError, explain_os_error
from agents.shared.files.python_child import python_variables
from agents.state import agent_command, archive_path
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.sweep import find_processes

START_TIMEOUT_S = 30.0


def start_supervisor(attempt: AttemptFolder, held: list[int]) -> None:
    """Start the supervisor, which inherits the leases `held`, and wait until it has started.

    The caller holds the launch lock of the run.

    Raises:
        ExpectedError: the supervisor cannot be started, or has died.
    """
    before = attempt.read_supervisor()
    command = [*agent_command(), "supervise", str(attempt.folder), ",".join(map(str, held))]
    try:
        with open(attempt.file(SUPERVISOR_LOG), "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=supervisor_environ(attempt),
                cwd=attempt.folder,
                # flock belongs to the open file, so closing our descriptor does not free the lock.
                pass_fds=held,
                start_new_session=True,
            )
    except OSError as error:
        raise explain_os_error(error, f"starting the supervisor of {attempt.folder}") from error
    process.wait()  # reaps the first process, which forks and exits at once
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if attempt.file(EXIT_FILE).exists() or attempt.read_supervisor() != before:
            return
        # The supervisor has the tag from exec on, so no tagged process means that it died.
        if not find_processes(attempt.tag):
            break
        time.sleep(0.02)
    said = attempt.file(SUPERVISOR_LOG).read_bytes()[-500:].decode("utf-8", "replace").strip()
    # Checked again: it may have started and ended between the check and the scan above.
    if not attempt.file(EXIT_FILE).exists() and attempt.read_supervisor() == before:
        raise ExpectedError(
            f"The supervisor of run {attempt.run_id} did not start; its output: {said or 'none'}"
        )


def supervisor_environ(attempt: AttemptFolder) -> dict[str, str]:
    """Return the environment of this process with the attempt's tag added."""
    return {
        **os.environ,
        **attempt.tag.environ(),
        "RACKLESS_AGENT_HOME": str(attempt.home.path),
        **python_variables(archive_path()),
    }
