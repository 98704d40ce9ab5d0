"""Find the mirrored logs of a run's ranks.

Only plain files count: a link would show another file, and reading a pipe would never end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agents.contract.run_layout import ATTEMPTS, LOG_SUFFIX, attempt_of_folder, rank_of_log
from agents.shared.files.logcap import read_pieces
from app.paths import Paths, leads_through_link


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFile:
    """Mirrored log of one rank."""

    rank: int
    node: str
    attempt: int
    path: Path

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of the whole log; a very long log has a hole in the middle.

        Raises:
            OSError: the file cannot be read.
        """
        return read_pieces(self.path)


def find_logs(
    paths: Paths, run_id: str, rank: int | None = None, attempt: int | None = None
) -> tuple[LogFile, ...]:
    """Return the logs of a run, oldest attempt first; None for `rank` or `attempt` selects all."""
    found: list[LogFile] = []
    if paths.run(run_id).is_symlink():
        return ()
    for path in paths.run(run_id).glob(f"{ATTEMPTS}/*/*/*{LOG_SUFFIX}"):
        of_rank, number = rank_of_log(path.name), attempt_of_folder(path.parts[-3])
        if of_rank is not None and number is not None:
            file = LogFile(rank=of_rank, node=path.parts[-2], attempt=number, path=path)
            is_wanted = rank in (None, file.rank) and attempt in (None, file.attempt)
            if is_wanted and path.is_file() and not leads_through_link(path, paths.runs):
                found.append(file)
    return tuple(sorted(found, key=lambda file: (file.attempt, file.rank, file.node)))
