"""Start one rank: `python -m agents.trainer`, by the supervisor or under torchrun.

Reads `intent.json` in $RACKLESS_ATTEMPT_DIR, and its own position from RANK and WORLD_SIZE. Exits
with 0 (done, or stopped on request), 3 (impossible, for the reason in the journal), or 1 (a bug).
The journal and the heartbeat start before torch is imported, which takes seconds. The log is for
users: it starts with rank, run and versions, before any output of libraries.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agents import foreign_code
from agents.contract.run_layout import rank_heartbeat, rank_journal, rank_log
from agents.errors import Diverged, ExpectedError
from agents.limits import count_cpus
from agents.program import imports_that_stay
from agents.shared.files.secrets import format_trace, hide_secrets
from agents.shared.login_variables import LEFT_OUT
from agents.trainer.model_reading import start_reading
from agents.trainer.model_view import open_parts
from agents.trainer.rank.attempt import RankAttempt, read_attempt, redirect_output
from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.owner_watch import watch_owner
from agents.trainer.rank.start_times import StartTimes
from agents.trainer.rank.step_control import RankControl

EXIT_USER_ERROR = 3
EXIT_FAULT = 1
# Maximum number of compiling processes; each takes about 300 MB.
_MAX_COMPILERS = 8


def main() -> int:
    """Run one rank and return its exit code."""
    os.umask(0o077)  # a manual torchrun inherits that of the shell
    named = os.environ.get("RACKLESS_ATTEMPT_DIR")
    if not named:
        sys.stderr.write("RACKLESS_ATTEMPT_DIR is not set: it names the folder of the attempt\n")
        return EXIT_USER_ERROR
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(named).absolute()
    if not folder.is_dir():
        sys.stderr.write(f"RACKLESS_ATTEMPT_DIR: {folder} does not exist\n")
        return EXIT_USER_ERROR
    # Before anything else: any failure from here on must be in the log.
    redirect_output(folder / rank_log(rank))
    foreign_code.install()
    control = RankControl(folder, rank)
    control.listen()
    journal = RankJournal(folder / rank_journal(rank))
    heartbeat = Heartbeat(folder / rank_heartbeat(rank))
    owner = watch_owner(folder)
    try:
        return _run(folder, rank, journal, heartbeat, control)
    finally:
        if owner is not None:
            owner.close()
        heartbeat.close()
        journal.close()
        sys.stdout.flush()
        sys.stderr.flush()


def _run(
    folder: Path, rank: int, journal: RankJournal, heartbeat: Heartbeat, control: RankControl
) -> int:
    try:
        journal.write("phase", phase="loading")
        attempt = open_parts(read_attempt(folder, rank, int(os.environ.get("WORLD_SIZE", "1"))))
        _log_identity(attempt)
        model_hash = start_reading(attempt)
        _configure_torch(attempt.compiled_folder)
        times, started_s = StartTimes(attempt.compiled_folder), time.monotonic()
        if (expected_s := times.recall("imports")) is not None:
            journal.write("phase", phase="loading", expected_s=expected_s)
        with imports_that_stay():
            from agents.trainer.run import run_rank  # imports torch, transformers and peft, too
        times.remember(time.monotonic() - started_s, "imports")
        journal.write("phase", phase="imported")
        run_rank(attempt, journal, heartbeat, control, model_hash)
        _log("finished normally")
    except ExpectedError as error:
        sys.stderr.write(format_trace(error))
        cause = "diverged" if isinstance(error, Diverged) else "error"
        journal.write("failed", message=error.message, hint=error.hint, cause=cause)
        return EXIT_USER_ERROR
    except Exception as error:  # noqa: BLE001 - the last edge: log and journal get it
        sys.stderr.write(format_trace(error))
        journal.write(
            "failed",
            message=hide_secrets(f"The trainer failed with {type(error).__name__}: {error}"),
            hint="This is a bug: please report it with the log of this rank",
        )
        return EXIT_FAULT
    return 0


def _log_identity(attempt: RankAttempt) -> None:
    """Start the log with the facts that its readers need first."""
    intent, place = attempt.intent, attempt.placement
    _log(
        f"rank {attempt.rank} of {len(intent.ranks)} of run {intent.run_id}, attempt "
        f"{intent.attempt}, on {place.device} of {place.node}, process {os.getpid()}"
    )
    names = ("torch", "transformers", "peft")
    versions = ", ".join(f"{name} {_find_version(name)}" for name in names)
    _log(f"Python {platform.python_version()}, {versions}; Linux {platform.release()}")
    if left_out := os.environ.get(LEFT_OUT):
        _log(f"left out of the login's variables: {left_out}")


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown version)"


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop the run
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def _configure_torch(compiled_folder: Path) -> None:
    """Set variables that torch reads when it is imported; those set by the user are kept.

    Compiled code is kept on the node for the next start.
    """
    workers = min(_MAX_COMPILERS, count_cpus())
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(compiled_folder / "inductor"),
        "TRITON_CACHE_DIR": str(compiled_folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(workers),
    }
    # Segments that grow leave fewer gaps in GPU memory, but the driver under WSL2 does not support
    # them.
    if "microsoft" not in platform.release().lower():
        settings["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    # Everything is written. The teardown of the libraries is skipped, since a crash in it would
    # turn a finished run into a failure.
    os._exit(main())
