"""The table of a campaign: for a terminal, as JSON, and as Markdown for RELIABILITY.md. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.campaign.verdict import Finding

HEADINGS = (
    "#",
    "fault",
    "on",
    "detected",
    "named",
    "back",
    "of it load",
    "repeated",
    "lost",
    "doubled",
    "orphans",
    "leftovers",
    "losses",
    "broken promises",
)
_MAX_CELL = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """All findings of one call, and where they were made."""

    seed: int
    date: str
    machine: str
    version: str
    findings: tuple[Finding, ...]

    @property
    def num_broken(self) -> int:
        return sum(bool(finding.breaks) for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "date": self.date,
            "machine": self.machine,
            "version": self.version,
            "totals": count_totals(self.findings),
            "findings": [finding.as_dict() for finding in self.findings],
        }


def count_totals(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the sums over all cases, and the usual and the worst times."""
    back = [finding.back_s for finding in findings if finding.back_s]
    named = [finding.detected_s for finding in findings if finding.detected_s is not None]
    return {
        "faults": len(findings),
        "broken": sum(bool(finding.breaks) for finding in findings),
        "healed": sum(finding.state == "done" for finding in findings),
        "samples_lost": sum(finding.damage.lost for finding in findings),
        "samples_doubled": sum(finding.damage.doubled for finding in findings),
        "double_runs": sum(finding.damage.double_run for finding in findings),
        "orphans": sum(len(finding.orphans) for finding in findings),
        "leftovers": sum(len(finding.leftovers) for finding in findings),
        "named_after_s": statistics.median(named) if named else None,
        "back_after_s": statistics.median(back) if back else None,
        "back_worst_s": max(back, default=None),
    }


def row_of(finding: Finding) -> tuple[str, ...]:
    """Return the cells of one case, as HEADINGS names them."""
    damage = finding.damage
    detail = f" ({finding.detail})" if finding.detail else ""
    losses = "to the bit" if damage.is_equal else _show_difference(damage.difference)
    return (
        str(finding.number),
        f"{finding.fault}{detail}",
        finding.victim,
        _seconds(finding.detected_s),
        "yes" if finding.detected_s is not None else "no" if _was_due(finding) else "-",
        "no pause" if finding.back_s == 0.0 else _seconds(finding.back_s),
        f"{finding.load_s:.1f} s" if finding.back_s and finding.load_s else "-",
        str(damage.repeated),
        str(damage.lost),
        str(damage.doubled),
        str(len(finding.orphans)),
        str(len(finding.leftovers)),
        losses,
        "; ".join(finding.breaks) or "none",
    )


def _was_due(finding: Finding) -> bool:
    return "it was not named" in finding.breaks


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _show_difference(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


def show_totals(campaign: Campaign) -> str:
    """Return the sums as one sentence."""
    totals = count_totals(campaign.findings)
    back = (
        f"; back after {totals['back_after_s']:.1f} s (median of those that paused, "
        f"worst {totals['back_worst_s']:.1f} s)"
        if totals["back_after_s"]
        else ""
    )
    return (
        f"{totals['faults']} faults, seed {campaign.seed}: {totals['healed']} healed without a "
        f"person, {totals['samples_lost']} samples lost, {totals['samples_doubled']} doubled, "
        f"{totals['double_runs']} double runs, {totals['orphans']} orphans, "
        f"{totals['leftovers']} leftovers{back}; a promise broken in {totals['broken']}."
    )


def as_text(campaign: Campaign) -> str:
    """Return the table for a terminal."""
    rows = [HEADINGS, *(row_of(finding) for finding in campaign.findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", show_totals(campaign)])


def as_markdown(campaign: Campaign) -> str:
    """Return the table for a page, with date, seed and machine above it."""
    head = (
        f"{campaign.date}, {campaign.machine}, version {campaign.version}.\n\n"
        f"**{show_totals(campaign)}**"
    )
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(row_of, campaign.findings)]
    lines = ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows]
    return "\n".join([head, "", *lines])


def _escape(cell: str) -> str:
    one_line = " ".join(cell.split()).replace("|", "/")
    return one_line if len(one_line) <= _MAX_CELL else one_line[: _MAX_CELL - 3] + "..."
