"""Store of the inputs and results of plans: measurements, forecasts and outcomes.

An outcome stays when its run is deleted, since it describes the card and not the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agents.contract.messages import WireError, from_wire, to_wire
from agents.contract.node import Calibration
from app.planning.accuracy.learning import RunOutcome
from app.storage.database import Database

# Maximum number of outcomes that a plan learns from; reading them takes milliseconds.
MAX_OUTCOMES = 2000
# Maximum number of shown plans that are kept: the window shows one at every pause in typing.
MAX_PLANS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRecord:
    """Link from one node to another, measured by the last check."""

    node: str
    peer: str
    round_trip_s: float
    bytes_per_s: float | None
    measured_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedData:
    """Size of a run's data, counted while all of it was tokenized."""

    num_rows: int
    """Number of examples: rows, packs of rows, or pairs."""
    num_tokens: int
    longest_tokens: int


class PlanningStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    # ------------------------------------------------------------ measurements

    def calibrations(self) -> dict[tuple[str, str], Calibration]:
        """Return the newest measurement by node and device id."""
        rows = self._database.read("SELECT node, device_id, figures FROM calibrations")
        return {(n, d): from_wire(Calibration, json.loads(f)) for n, d, f in rows}

    def save_calibration(self, node: str, device_id: str, found: Calibration) -> None:
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO calibrations VALUES (?, ?, ?, ?)",
                (node, device_id, found.measured_s, json.dumps(to_wire(found))),
            )

    def links(self) -> tuple[LinkRecord, ...]:
        rows = self._database.read(
            "SELECT node, peer, round_trip_s, bytes_per_s, measured_s FROM links"
        )
        return tuple(
            LinkRecord(node=n, peer=p, round_trip_s=r, bytes_per_s=b, measured_s=m)
            for n, p, r, b, m in rows
        )

    def save_links(self, links: Sequence[LinkRecord]) -> None:
        with self._database.write() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO links (node, peer, round_trip_s, bytes_per_s, measured_s) "
                "VALUES (?, ?, ?, ?, ?)",
                [(x.node, x.peer, x.round_trip_s, x.bytes_per_s, x.measured_s) for x in links],
            )

    def forget_node(self, node: str) -> None:
        """Delete the measurements of a removed node."""
        with self._database.write() as connection:
            connection.execute("DELETE FROM calibrations WHERE node = ?", (node,))
            # Links are stored per direction, so the node may be at either end.
            connection.execute("DELETE FROM links WHERE node = ? OR peer = ?", (node, node))

    # ------------------------------------------------------------ data

    def counted(self, data_key: str) -> CountedData | None:
        rows = self._database.read(
            "SELECT num_rows, num_tokens, longest_tokens FROM data_sizes WHERE data_key = ?",
            (data_key,),
        )
        if not rows:
            return None
        num_rows, num_tokens, longest_tokens = rows[0]
        return CountedData(num_rows=num_rows, num_tokens=num_tokens, longest_tokens=longest_tokens)

    def save_counted(self, data_key: str, data: CountedData) -> None:
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO data_sizes VALUES (?, ?, ?, ?, ?)",
                (data_key, data.num_rows, data.num_tokens, data.longest_tokens, time.time()),
            )

    # ------------------------------------------------------------ plans

    def shown_plan(self, spec_key: str) -> dict[str, Any] | None:
        """Return the plain form of the plan last shown for these settings, or None."""
        rows = self._database.read("SELECT document FROM plans WHERE spec_key = ?", (spec_key,))
        found: dict[str, Any] | None = json.loads(rows[0][0]) if rows else None
        return found

    def save_shown_plan(self, spec_key: str, document: dict[str, Any]) -> None:
        """Store a plan that was shown; only the newest ones are kept."""
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO plans VALUES (?, ?, ?)",
                (spec_key, time.time(), json.dumps(document)),
            )
            connection.execute(
                "DELETE FROM plans WHERE spec_key NOT IN "
                "(SELECT spec_key FROM plans ORDER BY shown_s DESC LIMIT ?)",
                (MAX_PLANS,),
            )

    # ------------------------------------------------------------ forecasts

    def forecast(self, run_id: str, attempt: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the plain forms of an attempt's forecast and measurement; empty without one."""
        rows = self._database.read(
            "SELECT forecast, measured FROM forecasts WHERE run_id = ? AND attempt = ?",
            (run_id, attempt),
        )
        if not rows:
            return {}, None
        return json.loads(rows[0][0]), json.loads(rows[0][1]) if rows[0][1] else None

    def past_forecasts(self, limit: int = 20) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Return run id, forecast and measurement of the newest measured attempts, newest first."""
        rows = self._database.read(
            "SELECT run_id, forecast, measured FROM forecasts WHERE measured IS NOT NULL "
            "ORDER BY run_id DESC, attempt DESC LIMIT ?",  # ids sort by time
            (limit,),
        )
        return [(run_id, json.loads(planned), json.loads(seen)) for run_id, planned, seen in rows]

    def save_forecast(self, run_id: str, attempt: int, forecast: dict[str, Any]) -> None:
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO forecasts VALUES (?, ?, ?, NULL)",
                (run_id, attempt, json.dumps(forecast)),
            )

    def save_measured(self, run_id: str, attempt: int, measured: dict[str, Any]) -> None:
        with self._database.write() as connection:
            connection.execute(
                "UPDATE forecasts SET measured = ? WHERE run_id = ? AND attempt = ?",
                (json.dumps(measured), run_id, attempt),
            )

    # ------------------------------------------------------------ outcomes

    def outcomes(self) -> tuple[RunOutcome, ...]:
        """Return the outcomes of the newest runs; skip rows of another version."""
        rows = self._database.read(
            "SELECT outcome FROM outcomes ORDER BY ended_s DESC LIMIT ?", (MAX_OUTCOMES,)
        )
        found = []
        for (text,) in rows:
            try:
                found.append(from_wire(RunOutcome, json.loads(text)))
            except WireError:
                continue
        return tuple(found)

    def save_outcomes(self, run_id: str, attempt: int, outcomes: dict[int, RunOutcome]) -> None:
        """Store the outcome of each rank of an attempt."""
        with self._database.write() as connection:
            # REPLACE, since an attempt may be evaluated twice but must count once.
            connection.executemany(
                "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?)",
                [
                    (run_id, attempt, rank, outcome.ended_s, json.dumps(to_wire(outcome)))
                    for rank, outcome in outcomes.items()
                ],
            )
