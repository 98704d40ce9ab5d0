"""Show what came of faults: a paragraph for each, a table of all, and a file for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.cli.kit.output import aligned
from tests.faulty_nodes.fault import Verdict

HEAD = ("", "FAULT", "ROW", "STATUS", "FIX", "RE-TEST", "UNDO")
_MAX_CELL = 60


@dataclass(slots=True)
class Results:
    """What came of one run."""

    verdicts: list[Verdict] = field(default_factory=list)
    oddities: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rows that minded each."""
    clean: list[dict[str, Any]] = field(default_factory=list)
    """Duration, statuses and failed rows of each clean check."""
    left: list[tuple[str, str, str]] = field(default_factory=list)
    """Check, node and status of rows that still complained at the end."""

    @property
    def are_good(self) -> bool:
        is_clean = not self.left and not any(one["false"] for one in self.clean)
        is_borne = not any(self.oddities.values())
        return is_clean and is_borne and all(verdict.is_good for verdict in self.verdicts)


def describe(verdict: Verdict) -> str:
    """Return a paragraph: the fault, its row with the cause, the fix, the re-test and the undo."""
    fault, row, mended = verdict.fault, verdict.found, verdict.mended
    lines = [f"{_mark(verdict)} {verdict.seconds:5.1f} s  {fault.name}"]
    if row is None:
        lines.append(f"no row {fault.check} {fault.status} on {fault.node} says {fault.says!r}")
    else:
        lines.append(f"{_place(row)}: {row['status']}: {row['message']}")
        lines += [f"fix: {one}" for one in mended.commands or (row["fix"],)]
    lines += [f"played: {fault.played}"] if fault.played else []
    lines += [f"re-test: {mended.retest}"] if mended.retest else []
    lines += [f"undo: {mended.undo}"] if mended.undo else []
    lines += [f"also failed: {one}" for one in verdict.others]
    lines += [f"problem: {mended.problem}"] if mended.problem else []
    return "\n        ".join(lines)


def show_table(verdicts: Sequence[Verdict]) -> str:
    """Return a table with a line for each fault."""
    rows: list[tuple[str, ...]] = [HEAD]
    for verdict in verdicts:
        row, mended = verdict.found, verdict.mended
        commands = "; ".join(mended.commands) or (row["fix"] if row else "")
        cells = (_mark(verdict), verdict.fault.name, _place(row) if row else verdict.fault.check)
        status = row["status"] if row else "-"
        rows.append((*cells, status, *map(_cut, (commands, mended.retest, mended.undo or "-"))))
    return "\n".join(aligned(rows))


def summarise(results: Results) -> str:
    """Return the counts of faults, oddities and clean checks, each on a line."""
    good = sum(verdict.is_good for verdict in results.verdicts)
    repaired = [verdict.fault for verdict in results.verdicts if verdict.fault.repair]
    borne = sum(not changed for changed in results.oddities.values())
    false = sum(len(one["false"]) for one in results.clean)
    longest = max((one["seconds"] for one in results.clean), default=0.0)
    return "\n".join(
        (
            f"{good} of {len(results.verdicts)} faults as they have to be, "
            f"{len(repaired)} with a repair",
            f"{borne} of {len(results.oddities)} oddities without a complaint",
            f"{len(results.clean)} clean checks: {false} false failures, at most {longest:.1f} s",
            f"left behind: {results.left or 'nothing'}",
        )
    )


def write_report(path: Path, results: Results) -> None:
    """Write all results as JSON."""
    faults = [
        {
            "fault": verdict.fault.name,
            "good": verdict.is_good,
            "seconds": round(verdict.seconds, 2),
            "row": verdict.found,
            "also_failed": verdict.others,
            "played": verdict.fault.played,
            "commands": verdict.mended.commands,
            "retest": verdict.mended.retest,
            "undo": verdict.mended.undo,
            "problem": verdict.mended.problem,
        }
        for verdict in results.verdicts
    ]
    document = {
        "good": results.are_good,
        "faults": faults,
        "oddities": results.oddities,
        "clean_checks": results.clean,
        "left": results.left,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _mark(verdict: Verdict) -> str:
    return "ok  " if verdict.is_good else "MISS"


def _place(row: dict[str, Any]) -> str:
    return f"{row['check']} {row['node']}" + (f" -> {row['peer']}" if row["peer"] else "")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 3]}..."
