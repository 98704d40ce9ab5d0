"""Check nodes, with the progress in a banner and the rows in a table as they are known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from app.core.nodes import CheckNodes, RowChecked
from app.errors import RacklessError
from app.gui.kit.banner import Banner
from app.gui.repairs.check_results import CheckResults
from app.gui.session.banner_task import run_in_banner, show_error_while
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.provisioning.check_row import CheckRow

Rows = tuple[CheckRow, ...]


class NodeCheck:
    """Checks of the Nodes page; `ended` is called after each complete one.

    A new check cancels the earlier one: their rows would mix, and their all-reduces collide.
    """

    def __init__(
        self, context: Context, banner: Banner, results: CheckResults, ended: Callable[[], object]
    ) -> None:
        self._context = context
        self._banner = banner
        self._results = results
        self._ended = ended
        self._op: Op | None = None

    def check_all(self) -> None:
        """Check all nodes."""
        self._run((), "Checking the nodes", lambda rows: None)

    def check_one(self, name: str, success: Callable[[Rows], None]) -> None:
        """Check one node, and pass its rows on."""
        self._run((name,), f"Checking {name}", success)

    def _run(self, names: tuple[str, ...], title: str, success: Callable[[Rows], None]) -> None:
        if self._op is not None:
            self._op.cancel()
        self._results.begin()
        self._op = run_in_banner(
            self._context.bridge,
            self._banner,
            CheckNodes(names=names),
            partial(self._show, success),
            title=title,
            hint="Versions, clocks, every connection, and a small all-reduce.",
            cancelled="The results so far still show.",
            stopped=partial(self._results.end_early, is_cancelled=True),
            failed=self._fail,
            heard=self._take_event,
        )

    def _take_event(self, event: object) -> None:
        if isinstance(event, RowChecked):
            self._results.add_row(event.row)

    def _show(self, success: Callable[[Rows], None], rows: Rows) -> None:
        self._banner.hide()
        self._results.show_rows(rows)
        self._ended()
        success(rows)

    def _fail(self, error: RacklessError) -> None:
        self._results.end_early(is_cancelled=False)
        show_error_while(self._context, self._banner, error)
