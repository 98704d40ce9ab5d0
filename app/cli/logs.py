"""`rackless runs logs`: output of the ranks, from the mirrored logs, which are synced first."""

from __future__ import annotations

import asyncio

from agents.contract.run_layout import rank_of_log
from app.cli.kit.output import Output
from app.cli.kit.watching import while_read
from app.core.action import CoreApi
from app.core.runs import FindLogs, RefreshRun, SyncRun, WatchRun
from app.errors import UserError
from app.events import Event, LogArrived
from app.runs.journals.logs import LogFile
from app.text import show_list


async def print_logs(
    core: CoreApi, run_id: str, rank: int | None, attempt: int | None, out: Output
) -> int:
    """Print the mirrored output of an attempt (None: of all attempts, the newest last)."""
    await core.do(SyncRun(run_id=run_id))
    files = await _find_known(core, run_id, rank, attempt)
    document = []
    for file in files:
        # Decoded as a whole: a character may be cut at the edge of a piece.
        data = b"".join(piece for _, piece in file.pieces())
        document.append(
            {
                "rank": file.rank,
                "node": file.node,
                "attempt": file.attempt,
                "text": data.decode("utf-8", "replace"),
            }
        )
        if len(files) > 1:
            out.text(f"==> rank {file.rank} on {file.node}, attempt {file.attempt} <==")
        out.raw(data)
    out.document(document)
    return 0


async def follow_logs(core: CoreApi, run_id: str, rank: int | None, out: Output) -> int:
    """Print all mirrored output, then new output as it arrives, until the run ends."""
    run = await core.do(RefreshRun(run_id=run_id))
    printed: dict[tuple[int, str], int] = {}

    def show(attempt: int, stream: str, offset: int, data: bytes) -> None:
        of_rank = rank_of_log(stream)
        key = (attempt, stream)
        done = printed.get(key, 0)
        if of_rank is None or rank not in (None, of_rank) or offset + len(data) <= done:
            return
        # Pieces of file and events overlap; only the unseen rest is printed.
        data = data[max(0, done - offset) :]
        printed[key] = max(done, offset) + len(data)
        text = data.decode("utf-8", "replace")
        out.line({"rank": of_rank, "attempt": attempt, "offset": offset, "text": text})
        out.raw(data)

    def take(event: Event) -> None:
        if isinstance(event, LogArrived) and event.run_id == run.run_id:
            show(event.attempt, event.stream, event.offset, event.data)

    await core.do(SyncRun(run_id=run.run_id))
    for file in await core.do(FindLogs(run_id=run.run_id, rank=rank, attempt=run.attempt)):
        for offset, data in await asyncio.to_thread(list, file.pieces()):
            show(file.attempt, file.path.name, offset, data)
    # Bytes may be mirrored between the reading above and this subscription, so the files are
    # read again after the end; `printed` drops what was shown.
    with core.events.listening(while_read(take)):
        await core.do(WatchRun(run_id=run.run_id))
    for file in await core.do(FindLogs(run_id=run.run_id, rank=rank, attempt=run.attempt)):
        for offset, data in await asyncio.to_thread(list, file.pieces()):
            show(file.attempt, file.path.name, offset, data)
    return 0


async def _find_known(
    core: CoreApi, run_id: str, rank: int | None, attempt: int | None
) -> tuple[LogFile, ...]:
    files = await core.do(FindLogs(run_id=run_id, rank=rank, attempt=attempt))
    if files:
        return files
    of_attempt = await core.do(FindLogs(run_id=run_id, attempt=attempt))
    if attempt is not None and not of_attempt:
        numbers = sorted({file.attempt for file in await core.do(FindLogs(run_id=run_id))})
        raise UserError(
            f"there is no log of attempt {attempt} of run {run_id}",
            f"There are logs of attempt {show_list([str(n) for n in numbers])}."
            if numbers
            else "No attempt has written a log that could be fetched yet.",
            where=f"run {run_id}",
        )
    if rank is not None and of_attempt:
        ranks = sorted({file.rank for file in of_attempt})
        where = "" if attempt is None else f" in attempt {attempt}"
        raise UserError(
            f"run {run_id} has no rank {rank}{where}",
            f"The ranks are {', '.join(map(str, ranks))}.",
            where=f"run {run_id}",
        )
    return files
