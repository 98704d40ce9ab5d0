"""Run jobs on models: a job file in, progress out, and a complete folder or none.

Progress goes to the real stdout as JSON lines, the last of which may report a failure; output of
libraries goes to stderr. A result appears by one rename when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from agents.errors import ExpectedError, explain_os_error
from agents.node.files import remove_abandoned
from agents.quantizers.job.meter import Meter, Phase, read_start_s
from agents.shared.files.folder_files import list_own, open_regular
from agents.shared.files.full_disk import describe_full
from agents.shared.models.code_references import may_name_code, without_code
from agents.state import fsync_folder, sync_file, tells_full_disk

EXIT_USER_ERROR = 3
_COMPANIONS = (".json", ".jinja", ".model", ".txt")


class JobProgress:
    """Prints JSON lines to the process's original stdout.

    Args:
        out: the original stdout.
        since_s: start of the first phase, by the monotonic clock; None: its first line.
    """

    def __init__(self, out: TextIO, since_s: float | None = None) -> None:
        self._out = out
        self._since_s = since_s
        self._meter: Meter | None = None
        self._phase = ""

    def begin(self, phase: str, message: str, folder: Path | None = None) -> None:
        """Report the start of a phase, and measure it until the next one.

        Args:
            phase: name of the phase, equal in every job.
            message: sentence for the user.
            folder: folder of the result, at the first phase.
        """
        if self._meter is not None:
            self._meter.begin(phase)
        elif folder is not None:
            self._meter = Meter(folder, phase, self._since_s)
        self._phase = phase
        self.tell(message)

    def count(self, folder: Path) -> None:
        """Include another folder in the measured disk space."""
        if self._meter is not None:
            self._meter.count(folder)

    def look(self) -> None:
        """Measure now, at the peak of the disk space."""
        if self._meter is not None:
            self._meter.look()

    def end(self) -> list[Phase]:
        """Stop measuring and return the measured phases."""
        # Jobs call this for the card and again in `finally`; the second call does nothing.
        meter, self._meter = self._meter, None
        return meter.end() if meter is not None else []

    def tell(self, message: str, **fields: Any) -> None:
        self.say("progress", message=message, phase=self._phase, **fields)

    def fail(self, message: str, hint: str) -> None:
        self.say("failed", message=message, hint=hint)

    def say(self, kind: str, **fields: Any) -> None:
        """Print a line of another kind."""
        self._out.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._out.flush()


def run_job(argv: list[str], usage: str, work: Callable[[Path, JobProgress], None]) -> int:
    """Do the job named by `argv`, with only progress on stdout; return the exit code."""
    # Libraries print to descriptor 1, even from C, so it becomes stderr; progress gets a copy.
    progress = JobProgress(os.fdopen(os.dup(1), "w", encoding="ascii"), read_start_s())
    os.dup2(2, 1)
    try:
        if len(argv) != 1:
            raise ExpectedError("One job file is needed.", usage)
        work(Path(argv[0]), progress)
    except ExpectedError as error:
        progress.fail(error.message, error.hint)
        return EXIT_USER_ERROR
    return 0


def read_plain(path: Path, what: str) -> tuple[dict[str, Any], Path]:
    """Return a job file's content and the agent's home, where its relative paths start.

    Raises:
        ExpectedError: it is not a job file.
    """
    try:
        plain = json.loads(path.read_bytes())
        home = Path(plain.get("agent_home") or os.environ.get("RACKLESS_AGENT_HOME") or ".")
    except (OSError, ValueError, AttributeError) as error:
        raise ExpectedError(
            f"{path} is not a {what} job: {error!r}.", "Export the run again"
        ) from error
    return plain, home


def locate(home: Path, path: str) -> str:
    """Return a path below the agent's home as absolute; others unchanged: absolute, or a hub id."""
    below = home / path
    return str(below) if below.exists() else path


def copy_companions(model: Path, folder: Path, leave: Collection[str] = ()) -> None:
    """Copy the files that a model needs in addition to its weights; existing ones stay.

    Args:
        model: folder to copy from.
        folder: folder to copy to.
        leave: names that are not copied.
    """
    left = {*leave, *(path.name for path in folder.iterdir())}

    def is_wanted(name: str) -> bool:
        # An index lists the shards of the original, not those written here.
        is_index = name.endswith(".index.json")
        return Path(name).suffix in _COMPANIONS and name not in left and not is_index

    try:
        companions = list_own(model, is_wanted)
    except OSError as error:
        raise explain_os_error(error, f"looking through {model}") from error
    for path in companions:
        # "xb" fails on an existing file instead of replacing it.
        with open_regular(path, model) as source, (folder / path.name).open("xb") as target:
            shutil.copyfileobj(source, target)


def drop_code_references(folder: Path) -> None:
    """Remove references to code from the model in a folder."""
    for path in folder.rglob("*.json"):
        # A link leads to a file outside of the result.
        if not path.is_symlink() and may_name_code(path.name, path.stat().st_size):
            clean = without_code(path.read_bytes())
            if clean is not None:
                path.write_bytes(clean)


def partial_of(destination: Path) -> Path:
    """Return the folder in which this process makes `destination`."""
    return destination.with_name(f".partial-{destination.name}-{os.getpid()}")


@contextmanager
def appearing(destination: Path, what: str) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `destination`, or vanishes after an error.

    Raises:
        ExpectedError: the disk is full, memory ran out, or the place cannot be written.
    """
    partial = partial_of(destination)
    remove_abandoned(destination)
    try:
        partial.mkdir(mode=0o700, parents=True)
        yield partial
        _appear(partial, destination)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        shown = _explain(error, destination, what)
        if shown is error:
            raise
        raise shown from error


def _appear(partial: Path, destination: Path) -> None:
    drop_code_references(partial)
    # Synced before the rename, or a power cut could leave empty files.
    for path in partial.rglob("*"):
        if path.is_file():
            sync_file(path)
    fsync_folder(partial)
    old = None
    if destination.exists():
        old = destination.with_name(f".deleted-{destination.name}-{os.getpid()}")
        # A rename cannot replace a non-empty folder, so the old one moves away first.
        os.rename(destination, old)
    os.rename(partial, destination)
    fsync_folder(destination.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _explain(error: Exception, destination: Path, what: str) -> Exception:
    if tells_full_disk(error):
        lack, advice = describe_full(destination.parent)
        return ExpectedError(
            f"{lack}: {what} does not fit into {destination.parent}.",
            f"{advice} and export again; nothing half written was left",
        )
    # Any other error is a bug, whose traceback must be kept.
    if isinstance(error, ExpectedError) or not isinstance(error, (OSError, MemoryError)):
        return error
    if isinstance(error, MemoryError):
        return ExpectedError("The PC ran out of memory.", "Close other programs and export again")
    return explain_os_error(error, f"writing {destination}")
