"""Columns of the hub's results, with the planner's verdict on each model."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.requests.hub import CachedKind
from app.gui.kit.theme import Theme
from app.gui.tables.rows_model import Column, RowsModel, number_column
from app.gui.tables.view import TableView
from app.hub.hub_item import HubFit, HubItem, Verdict
from app.presentation.hub_text import describe_gate, describe_size
from app.telemetry.state import Status, Tone
from app.text import DASH, show_count

_TONES: dict[Verdict, Tone] = {
    "fits": "good",
    "too-large": "error",
    "unusable": "warning",
    "unknown": "calm",
}
# Short, since the reason is below the table.
_VERDICTS: dict[Verdict, str] = {
    "too-large": "Too large",
    "unusable": "Cannot be trained",
    "unknown": "Not known",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubRow:
    item: HubItem
    fit: HubFit | None = None
    """Verdict of the planner; None: not judged yet."""


def describe_fit(row: HubRow) -> Status:
    """Return the verdict on a model in a few words."""
    if row.fit is None:
        return Status("busy", "checking\u2026")
    return Status(_TONES[row.fit.verdict], _VERDICTS.get(row.fit.verdict) or row.fit.text)


def describe_access(row: HubRow) -> Status:
    """Return who may download an entry, and whether it is here already."""
    if row.item.is_cached:
        return Status("good", "on this PC")
    return Status("warning" if row.item.is_gated else "calm", describe_gate(row.item))


def make_columns(kind: CachedKind) -> list[Column[HubRow]]:
    """Return the columns of a table of models or data sets."""
    size_px = 132 if kind == "model" else 210  # with the number of rows
    columns: list[Column[HubRow]] = [
        Column(title="Name", text=lambda row: row.item.name, width_px=190, stretches=True),
        Column(title="Size", text=lambda row: describe_size(row.item), width_px=size_px),
        Column(title="Licence", text=lambda row: row.item.licence or DASH, width_px=110),
        Column(
            title="Access",
            text=lambda row: describe_access(row).text,
            status=describe_access,
            width_px=112,
            tip="Who may download it: gated means that its licence has to be accepted first",
        ),
        number_column(
            "Downloads",
            lambda row: row.item.downloads,
            show_count,
            width_px=84,
            tip="Downloads in the last 30 days",
        ),
        number_column("Likes", lambda row: row.item.likes, show_count, width_px=60),
    ]
    if kind == "model":
        fits: Column[HubRow] = Column(
            title="Fits",
            text=lambda row: describe_fit(row).text,
            status=describe_fit,
            width_px=190,
            stretches=True,
            tip="Whether your PCs can fine-tune it, by the planner",
        )
        columns.insert(1, fits)
    return columns


class HubTable(TableView[HubRow]):
    """Table of results, in the order of the hub."""

    def __init__(self, theme: Theme, kind: CachedKind, name: str) -> None:
        self.rows: RowsModel[HubRow] = RowsModel(make_columns(kind), key=lambda row: row.item.name)
        super().__init__(theme, self.rows, name)
        self.setMinimumHeight(220)

    def show_items(self, items: tuple[HubItem, ...]) -> None:
        """Replace the results."""
        self.rows.reset([HubRow(item=item) for item in items])

    def show_fit(self, fit: HubFit) -> None:
        """Show the verdict on a model, if it is still in the table."""
        place = self.rows.place_of(fit.model)
        if place is not None:
            self.rows.put(HubRow(item=self.rows.row(place).item, fit=fit))
