"""Store what the next plan needs from checks, previews and finished runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

from agents.contract.data import DataPreview
from agents.contract.messages import WireError, from_wire, to_wire
from agents.contract.spec import RunSpec
from app.errors import UserError
from app.library.data_key import make_data_key
from app.planning.accuracy import forecast_accuracy
from app.planning.accuracy.learning import Corrections
from app.planning.accuracy.misses import PastForecast
from app.planning.memory.forecast import MemorySetting, estimate_memory
from app.planning.memory.gpu import GpuMemory
from app.planning.shape.model_shape import ModelShape, read_shape
from app.runs.journals.attempt_history import AttemptHistory, RankHistory
from app.runs.services import Services
from app.storage.planning import CountedData, LinkRecord, PlanningStore
from app.storage.runs import RunRecord


class MeasuredLink(Protocol):
    """Row of a check's report, which may describe a link between two nodes."""

    @property
    def node(self) -> str: ...
    @property
    def peer(self) -> str | None: ...
    @property
    def round_trip_s(self) -> float | None: ...
    @property
    def bytes_per_s(self) -> float | None: ...


def store_links(store: PlanningStore, rows: Sequence[MeasuredLink]) -> None:
    """Store the links between nodes that a check measured."""
    now_s = time.time()
    links = [
        LinkRecord(
            node=row.node,
            peer=row.peer,
            round_trip_s=row.round_trip_s,
            bytes_per_s=row.bytes_per_s,
            measured_s=now_s,
        )
        for row in rows
        # Other rows describe a node itself, or a link that could not be measured.
        if row.peer is not None and row.peer != row.node and row.round_trip_s is not None
    ]
    if links:
        store.save_links(links)


def store_counted(store: PlanningStore, spec: RunSpec, data: DataPreview) -> None:
    """Store the size of a run's data if all of it has been tokenized."""
    if data.whole and data.num_examples > 0:
        counted = CountedData(
            num_rows=data.num_in_epoch,
            num_tokens=data.num_tokens_in_epoch,
            longest_tokens=data.longest_tokens,
        )
        store.save_counted(make_data_key(spec), counted)


def load_corrections(store: PlanningStore) -> Corrections:
    """Return the corrections learned from past runs."""
    return Corrections(outcomes=store.outcomes())


def load_past(store: PlanningStore) -> list[PastForecast]:
    """Return the newest forecasts with their measurements, newest first."""
    found = []
    for run_id, planned, seen in store.past_forecasts():
        with contextlib.suppress(WireError):  # written by another version
            forecast, measured = (
                from_wire(forecast_accuracy.Forecast, planned),
                from_wire(forecast_accuracy.Measured, seen),
            )
            found.append(PastForecast(run_id=run_id, forecast=forecast, measured=measured))
    return found


def compare_run(services: Services, run: RunRecord) -> forecast_accuracy.ForecastComparison | None:
    """Return forecast and measurement of a run's newest attempt; None without a forecast."""
    plain, measured = services.planning.forecast(run.run_id, run.attempt)
    if not plain:
        return None
    try:
        forecast = from_wire(forecast_accuracy.Forecast, plain)
        seen = from_wire(forecast_accuracy.Measured, measured) if measured else None
    except WireError:  # written by another version
        return None
    # The stored measurement serves runs whose journals are gone.
    return forecast_accuracy.ForecastComparison(
        forecast=forecast, measured=measure_run(services, run) or seen
    )


def measure_run(services: Services, run: RunRecord) -> forecast_accuracy.Measured | None:
    """Return the measurements of a run's newest attempt.

    None: it has no step yet, or it lost ranks.
    """
    attempt = services.runs.history(run.run_id).attempt(run.attempt)
    if not attempt.steps or attempt.lost_ranks:
        return None  # with fewer ranks some steps differ from the forecast's
    ranks = [attempt.ranks.get(place.rank) for place in services.runs.placements(run)]
    waits = [
        forecast_accuracy.median_of([pace.wait_s for pace in rank.paces]) for rank in ranks if rank
    ]
    known = [wait for wait in waits if wait is not None]
    # Only an attempt that trained all steps has a total time comparable with the forecast.
    ended = run.state == "done" and attempt.first_step == 0 and run.ended_s and run.started_s
    return forecast_accuracy.Measured(
        num_steps=len(attempt.steps),
        ranks=tuple(_measure_rank(rank) for rank in ranks),
        step_s=_median_step(attempt, "step_s"),
        # The shortest wait is for the network only; other ranks also wait for slower ones.
        network_s=min(known) if len(known) == len(ranks) > 1 else None,
        tokens_per_s=_median_step(attempt, "tokens_per_s"),
        total_s=(run.ended_s or 0.0) - (run.started_s or 0.0) if ended else None,
    )


def _measure_rank(rank: RankHistory | None) -> forecast_accuracy.RankMeasured:
    if rank is None:
        return forecast_accuracy.RankMeasured()
    # By compute time only, since a step also contains the wait for slower ranks.
    rates = [pace.tokens / pace.compute_s for pace in rank.paces if pace.compute_s > 0]
    used = rank.setting
    return forecast_accuracy.RankMeasured(
        tokens_per_s=forecast_accuracy.median_of(rates),
        setting=MemorySetting(
            micro_tokens=used.micro_tokens,
            num_recomputed=used.num_recomputed,
            num_moved=used.num_moved,
        )
        if used is not None
        else None,
        memory_bytes=rank.memory_bytes,
        reserved_bytes=rank.memory_reserved_bytes,
    )


def _median_step(attempt: AttemptHistory, name: str) -> float | None:
    values = [getattr(record, name) for record in attempt.recent]
    return forecast_accuracy.median_of([value for value in values if value is not None])


def learn_from_run(services: Services, run: RunRecord) -> None:
    """Store the measurements of an attempt that has ended, and the outcomes to learn from."""
    store = services.planning
    data = services.runs.history(run.run_id).data
    if data is not None:
        store_counted(store, run.spec, data)
    comparison = compare_run(services, run)
    if comparison is None or comparison.measured is None:
        return
    forecast, measured = comparison.forecast, comparison.measured
    # Stored even if the shape is unknown, for comparisons after the journals are gone.
    store.save_measured(run.run_id, run.attempt, to_wire(measured))
    shape = _shape_of(services, run.spec)
    if shape is None:
        return

    def estimate(gpu: GpuMemory, setting: MemorySetting) -> int:
        """Return torch's peak memory by the formulas, without corrections."""
        memory = estimate_memory(
            shape,
            run.spec,
            setting=setting,
            longest_tokens=forecast.longest_tokens,
            gpu=gpu,
            ranks=len(forecast.ranks),
        )
        return memory.allocated_bytes

    outcomes = forecast_accuracy.learn(forecast, measured, run.ended_s or time.time(), estimate)
    store.save_outcomes(run.run_id, run.attempt, outcomes)


def _shape_of(services: Services, spec: RunSpec) -> ModelShape | None:
    with contextlib.suppress(UserError):
        found = services.configs.find_here(spec.model)
        return read_shape(found.config) if found is not None else None
    return None
