"""The main window: navigation on the left, the chosen page beside it, menus above.

It only lays out and connects. Pages know nothing of each other.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QByteArray, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QKeySequence, QPaintEvent, QShortcut
from PySide6.QtWidgets import (
    QApplication,
    QDialog,
    QHBoxLayout,
    QMainWindow,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.api import CoreApi
from app.errors import RacklessError
from app.events import NodeSnapshot, RunSnapshot
from app.gui.artifacts.artifacts_page import ArtifactsPage
from app.gui.kit.banner import Banner
from app.gui.nodes.nodes_page import NodesPage
from app.gui.overview.overview_page import OverviewPage
from app.gui.runs.runs_page import RunsPage
from app.gui.session.bridge import Report
from app.gui.session.context import Context
from app.gui.shell.close_policy import ClosePolicy
from app.gui.shell.dialogs import Dialogs
from app.gui.shell.menus import fill_menus, make_actions
from app.gui.shell.navigation import PLACES, Navigation
from app.gui.shell.window_state import WindowState
from app.settings import Value

if TYPE_CHECKING:
    from app.gui.runs.compare_page import ComparePage
    from app.gui.runs.run_page import RunPage
    from app.gui.settings.settings_page import SettingsPage

MIN_WIDTH_PX, MIN_HEIGHT_PX = 960, 600
START_WIDTH_PX, START_HEIGHT_PX = 1280, 800


@dataclass(frozen=True, slots=True)
class StoryNews:
    """How far the demo is: (title, `done` | `now` | `todo` | `failed`) per step."""

    steps: Sequence[tuple[str, str]]
    note: str = ""


Story = Callable[[CoreApi, Report], Awaitable[object]]
"""The demo: reports StoryNews while it goes on."""


class MainWindow(QMainWindow):
    painted = Signal()
    """The first frame is on the screen."""
    finished = Signal()
    """The person closed the window for good."""
    hidden = Signal(object)
    """It went to the tray; with (title, text) the first time, else None."""

    def __init__(self, context: Context, state: WindowState, story: Story | None = None) -> None:
        super().__init__()
        self._context, self.state, self.story = context, state, story
        self._was_painted = False
        self.is_over = False
        """The person closed it for good."""
        self.farewell = ClosePolicy(context, state, self)
        self._run_page: RunPage | None = None
        self._compare_page: ComparePage | None = None
        self._settings_page: SettingsPage | None = None
        self.setWindowTitle("Rackless")
        self.setWindowIcon(context.theme.icon("rackless", "text", 64))
        self.setMinimumSize(MIN_WIDTH_PX, MIN_HEIGHT_PX)
        self.resize(START_WIDTH_PX, START_HEIGHT_PX)
        self.dialogs = Dialogs(context, self)
        self.actions_ = make_actions(self, context)
        self.banner = Banner(context.theme)
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
        self.go_to(state.page if state.page in PLACES else "overview")
        self.stack.setFocus()  # no ring on a button before anybody pressed Tab
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
        self.artifacts.export_wanted.connect(lambda: self.go_to("runs"))
        self._context.preferences.changed.connect(self._take_setting)
        bridge.failed.connect(self.show_error)
        bridge.open_failed.connect(self.show_error)
        bridge.opened.connect(self._keep_connected)
        QShortcut(QKeySequence(Qt.Key.Key_Escape), self, self._leave_run)

    # ------------------------------------------------------------ places

    def go_to(self, place: str) -> None:
        """Show one of the pages."""
        pages: dict[str, QWidget] = {
            "overview": self.overview,
            "nodes": self.nodes,
            "runs": self.runs,
            "artifacts": self.artifacts,
        }
        page = pages[place] if place in pages else self.settings_page()
        self.stack.setCurrentWidget(page)
        self.navigation.show_place(place)
        self.state.page = place

    def open_run(self, run_id: str) -> None:
        """Show the page of a run."""
        page = self.run_page()
        page.open_run(run_id)
        self.stack.setCurrentWidget(page)
        self.navigation.show_place("runs")
        self.state.page = "runs"

    def run_page(self) -> RunPage:
        """Return the run page; made when it is first needed, since a start should not wait."""
        if self._run_page is None:
            from app.gui.runs.run_page import RunPage

            self._run_page = RunPage(self._context)
            self._run_page.closed.connect(lambda: self.go_to("runs"))
            self._run_page.head.repeat_wanted.connect(self.dialogs.repeat_run)
            self.stack.addWidget(self._run_page)
        return self._run_page

    def settings_page(self) -> SettingsPage:
        """Return the page of settings; made when it is first needed."""
        if self._settings_page is None:
            from app.gui.settings.settings_page import SettingsPage

            self._settings_page = SettingsPage(self._context)
            self.stack.addWidget(self._settings_page)
        return self._settings_page

    def compare_runs(self, runs: list[RunSnapshot]) -> None:
        """Show several runs side by side."""
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
        """Ask again for what the page in view shows."""
        if self.stack.currentWidget() is self._run_page:
            self.run_page().refresh()
        self.nodes.refresh()
        self.artifacts.refresh()

    def find_in_log(self) -> None:
        """Put the cursor into the search field of the run in view."""
        if self.stack.currentWidget() is self._run_page:
            page = self.run_page()
            page.tabs.setCurrentWidget(page.logs)
            page.logs.start_search()

    def _take_setting(self, key: str) -> None:
        value = self._context.preferences.get(key)
        if key == "theme":
            self._context.theme.choose_named(str(value))
        self._context.bridge.run(lambda core, report: store_setting(core, key, value))

    def run_story(self) -> None:
        """Run the demo and show its steps."""
        story = self.story
        if story is None:
            return
        self.actions_["run_demo"].setEnabled(False)
        self.go_to("overview")
        self._context.bridge.run(
            story,
            success=lambda result: self.actions_["run_demo"].setEnabled(True),
            failure=self._end_story,
            progress=lambda news: self.overview.story.tell(news.steps, news.note),
        )

    def _end_story(self, error: RacklessError) -> None:
        self.actions_["run_demo"].setEnabled(True)
        self.show_error(error)

    def show_error(self, error: RacklessError) -> None:
        """Show an error above the page."""
        self.banner.show_error(error)

    def _keep_connected(self, nodes: tuple[NodeSnapshot, ...], runs: object) -> None:
        self._context.bridge.run(lambda core, report: core.nodes.connect())
        self._context.bridge.run(lambda core, report: read_notice(core), self._show_notice)
        self._context.bridge.run(lambda core, report: asyncio.to_thread(import_the_rest))

    def _show_notice(self, notice: str) -> None:
        if notice:
            self.banner.show_message("warning", notice)

    # ------------------------------------------------------------ first and last

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if not self._was_painted:
            self._was_painted = True
            QTimer.singleShot(0, self.painted.emit)

    def expect_end(self) -> None:
        """The desktop's session ends: from now on nothing is asked, and nothing stays."""
        self.farewell.is_quiet = True

    def close_quietly(self) -> None:
        """Close without a question: the system asks for it."""
        self.expect_end()
        self.close()

    def quit(self) -> None:
        """Close for good, also from the tray."""
        self.farewell.is_final = True
        self.close()

    def come_forward(self) -> None:
        """Show the window above others, wherever it was."""
        self.setWindowState(self.windowState() & ~Qt.WindowState.WindowMinimized)
        self.show()
        self.raise_()
        self.activateWindow()
        QApplication.alert(self)  # where the desktop lets nobody take the focus

    def closeEvent(self, event: QCloseEvent) -> None:
        decision = self.farewell.decide()
        if decision == "end":
            self.state.geometry = bytes(self.saveGeometry().toHex().data()).decode("ascii")
            event.accept()
            for dialog in self.findChildren(QDialog):
                dialog.reject()  # so that answers are kept
            self.is_over = True
            self.finished.emit()
            return
        event.ignore()
        if decision == "hide":
            self.hide()
            self.hidden.emit(self.farewell.tell_hidden())


def import_the_rest() -> None:
    """Import what the first frame did not need, before a person asks for it."""
    for name in ("runs.run_page", "new_run.new_run_dialog", "nodes.add_node_dialog"):
        importlib.import_module(f"app.gui.{name}")


async def store_setting(core: CoreApi, key: str, value: Value) -> None:
    """Remember what a person chose."""
    core.settings.set(key, value)


async def read_notice(core: CoreApi) -> str:
    """Return what the store has to say."""
    return core.notice
