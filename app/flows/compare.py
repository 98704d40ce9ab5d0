"""Differences between runs in settings and results, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.contract.messages import to_wire
from agents.contract.spec import run_keys
from app.events import RunSnapshot
from app.text import DASH, show_duration, show_loss, show_rate

MOST_RUNS = 8
"""Maximum number of runs whose curves stay distinguishable in one chart."""
# Settings that do not change what is trained.
_UNSAID = frozenset({"name", "version"})


@dataclass(frozen=True, slots=True)
class CompareRow:
    """One setting or result, with its value in each run."""

    label: str
    values: tuple[str, ...]


def list_differences(runs: Sequence[RunSnapshot]) -> list[CompareRow]:
    """Return the settings in which the runs differ, in the order of a run file.

    >>> list_differences([])
    []
    """
    flat = [dict(_flatten(to_wire(run.spec))) for run in runs]
    # Of all runs: an older one may lack settings. A dict keeps their order, a set would not.
    keys = dict.fromkeys(key for one in flat for key in one)
    rows, known = [], run_keys()
    for key in keys:
        values = tuple(_show(one.get(key)) for one in flat)
        if len(set(values)) > 1 and key not in _UNSAID:
            rows.append(CompareRow(known[key].about.label if key in known else key, values))
    return rows


def list_results(runs: Sequence[RunSnapshot]) -> list[CompareRow]:
    """Return the results of each run."""
    readings = (
        ("State", lambda run: run.state),
        ("Steps", _steps),
        ("Loss", lambda run: show_loss(run.loss)),
        ("Evaluation loss", lambda run: show_loss(run.evaluation_loss)),
        ("Throughput", lambda run: show_rate(run.tokens_per_s)),
        ("Duration", _duration),
    )
    return [CompareRow(label, tuple(read(run) for run in runs)) for label, read in readings]


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flatten(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _show(value: Any) -> str:
    # On the wire tuples are lists.
    if value is None or value == []:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _steps(run: RunSnapshot) -> str:
    if run.step is None:
        return DASH
    return f"{run.step:,} / {run.total_steps:,}" if run.total_steps else f"{run.step:,}"


def _duration(run: RunSnapshot) -> str:
    if run.started_s is None or run.ended_s is None:
        return DASH
    return show_duration(run.ended_s - run.started_s)
