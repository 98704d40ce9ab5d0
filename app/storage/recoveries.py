"""Store of the losses of runs and their outcomes.

A pending loss is the permission to resume its run automatically. Stopping or resuming the run
withdraws it in one transaction, which ends a recovery in progress.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, cast

from app.interruption import InterruptionState
from app.storage.database import Database


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """End of an attempt that failed."""

    run_id: str
    attempt: int
    cause: str
    """Cause of the end: an `app.runs.run.EndCause`."""
    step: int
    """Newest step that the run had finished; 0: no step."""
    ended_s: float
    """Time at which the end was noticed, in seconds since the epoch."""
    state: InterruptionState
    resumed_s: float | None = None
    """Time at which the run was launched again, in seconds since the epoch."""
    resumed_attempt: int | None = None
    reason: str = ""
    """Cause of the end as a sentence; empty: recorded by an older version."""


_COLUMNS = "run_id, attempt, cause, step, ended_s, state, resumed_s, resumed_attempt, reason"


class RecoveryStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, loss: Loss, stops: int) -> bool:
        """Store a loss; return False if its attempt has one already.

        Args:
            loss: loss to store; it is not pending if the user has stopped the run meanwhile.
            stops: number of stops by the user when the run was judged.
        """
        with self._database.write() as connection:
            (newest,) = connection.execute(
                "SELECT last_stop FROM runs WHERE run_id = ?", (loss.run_id,)
            ).fetchone() or ("{}",)
            if json.loads(newest).get("number", 0) > stops:
                loss = replace(loss, state="left")
            cursor = connection.execute(
                f"INSERT OR IGNORE INTO recoveries ({_COLUMNS}) "
                "VALUES (?, ?, ?, ?, ?, ?, NULL, NULL, ?)",
                (
                    *(loss.run_id, loss.attempt, loss.cause, loss.step, loss.ended_s),
                    *(loss.state, loss.reason),
                ),
            )
            return cursor.rowcount == 1

    def put(self, loss: Loss) -> None:
        """Store a loss, replacing that of its attempt."""
        self._change(
            f"INSERT OR REPLACE INTO recoveries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(loss.run_id, loss.attempt, loss.cause, loss.step, loss.ended_s),
                *(loss.state, loss.resumed_s, loss.resumed_attempt, loss.reason),
            ),
        )

    def of_run(self, run_id: str) -> tuple[Loss, ...]:
        """Return the losses of a run since the user last stopped or resumed it, oldest first."""
        losses = self.all_of_run(run_id)
        ended = [i for i, loss in enumerate(losses) if loss.state in ("cancelled", "replaced")]
        return losses[ended[-1] + 1 :] if ended else losses

    def all_of_run(self, run_id: str) -> tuple[Loss, ...]:
        """Return all losses of a run, oldest first."""
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM recoveries WHERE run_id = ? ORDER BY attempt", (run_id,)
        )
        return tuple(_loss_of(row) for row in rows)

    def pending(self) -> tuple[str, ...]:
        """Return the ids of the runs with a pending automatic resume."""
        rows = self._database.read(
            "SELECT DISTINCT run_id FROM recoveries WHERE state = 'pending' ORDER BY run_id"
        )
        return tuple(row[0] for row in rows)

    def is_pending(self, run_id: str) -> bool:
        """Return whether the run has a pending automatic resume."""
        sql = "SELECT 1 FROM recoveries WHERE run_id = ? AND state = 'pending'"
        return bool(self._database.read(sql, (run_id,)))

    def close(self, run_id: str, state: InterruptionState) -> bool:
        """Move the run's pending loss to `state`; return whether there was one."""
        # Read first, since each write makes other processes reload all runs.
        return self.is_pending(run_id) and self._change(
            "UPDATE recoveries SET state = ? WHERE run_id = ? AND state = 'pending'",
            (state, run_id),
        )

    def withdraw(self, run_id: str) -> None:
        """Remove the run's pending loss, which did not happen."""
        self._change("DELETE FROM recoveries WHERE run_id = ? AND state = 'pending'", (run_id,))

    def forget_earlier(self, run_id: str, state: InterruptionState) -> None:
        """Move the run's newest loss to `state`, so that it and earlier ones no longer count."""
        if self.of_run(run_id):
            self._change(
                "UPDATE recoveries SET state = ? WHERE run_id = ? AND attempt = "
                "(SELECT max(attempt) FROM recoveries WHERE run_id = ?)",
                (state, run_id, run_id),
            )

    def mark_resumed(self, run_id: str, attempt: int, resumed_s: float) -> bool:
        """Record that the pending loss led to `attempt`; return whether it was pending."""
        return self._change(
            "UPDATE recoveries SET state = 'resumed', resumed_s = ?, resumed_attempt = ? "
            "WHERE run_id = ? AND state = 'pending'",
            (resumed_s, attempt, run_id),
        )

    def mark_recovered(self, run_id: str, attempt: int) -> bool:
        """Record that `attempt` trains; return True in the one process that recorded it."""
        # Window and command both see the step, but only one changes the row and reports it.
        return self._change(
            "UPDATE recoveries SET state = 'recovered' "
            "WHERE run_id = ? AND resumed_attempt = ? AND state = 'resumed'",
            (run_id, attempt),
        )

    def _change(self, sql: str, args: tuple[Any, ...]) -> bool:
        with self._database.write() as connection:
            return connection.execute(sql, args).rowcount > 0


def _loss_of(row: tuple[Any, ...]) -> Loss:
    return Loss(
        run_id=row[0],
        attempt=row[1],
        cause=row[2],
        step=row[3],
        ended_s=row[4],
        state=cast(InterruptionState, row[5]),
        resumed_s=row[6],
        resumed_attempt=row[7],
        reason=row[8],
    )
