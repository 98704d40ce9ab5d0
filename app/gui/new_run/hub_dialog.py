"""Find a model or data set on the Hugging Face hub, for a run, and download it beforehand.

A search starts once the user stops typing, and cancels the one before it, so that no earlier answer
replaces a later one. The planner then judges the models one by one.
"""

from __future__ import annotations

from PySide6.QtCore import QTimer, QUrl, Signal
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QDialog, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from agents.contract.requests.hub import CachedKind
from app.core.hub import FetchFromHub, FindToken, JudgeFits, SearchHub
from app.errors import RacklessError
from app.gui.kit.banner import Banner
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, make_label, make_selectable
from app.gui.new_run.hub_results import HubTable
from app.gui.session.banner_task import run_in_banner
from app.gui.session.bridge import Op, work_of
from app.gui.session.context import Context
from app.hub.hub_item import FetchedRepo, HubFit, HubResults
from app.presentation.hub_text import describe_item, name_pc, page_of
from app.text import capitalize, count_of

REST_MS = 350
"""Pause in typing after which a search starts, in milliseconds."""
PAGE_ITEMS = 20
"""Number of results that are shown at first, and added by each press of More."""
_NOUNS: dict[CachedKind, str] = {"model": "model", "data": "data set"}
_EXAMPLES: dict[CachedKind, str] = {
    "model": "Part of the name, such as Qwen3 or SmolLM2",
    "data": "Part of the name, such as ultrachat or alpaca",
}
_CANCELLED = "What has arrived is kept, and the next download continues it."


class HubDialog(QDialog):
    chosen = Signal(str)
    """Hub id that the user has chosen for the run."""

    def __init__(self, context: Context, parent: QWidget, kind: CachedKind) -> None:
        super().__init__(parent)
        self._context, self._kind, self._noun = context, kind, _NOUNS[kind]
        self._limit = PAGE_ITEMS
        self._search_op: Op | None = None
        self._judge_op: Op | None = None
        self._fetch_op: Op | None = None
        # None until it is known; then a warning about gated models would be wrong.
        self._has_token: bool | None = None
        theme = context.theme
        self.setWindowTitle(f"Find a {self._noun}")
        self.resize(1080, 660)
        self.words = QLineEdit()
        self.words.setAccessibleName("Search the hub")
        self.words.setPlaceholderText(_EXAMPLES[kind])
        self.words.setClearButtonEnabled(True)
        self.words.addAction(
            theme.icon("search", "muted", 16), QLineEdit.ActionPosition.LeadingPosition
        )
        self.summary = make_label(role="caption")
        self.more = Button(theme, "More", self._show_more, tip="Show more results")
        self.banner = Banner(theme, can_close=False)
        self.table = HubTable(theme, kind, f"{capitalize(self._noun)}s found")
        self.name = make_selectable(make_label(role="subheading"))
        self.about = make_selectable(make_label(role="muted", wraps=True))
        self.page = Button(theme, "Open its page", self._open_page, role="link")
        self.place = ChoiceBox()
        self.place.setAccessibleName("Download to")
        self.place.setMinimumContentsLength(12)
        self.fetch = Button(theme, "Download", self._fetch, icon="save")
        self.progress = Banner(theme)
        self.use = Button(theme, f"Use this {self._noun}", self._use, role="primary")
        self.use.setDefault(True)
        self._lay_out()
        self._rest = QTimer(self, singleShot=True, interval=REST_MS)
        self._rest.timeout.connect(self.search)
        self.words.textChanged.connect(self._wait)
        self.table.chosen.connect(self._show_choice)
        self.table.opened.connect(self._use)
        self.finished.connect(lambda result: self._give_up())
        context.cluster.node_changed.connect(self._offer_places)
        self._offer_places()
        context.bridge.do(FindToken(), self._take_token, lambda error: None)
        self.search()
        self._show_choice()

    def _lay_out(self) -> None:
        found = QHBoxLayout()
        found.setSpacing(8)
        found.addWidget(self.summary, 1)
        found.addWidget(self.more)
        words = QVBoxLayout()
        words.setSpacing(2)
        words.addWidget(self.name)
        words.addWidget(self.about)
        about = QHBoxLayout()
        about.setSpacing(8)
        about.addLayout(words, 1)
        about.addWidget(self.page)
        foot = QHBoxLayout()
        foot.setSpacing(8)
        foot.addWidget(make_label("Download to"))
        foot.addWidget(self.place)
        foot.addWidget(self.fetch)
        foot.addStretch(1)
        foot.addWidget(Button(self._context.theme, "Close", self.reject))
        foot.addWidget(self.use)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label(f"Find a {self._noun} on the Hugging Face hub", "heading"))
        column.addWidget(self.words)
        column.addWidget(self.banner)
        column.addWidget(self.table, 1)
        column.addLayout(found)
        column.addLayout(about)
        column.addWidget(self.progress)
        column.addLayout(foot)

    # ------------------------------------------------------------ search

    def search(self) -> None:
        """Search for the present words; the answer to an earlier search no longer counts."""
        self._rest.stop()
        self._end_search()
        self.summary.setText("Searching\u2026")
        self.more.hide()
        self.table.say_when_empty("Searching the hub\u2026")
        self._search_op = self._context.bridge.do(
            SearchHub(kind=self._kind, words=self.words.text(), limit=self._limit),
            self._show,
            self._fail,
        )

    def _wait(self) -> None:
        self._limit = PAGE_ITEMS
        self._rest.start()

    def _show_more(self) -> None:
        self._limit += PAGE_ITEMS
        self.search()

    def _show(self, found: HubResults) -> None:
        kept = self.table.selected()
        self.table.show_items(found.items)
        if kept is not None:
            self.table.select(kept.item.name)
        if self.table.selected() is None and found.items:
            self.table.selectRow(0)
        words = self.words.text().strip()
        nothing = f"No {self._noun} of the hub matches {words}." if words else "Nothing was found."
        if found.problem:
            self._say_offline(found)
            nothing = f"This PC has no {self._noun} of the hub that matches."
        else:
            self.banner.hide()
        self.table.say_when_empty(nothing)
        count = count_of(len(found.items), self._noun)
        most = f"The {count} with most downloads"
        self.summary.setText(most if found.has_more else count if found.items else "")
        self.more.setVisible(found.has_more)
        if self._kind == "model" and found.items:
            self._judge_op = self._context.bridge.run(
                work_of(JudgeFits(models=[item.name for item in found.items])),
                failure=self.banner.show_error,
                progress=self._take_fit,
            )

    def _say_offline(self, found: HubResults) -> None:
        again = ("Try again", self.search)
        self.banner.show_message("warning", found.problem, found.hint, again)

    def _fail(self, error: RacklessError) -> None:
        self.table.show_items(())
        self.table.say_when_empty("")
        self.summary.setText("")
        hint = getattr(error, "hint", "")
        self.banner.show_message("error", capitalize(str(error)), hint, ("Try again", self.search))

    def _take_fit(self, event: object) -> None:
        if isinstance(event, HubFit):
            self.table.show_fit(event)
            self._show_choice()

    # ------------------------------------------------------------ choice

    def _take_token(self, place: str) -> None:
        self._has_token = place != "none"
        self._show_choice()

    def _show_choice(self) -> None:
        row = self.table.selected()
        for button in (self.use, self.page):
            button.setEnabled(row is not None)
        self.fetch.setEnabled(row is not None and self._fetch_op is None)
        words = describe_item(row.item, row.fit, self._has_token) if row is not None else ""
        self.name.setText(row.item.name if row is not None else "")
        self.about.setText(words)

    def _open_page(self) -> None:
        row = self.table.selected()
        if row is not None:
            QDesktopServices.openUrl(QUrl(page_of(row.item.kind, row.item.name)))

    def _use(self) -> None:
        row = self.table.selected()
        if row is not None:
            self.chosen.emit(row.item.name)
            self.accept()

    # ------------------------------------------------------------ download

    def _offer_places(self) -> None:
        """Offer this PC and the nodes that answer; the present choice stays."""
        chosen = self.place.currentData()
        nodes = [n for n in self._context.cluster.node_list() if n.transport != "local"]
        names = ["", *(node.name for node in nodes if node.state == "online")]
        if [self.place.itemData(n) for n in range(self.place.count())] == names:
            return
        self.place.clear()
        for name in names:
            self.place.addItem(name or "This PC", name)
        self.place.setCurrentIndex(max(self.place.findData(chosen), 0))

    def _fetch(self) -> None:
        row = self.table.selected()
        if row is None:
            return
        name, node = row.item.name, str(self.place.currentData())
        self._fetch_op = run_in_banner(
            self._context.bridge,
            self.progress,
            FetchFromHub(kind=self._kind, name=name, node=node),
            self._show_fetched,
            title=f"Downloading {name} to {name_pc(node)}",
            hint="Asking the hub for its files.",
            cancelled=_CANCELLED,
            stopped=self._end_fetch,
            failed=self._show_unfetched,
            at_close=f"The download of {name} stops. {_CANCELLED}",
        )
        self._show_choice()

    def _show_fetched(self, found: FetchedRepo) -> None:
        self._end_fetch()
        where = name_pc(found.pc)
        self.progress.show_message("good", f"{found.name} is on {where}")

    def _show_unfetched(self, error: RacklessError) -> None:
        self._end_fetch()
        self.progress.show_error(error)

    def _end_fetch(self) -> None:
        self._fetch_op = None
        self._show_choice()

    def _end_search(self) -> None:
        for op in (self._search_op, self._judge_op):
            if op is not None:
                op.cancel()
        self._search_op = self._judge_op = None

    def _give_up(self) -> None:
        self._rest.stop()
        self._end_search()
        if self._fetch_op is not None:
            self._fetch_op.cancel()
