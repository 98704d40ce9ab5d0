"""Store of runs, their attempts and their events.

Two processes may change one run at once, so each change is a function from the current row to the
new row, applied inside one write transaction.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from agents.contract.key import MAX_COUNT
from agents.contract.messages import WireError, from_wire, to_wire
from agents.contract.run import RankPlacement
from agents.contract.spec import RunSpec, refuse_pattern, run_keys
from app.events import RunEvent, RunState
from app.storage.database import Database

_COLUMNS = (
    "run_id, name, state, spec, attempt, nodes, message, hint, created_s, started_s, ended_s, "
    "stop_asked, progress, last_stop"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredProgress:
    """Progress of a run, stored so that a list of runs needs no journals."""

    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    first_loss: float | None = None
    newest_checkpoint_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LastStop:
    """Newest stop of a run by the user, kept so that a launch in progress finds it."""

    number: int = 0
    """Number of stops so far, which orders stops and launches without a clock."""
    time_s: float | None = None
    """Time of the newest one, in seconds since the epoch; None: never stopped."""
    by: str = ""
    """Process that stopped it, such as `rackless runs stop (process 4711)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    run_id: str
    name: str
    state: RunState
    spec: RunSpec
    attempt: int
    nodes: tuple[str, ...]
    """Nodes of the newest attempt, in the order of ranks."""
    message: str = ""
    hint: str = ""
    created_s: float
    started_s: float | None = None
    ended_s: float | None = None
    stop_asked: bool = False
    """True if the user has stopped it; stored so that a new master continues the stop."""
    progress: StoredProgress = field(default_factory=StoredProgress)
    last_stop: LastStop = field(default_factory=LastStop)


Taken = Literal["", "here", "away"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    run_id: str
    attempt: int
    placements: tuple[RankPlacement, ...]
    resume_step: int | None = None
    launched_s: float
    inputs: dict[str, Any] = field(default_factory=dict)
    """Plain form of the sources of model and data at the launch."""
    taken: Taken = ""
    """Master that took it over: this one (`here`) or another (`away`); empty: not taken over."""
    is_signed: bool = False
    """True if its master has signed a mandate; False: an earlier version launched it."""

    @property
    def is_ours(self) -> bool:
        """True if this master resumes it, since it launched it or took it over."""
        return self.taken == "here" or (bool(self.inputs) and self.taken != "away")


class RunStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    # ------------------------------------------------------------ runs

    def all(self) -> tuple[RunRecord, ...]:
        """Return every run, newest first."""
        rows = self._database.read(f"SELECT {_COLUMNS} FROM runs ORDER BY created_s DESC")
        return tuple(_run_of(row) for row in rows)

    def get(self, run_id: str) -> RunRecord | None:
        rows = self._database.read(f"SELECT {_COLUMNS} FROM runs WHERE run_id = ?", (run_id,))
        return _run_of(rows[0]) if rows else None

    def in_states(self, states: Collection[RunState]) -> tuple[str, ...]:
        """Return the ids of the runs in one of `states`, newest first."""
        marks = ", ".join("?" * len(states))
        rows = self._database.read(
            f"SELECT run_id FROM runs WHERE state IN ({marks}) ORDER BY created_s DESC",
            tuple(states),
        )
        return tuple(row[0] for row in rows)

    def add(self, run: RunRecord) -> bool:
        """Insert a run; return False if it is known already or was deleted."""
        # A node that was off when its run was deleted still reports it, but it must stay deleted.
        with self._database.write() as connection:
            gone = connection.execute("SELECT 1 FROM deleted_runs WHERE run_id = ?", (run.run_id,))
            if gone.fetchone():
                return False
            cursor = connection.execute(
                f"INSERT OR IGNORE INTO runs ({_COLUMNS}) VALUES ({', '.join('?' * 14)})",
                _row_of(run),
            )
            # OR IGNORE does not raise for a known id; the row count is 0 then.
            return cursor.rowcount == 1

    def change(
        self, run_id: str, change: Callable[[RunRecord], RunRecord | None]
    ) -> RunRecord | None:
        """Replace a run by `change(run)`; return the new value, or None if nothing changed.

        `change` gets the current row inside the transaction, and returns None to keep it.
        """
        with self._database.write() as connection:
            row = connection.execute(
                f"SELECT {_COLUMNS} FROM runs WHERE run_id = ?", (run_id,)
            ).fetchone()
            old = _run_of(row) if row else None
            new = change(old) if old else None
            # No write without a change, since each write makes other processes reload all runs.
            if new is None or new == old:
                return None
            marks = ", ".join(f"{name} = ?" for name in _COLUMNS.split(", "))
            connection.execute(f"UPDATE runs SET {marks} WHERE run_id = ?", (*_row_of(new), run_id))
            return new

    def delete(self, run_id: str) -> None:
        """Delete a run and store its id, for nodes that return later and report it."""
        with self._database.write() as connection:
            connection.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))
            connection.execute(
                "INSERT OR REPLACE INTO deleted_runs VALUES (?, ?)", (run_id, time.time())
            )

    def discard(self, run_id: str) -> None:
        """Delete a run that never reached a node."""
        with self._database.write() as connection:
            connection.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))

    def is_deleted(self, run_id: str) -> bool:
        return bool(self._database.read("SELECT 1 FROM deleted_runs WHERE run_id = ?", (run_id,)))

    # ------------------------------------------------------------ attempts

    def save_attempt(self, attempt: AttemptRecord) -> None:
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    attempt.run_id,
                    attempt.attempt,
                    json.dumps(to_wire(attempt.placements)),
                    attempt.resume_step,
                    attempt.launched_s,
                    json.dumps(attempt.inputs),
                    attempt.taken,
                    int(attempt.is_signed),
                ),
            )

    def attempts(self, run_id: str) -> tuple[AttemptRecord, ...]:
        """Return the attempts of a run, oldest first."""
        rows = self._database.read(
            "SELECT run_id, attempt, placements, resume_step, launched_s, inputs, taken, is_signed "
            "FROM attempts WHERE run_id = ? ORDER BY attempt",
            (run_id,),
        )
        return tuple(_attempt_of(row) for row in rows)

    # ------------------------------------------------------------ runs that nodes listed

    def trust(self, run_id: str, key: str) -> None:
        """Remember that the user, or a signature of this home, vouches for a listed run.

        Args:
            run_id: id of the run.
            key: public key of its master, whose later attempts are followed; empty: unknown.
        """
        with self._database.write() as connection:
            connection.execute("INSERT OR REPLACE INTO trusted_runs VALUES (?, ?)", (run_id, key))

    def trusted_key(self, run_id: str) -> str | None:
        """Return the key given to `trust`, or None if the run was never trusted."""
        rows = self._database.read("SELECT key FROM trusted_runs WHERE run_id = ?", (run_id,))
        return str(rows[0][0]) if rows else None

    def ignore(self, run_id: str, node: str) -> None:
        """Remember that the user does not want to see this run of a node again."""
        with self._database.write() as connection:
            connection.execute("INSERT OR REPLACE INTO ignored_runs VALUES (?, ?)", (run_id, node))

    def ignored(self) -> frozenset[tuple[str, str]]:
        """Return run and node of all ignored runs."""
        return frozenset(self._database.read("SELECT run_id, node FROM ignored_runs"))

    # ------------------------------------------------------------ events

    def add_event(self, event: RunEvent) -> int:
        """Store an event; return its number, which rises with each event of any run."""
        with self._database.write() as connection:
            stored = connection.execute(
                "INSERT INTO run_events (run_id, time_s, severity, text) VALUES (?, ?, ?, ?)",
                (event.run_id, event.time_s, event.severity, event.text),
            )
            return int(stored.lastrowid or 0)

    def events(self, run_id: str) -> tuple[RunEvent, ...]:
        rows = self._database.read(
            "SELECT run_id, time_s, severity, text FROM run_events WHERE run_id = ? ORDER BY id",
            (run_id,),
        )
        return tuple(RunEvent(run_id=r, time_s=t, severity=s, text=x) for r, t, s, x in rows)

    def events_after(self, number: int) -> tuple[tuple[int, RunEvent], ...]:
        """Return the events of all runs with higher numbers, and these numbers."""
        rows = self._database.read(
            "SELECT id, run_id, time_s, severity, text FROM run_events WHERE id > ? ORDER BY id",
            (number,),
        )
        return tuple(
            (n, RunEvent(run_id=r, time_s=t, severity=s, text=x)) for n, r, t, s, x in rows
        )

    def last_event(self) -> int:
        """Return the number of the newest event of any run; 0 if there was none."""
        return int(self._database.read("SELECT COALESCE(MAX(id), 0) FROM run_events")[0][0])

    # ------------------------------------------------------------ facts of the whole store

    def must_search_nodes(self) -> bool:
        """Return whether nodes may hold runs that this store has lost."""
        return bool(self._database.read("SELECT 1 FROM facts WHERE key = 'search_nodes'"))

    def set_search_nodes(self, wanted: bool) -> None:
        with self._database.write() as connection:
            if wanted:
                connection.execute("INSERT OR REPLACE INTO facts VALUES ('search_nodes', '1')")
            else:
                connection.execute("DELETE FROM facts WHERE key = 'search_nodes'")


def _row_of(run: RunRecord) -> tuple[Any, ...]:
    return (  # in the order of _COLUMNS
        run.run_id,
        run.name,
        run.state,
        json.dumps(to_wire(run.spec)),
        run.attempt,
        json.dumps(run.nodes),
        run.message,
        run.hint,
        run.created_s,
        run.started_s,
        run.ended_s,
        int(run.stop_asked),
        json.dumps(to_wire(run.progress)),
        json.dumps(to_wire(run.last_stop)),
    )


def _run_of(row: tuple[Any, ...]) -> RunRecord:
    return RunRecord(
        run_id=row[0],
        name=row[1],
        state=cast(RunState, row[2]),
        spec=_spec_of(json.loads(row[3])),
        attempt=row[4],
        nodes=tuple(json.loads(row[5])),
        message=row[6],
        hint=row[7],
        created_s=row[8],
        started_s=row[9],
        ended_s=row[10],
        stop_asked=bool(row[11]),
        progress=from_wire(StoredProgress, json.loads(row[12])),
        last_stop=from_wire(LastStop, json.loads(row[13])),
    )


def _spec_of(plain: dict[str, Any]) -> RunSpec:
    """Return a stored spec, or the nearest valid one if it violates a newer rule."""
    try:
        return from_wire(RunSpec, plain)
    except WireError:
        # Some rules are newer than released versions: upper limits of numbers, no fp64 with QLoRA,
        # limited patterns, distinct nodes. An error here would hide the run from every list.
        nearest = cast(dict[str, Any], _limit(plain))
        adapter = nearest.get("adapter") or {}
        if adapter.get("kind") == "qlora" and nearest.get("precision") == "fp64":
            nearest["precision"] = "fp32"
        targets = adapter.get("targets")
        if isinstance(targets, str) and refuse_pattern(targets):
            adapter["targets"] = "all-linear"
        for section, key in ((nearest, "nodes"), (adapter, "targets")):
            if isinstance(section.get(key), list):
                section[key] = list(dict.fromkeys(section[key]))
        return from_wire(RunSpec, nearest)


def _limit(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        # NaN is dropped (it differs from itself), so that the key takes its default.
        return {
            name: _limit(inner, f"{key}.{name}" if key else name)
            for name, inner in value.items()
            if inner == inner
        }
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    maximum = run_keys()[key].about.maximum if key in run_keys() else None
    return min(value, MAX_COUNT if maximum is None else maximum)


def _placements_of(plain: list[Any]) -> tuple[RankPlacement, ...]:
    """Return stored placements; empty if they are invalid."""
    try:
        return tuple(from_wire(RankPlacement, item) for item in plain)
    except WireError:
        return ()  # a malicious node made an older version store them


def _attempt_of(row: tuple[Any, ...]) -> AttemptRecord:
    return AttemptRecord(
        run_id=row[0],
        attempt=row[1],
        placements=_placements_of(json.loads(row[2])),
        resume_step=row[3],
        launched_s=row[4],
        inputs=json.loads(row[5]),
        taken=cast(Taken, row[6]),
        is_signed=bool(row[7]),
    )
