"""The table of a campaign: for a terminal, as JSON, and as Markdown for RELIABILITY.md. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.text import show_list
from tests.campaign.verdict import HEALED, Finding

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
    "late by the load",
    "broken promises",
)
KIND_HEADINGS = (
    "fault",
    "times",
    "healed",
    "detected (worst)",
    "back (worst)",
    "of it load",
    "repeated at most",
    "lost",
    "doubled",
    "orphans",
    "leftovers",
    "losses",
    "late by the load",
    "broken",
)
_MAX_CELL = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One call of the campaign: an interrupted campaign has several."""

    date: str
    machine: str
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """All findings of one seed, and where they were made."""

    settings: Mapping[str, Any]
    """All that decides which faults are drawn, the seed among them."""
    sessions: tuple[Session, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def num_broken(self) -> int:
        return sum(bool(finding.breaks) for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "sessions": [asdict(session) for session in self.sessions],
            "totals": count_totals(self.findings),
            "findings": [finding.as_dict() for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Campaign:
        """Return what `as_dict` was given, also from JSON."""
        return cls(
            settings=stored["settings"],
            sessions=tuple(Session(**session) for session in stored["sessions"]),
            findings=tuple(Finding.from_dict(finding) for finding in stored["findings"]),
        )


def join(campaigns: Sequence[Campaign]) -> Campaign:
    """Return what several campaigns found as one; its settings name all seeds and nodes.

    Findings are numbered anew, in the order of the campaigns.
    """
    findings: list[Finding] = []
    for campaign in campaigns:
        before = len(findings)
        findings += [
            replace(one, number=one.number + before, run=one.run + before)
            for one in campaign.findings
        ]
    settings = {
        name: show_list(sorted({str(campaign.settings[name]) for campaign in campaigns}, key=int))
        for name in ("seed", "nodes")
    }
    sessions = tuple(session for campaign in campaigns for session in campaign.sessions)
    return Campaign(settings=settings, sessions=sessions, findings=tuple(findings))


def count_totals(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the sums over all cases, and the usual and the worst times."""
    back = [finding.back_s for finding in findings if finding.back_s]
    named = [finding.detected_s for finding in findings if finding.detected_s is not None]
    return {
        "faults": len(findings),
        "broken": sum(bool(finding.breaks) for finding in findings),
        "late": sum(bool(finding.late) for finding in findings),
        "healed": sum(finding.state in HEALED for finding in findings),
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
        "; ".join(finding.late) or "-",
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
    seed = campaign.settings["seed"]
    back = (
        f"; back after {totals['back_after_s']:.1f} s (median of those that paused, "
        f"worst {totals['back_worst_s']:.1f} s)"
        if totals["back_after_s"]
        else ""
    )
    return (
        f"{totals['faults']} faults, seed {seed}: {totals['healed']} healed automatically, "
        f"{totals['samples_lost']} samples lost, {totals['samples_doubled']} doubled, "
        f"{totals['double_runs']} double runs, {totals['orphans']} orphans, "
        f"{totals['leftovers']} leftovers{back}; late by the load {totals['late']}, a promise "
        f"broken in {totals['broken']}."
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


def row_of_kind(name: str, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the cells of all cases of one kind, as KIND_HEADINGS names them."""
    totals = count_totals(findings)
    paused = [finding for finding in findings if finding.back_s]
    equal = sum(finding.damage.is_equal for finding in findings)
    worst = max((f.damage.difference or 0.0 for f in findings), default=0.0)
    return (
        name,
        str(len(findings)),
        str(totals["healed"]),
        _usual([f.detected_s for f in findings if f.detected_s is not None]),
        _usual([f.back_s or 0.0 for f in paused]) if paused else "no pause",
        _usual([f.load_s for f in paused if f.load_s]),
        str(max(finding.damage.repeated for finding in findings)),
        *(str(totals[key]) for key in ("samples_lost", "samples_doubled", "orphans", "leftovers")),
        "to the bit" if equal == len(findings) else f"{worst:.0e}",
        str(totals["late"]),
        str(totals["broken"]),
    )


def _usual(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} s ({max(times):.1f} s)" if times else "-"


def as_markdown(campaign: Campaign) -> str:
    """Return a table of the kinds for a page, and one of all cases that were late or broke."""
    findings = campaign.findings
    loads = sorted(finding.load for finding in findings)
    sessions = campaign.sessions
    dates, machines, versions = (
        show_list(list(dict.fromkeys(values)))
        for values in zip(*((s.date, s.machine, s.version) for s in sessions), strict=True)
    )
    kinds = [
        row_of_kind(name, [one for one in findings if one.fault == name])
        for name in sorted({one.fault for one in findings})
    ]
    others = [row_of(one) for one in findings if one.breaks or one.late]
    return "\n".join(
        [
            f"{dates}, {machines}, {campaign.settings['nodes']} nodes, load average "
            f"{loads[0]:.1f} to {loads[-1]:.1f} (median {statistics.median(loads):.1f}), "
            f"version {versions}, in {count_of_runs(findings)} runs.",
            "",
            f"**{show_totals(campaign)}**",
            "",
            *_table(KIND_HEADINGS, kinds),
            *(
                ["", "Late, or with a broken promise:", "", *_table(HEADINGS, others)]
                if others
                else []
            ),
        ]
    )


def count_of_runs(findings: Sequence[Finding]) -> int:
    return len({finding.run for finding in findings})


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [headings, ("---",) * len(headings), *rows]
    return ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in every]


def _escape(cell: str) -> str:
    one_line = " ".join(cell.split()).replace("|", "/")
    return one_line if len(one_line) <= _MAX_CELL else one_line[: _MAX_CELL - 3] + "..."
