"""Actions on the rows of data on this PC: list, search and show them, with numbers of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agents.contract.requests.rows import RowFilter, RowRequest
from app.core.action import Action, Report, action

if TYPE_CHECKING:
    from agents.contract.requests.rows import DataFigures, RowList, WholeRow
    from app.core.state import CoreState
    from app.data.browser import BrowsedData


@action("data.figures")
class ReadDataFigures(Action["DataFigures"]):
    """Return the numbers of the rows read so far.

    Raises:
        UserError: the data cannot be read on this PC.
    """

    source: BrowsedData

    async def perform(self, core: CoreState, report: Report) -> DataFigures:
        return await core.data.figures(self.source)


@action("data.rows")
class ListDataRows(Action["RowList"]):
    """List rows; the first ones come at once for data of any size.

    Raises:
        UserError: the data cannot be read on this PC.
    """

    source: BrowsedData
    start: int = 0
    count: int = 100
    which: RowFilter = "all"
    search: str = ""
    """Text that a row contains; another request with it looks further."""

    async def perform(self, core: CoreState, report: Report) -> RowList:
        request = RowRequest(
            start=self.start, count=self.count, which=self.which, search=self.search
        )
        return await core.data.rows(self.source, request)


@action("data.row")
class ShowDataRow(Action["WholeRow"]):
    """Return one row as written, and as a run learns it.

    Raises:
        UserError: there is no such row.
    """

    source: BrowsedData
    place: int
    """Number of the row across all files, from 1."""

    async def perform(self, core: CoreState, report: Report) -> WholeRow:
        return await core.data.row(self.source, self.place)
