"""The main window: navigation on the left, the chosen page on the right, menus above.

It only lays out pages and connects their signals; pages know nothing of each other.
"""

from __future__ import annotations

import asyncio
import importlib
from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QByteArray, Qt
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QHBoxLayout, QStackedWidget, QVBoxLayout, QWidget

from agents.contract.spec import RunSpec
from app.core.action import CoreApi
from app.core.nodes import ConnectNodes
from app.errors import RacklessError
from app.events import NodeSnapshot, RunSnapshot
from app.gui.artifacts.artifacts_page import ArtifactsPage
from app.gui.kit.help_link import HelpLinks
from app.gui.nodes.nodes_page import NodesPage
from app.gui.overview.overview_page import OverviewPage
from app.gui.runs.runs_page import RunsPage
from app.gui.session.banner_task import show_error_while
from app.gui.session.context import Context
from app.gui.shell.dialogs import Dialogs
from app.gui.shell.menus import fill_menus, make_actions
from app.gui.shell.navigation import PLACES, Navigation
from app.gui.shell.shell import DemoRunner, Shell
from app.gui.shell.window_state import WindowState
from app.settings import Value

if TYPE_CHECKING:
    from app.gui.data.data_page import DataPage
    from app.gui.runs.compare_page import ComparePage
    from app.gui.runs.run_page import RunPage
    from app.gui.settings.settings_page import SettingsPage

MIN_WIDTH_PX, MIN_HEIGHT_PX = 960, 600
START_WIDTH_PX, START_HEIGHT_PX = 1280, 800


class MainWindow(Shell):
    def __init__(
        self, context: Context, state: WindowState, demo: DemoRunner | None = None
    ) -> None:
        super().__init__(context, state, demo)
        self._run_page: RunPage | None = None
        self._compare_page: ComparePage | None = None
        self._settings_page: SettingsPage | None = None
        self._data_page: DataPage | None = None
        self.setWindowTitle("Rackless")
        self.setWindowIcon(context.theme.icon("rackless", "text", 64))
        self.setMinimumSize(MIN_WIDTH_PX, MIN_HEIGHT_PX)
        self.resize(START_WIDTH_PX, START_HEIGHT_PX)
        self.dialogs = Dialogs(context, self)
        self.actions_ = make_actions(self, self.dialogs, context)
        HelpLinks(self.dialogs.show_help, self)
        self.overview = OverviewPage(context, self.actions_)
        self.nodes = NodesPage(context, self.actions_)
        self.runs = RunsPage(context, self.actions_)
        self.artifacts = ArtifactsPage(context)
        self.navigation = Navigation(context.theme, self.actions_)
        self.stack = QStackedWidget()
        for page in (self.overview, self.nodes, self.runs, self.artifacts):
            self.stack.addWidget(page)
        self._lay_out()
        fill_menus(self)
        self._connect()
        # The stored page may come from another version of Rackless.
        self.go_to(state.page if state.page in PLACES else "overview")
        self.stack.setFocus()  # no focus ring on a button before Tab is pressed
        if state.geometry:
            self.restoreGeometry(QByteArray.fromHex(state.geometry.encode("ascii")))

    # ------------------------------------------------------------ layout

    def _lay_out(self) -> None:
        right = QVBoxLayout()
        right.setContentsMargins(0, 0, 0, 0)
        right.setSpacing(0)
        inset = QVBoxLayout()
        inset.setContentsMargins(24, 0, 24, 0)
        inset.addWidget(self.banner)
        right.addLayout(inset)
        right.addWidget(self.stack, 1)
        body = QWidget()
        body.setObjectName("page")
        row = QHBoxLayout(body)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        row.addWidget(self.navigation)
        row.addLayout(right, 1)
        self.setCentralWidget(body)

    def _connect(self) -> None:
        bridge = self._context.bridge
        self.navigation.chosen.connect(self.go_to)
        self.overview.show_as_table(self.state.wall_as_table)
        self.overview.view_chosen.connect(partial(setattr, self.state, "wall_as_table"))
        self.overview.run_opened.connect(self.open_run)
        self.overview.runs_opened.connect(lambda: self.go_to("runs"))
        self.overview.node_opened.connect(self.open_node)
        self.runs.run_opened.connect(self.open_run)
        self.runs.repeat_wanted.connect(self.dialogs.repeat_run)
        self.runs.compare_wanted.connect(self.compare_runs)
        self.nodes.ended_unseen.connect(lambda show: show(self.banner))
        self.artifacts.export_wanted.connect(lambda: self.go_to("runs"))
        self._context.preferences.changed.connect(self._take_setting)
        bridge.failed.connect(self.show_error)
        bridge.open_failed.connect(self.show_error)
        bridge.opened.connect(self._keep_connected)
        # Not among the actions: Escape means other things in dialogs and in the palette.
        QShortcut(QKeySequence(Qt.Key.Key_Escape), self, self._leave_run)

    # ------------------------------------------------------------ places

    def go_to(self, place: str) -> None:
        pages: dict[str, QWidget] = {
            "overview": self.overview,
            "nodes": self.nodes,
            "runs": self.runs,
            "artifacts": self.artifacts,
        }
        # Called only when needed: building these would create their pages at every start.
        lazy = {"settings": self.settings_page, "data": self.data_page}
        page = pages[place] if place in pages else lazy[place]()
        self.stack.setCurrentWidget(page)
        self.navigation.show_place(place)
        self.state.page = place

    def open_run(self, run_id: str) -> None:
        page = self.run_page()
        page.open_run(run_id)
        self.stack.setCurrentWidget(page)
        self.navigation.show_place("runs")
        self.state.page = "runs"

    def run_page(self) -> RunPage:
        """Return the run page, created on first use to keep the start fast."""
        if self._run_page is None:
            from app.gui.runs.run_page import RunPage

            self._run_page = RunPage(self._context)
            self._run_page.closed.connect(lambda: self.go_to("runs"))
            self._run_page.data.rows_wanted.connect(self._open_run_data)
            self._run_page.head.repeat_wanted.connect(self.dialogs.repeat_run)
            self.stack.addWidget(self._run_page)
        return self._run_page

    def settings_page(self) -> SettingsPage:
        """Return the settings page, created on first use."""
        if self._settings_page is None:
            from app.gui.settings.settings_page import SettingsPage

            self._settings_page = SettingsPage(self._context)
            self.stack.addWidget(self._settings_page)
        return self._settings_page

    def data_page(self) -> DataPage:
        """Return the page of rows of data, created on first use."""
        if self._data_page is None:
            from app.gui.data.data_page import DataPage

            self._data_page = DataPage(self._context)
            self._data_page.run_wanted.connect(self.dialogs.use_data)
            self.stack.addWidget(self._data_page)
        return self._data_page

    def open_data(self, spec: RunSpec) -> None:
        self.go_to("data")
        self.data_page().open_source(spec)

    def _open_run_data(self) -> None:
        run = self._context.cluster.runs.get(self.run_page().run_id)
        if run is not None:
            self.open_data(run.spec)

    def compare_runs(self, runs: list[RunSnapshot]) -> None:
        """Show the page that compares runs."""
        if self._compare_page is None:
            from app.gui.runs.compare_page import ComparePage

            self._compare_page = ComparePage(self._context)
            self._compare_page.closed.connect(lambda: self.go_to("runs"))
            self.stack.addWidget(self._compare_page)
        self._compare_page.open_runs(runs)
        self.stack.setCurrentWidget(self._compare_page)
        self.navigation.show_place("runs")

    def open_node(self, name: str) -> None:
        self.go_to("nodes")
        self.nodes.open_node(name)

    def _leave_run(self) -> None:
        if self.stack.currentWidget() in (self._run_page, self._compare_page):
            self.go_to("runs")

    # ------------------------------------------------------------ actions

    def check(self) -> None:
        self.go_to("nodes")
        self.nodes.check_all()

    def refresh(self) -> None:
        if self.stack.currentWidget() is self._run_page:
            self.run_page().refresh()
        self.nodes.refresh()
        self.artifacts.refresh()

    def find_in_log(self) -> None:
        if self.stack.currentWidget() is self._run_page:
            page = self.run_page()
            page.tabs.setCurrentWidget(page.logs)
            page.logs.start_search()

    def _take_setting(self, key: str) -> None:
        value = self._context.preferences.get(key)
        if key == "theme":
            self._context.theme.choose_named(str(value))
        # On the core's thread: storing writes to the disk.
        self._context.bridge.run(lambda core, report: store_setting(core, key, value))

    def run_demo(self) -> None:
        if self.demo is None:
            return
        # One at a time: each starts three nodes.
        self.actions_["run_demo"].setEnabled(False)
        self.go_to("overview")
        self._context.bridge.run(
            self.demo,
            success=lambda result: self.actions_["run_demo"].setEnabled(True),
            failure=self._end_demo,
            progress=lambda demo: self.overview.story.show_steps(demo.steps, demo.note),
        )

    def _end_demo(self, error: RacklessError) -> None:
        self.actions_["run_demo"].setEnabled(True)
        self.show_error(error)

    def show_error(self, error: RacklessError) -> None:
        """Show an error above the page."""
        show_error_while(self._context, self.banner, error)

    def _keep_connected(self, nodes: tuple[NodeSnapshot, ...], runs: object) -> None:
        self._context.bridge.do(ConnectNodes())
        self._context.bridge.run(lambda core, report: read_notice(core), self._show_notice)
        # Not on the core's loop: imports would hold up its events.
        self._context.bridge.run(lambda core, report: asyncio.to_thread(import_lazy_pages))

    def _show_notice(self, notice: str) -> None:
        if notice:
            self.banner.show_message("warning", notice)


def import_lazy_pages() -> None:
    """Import pages and dialogs that the first frame did not need, before the user opens them."""
    for name in ("runs.run_page", "new_run.new_run_dialog", "nodes.add_node_dialog"):
        importlib.import_module(f"app.gui.{name}")


async def store_setting(core: CoreApi, key: str, value: Value) -> None:
    """Store the value of a setting."""
    core.settings.set(key, value)


async def read_notice(core: CoreApi) -> str:
    """Return the store's message for the user; empty for none."""
    return core.notice
