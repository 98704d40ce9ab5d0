"""A tab about the selected node, which is queried only while the tab is visible.

Selecting another node cancels a reading. A change that was started continues to its end, and its
outcome is shown on the page that is visible by then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from PySide6.QtCore import QTimer, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QWidget

from app.core.action import Action
from app.errors import RacklessError
from app.gui.kit.banner import Banner
from app.gui.session.bridge import Op, Work
from app.gui.session.context import Context
from app.text import capitalize

T = TypeVar("T")
ShowOutcome = Callable[[Banner], None]
"""Shows the outcome of a change in a banner."""


class NodePane(QWidget):
    """Follows the selection in the list of nodes; a subclass queries the node in `refresh`."""

    asks_each_time = False
    """True if the node is queried whenever the tab is opened, since it may have changed."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._reading: Op | None = None
        # The selected node, and the one that was queried last.
        self._name, self._shown = "", ""
        # Delay to the next event loop turn: arrow keys pass over rows, and only the last is
        # queried.
        self._soon = QTimer(self, interval=0, singleShot=True)
        self._soon.timeout.connect(self._refresh_if_other)

    def show_node(self, name: str) -> None:
        """Show another node; empty: none is selected."""
        self._name = name
        self._soon.start()

    def refresh(self) -> None:
        """Query the selected node, and show its answer."""
        raise NotImplementedError

    def showEvent(self, event: QShowEvent) -> None:
        # Another node may have been selected while this tab was hidden.
        super().showEvent(event)
        if self.asks_each_time:
            self._shown = ""
        self._soon.start()

    def read(
        self,
        work: Work[T],
        success: Callable[[T], None],
        failure: Callable[[RacklessError], None],
    ) -> None:
        """Query the selected node; an earlier reading ends without a result."""
        self.stop_reading()
        self._reading = self._context.bridge.run(
            work,
            partial(self._end_reading, success),
            partial(self._end_reading, failure),
        )

    def stop_reading(self) -> None:
        """End a reading without a result."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _refresh_if_other(self) -> None:
        if self._name != self._shown and self.isVisible():
            self.refresh()

    def _end_reading(self, take: Callable[[T], None], value: T) -> None:
        self._reading = None
        take(value)


class ChangingPane(NodePane):
    """A pane that changes its node as well."""

    ended_unseen = Signal(object)
    """The ShowOutcome of a change that ended while this tab showed another node or was hidden."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.banner = Banner(context.theme)
        self._works: dict[str, tuple[str, str]] = {}
        """Nodes that are being changed: title of the work, and its last report."""

    @property
    def is_idle(self) -> bool:
        """True if the shown node is neither read nor changed now."""
        return self._reading is None and self._shown not in self._works

    def change(
        self, title: str, action: Action[T], show: Callable[[T, Banner], None], *, at_close: str
    ) -> None:
        """Run work on the shown node, even if the user selects another one meanwhile.

        Args:
            title: name of the action, in the progressive form.
            action: changes the node; its progress is shown.
            show: shows the answer in a banner, of this tab or of a page.
            at_close: what closing the window does to the action.
        """
        name = self._shown
        self._report(name, title, "")
        self._context.bridge.do(
            action,
            lambda result: self._end_change(name, partial(show, result)),
            lambda error: self._end_change(name, lambda banner: banner.show_error(error)),
            partial(self._report, name, title),
            at_close=at_close,
        )

    def show_work(self) -> None:
        """Show the progress of the shown node's change; hide the banner without one."""
        work = self._works.get(self._shown)
        self.banner.show_notice(("busy", *work) if work is not None else None)

    def _report(self, name: str, title: str, text: str) -> None:
        self._works[name] = title, capitalize(text)
        if name == self._shown:
            self.show_work()

    def _end_change(self, name: str, show: ShowOutcome) -> None:
        del self._works[name]
        if name == self._name and self.isVisible():
            self.refresh()
            show(self.banner)
            return
        if name == self._shown:
            self._shown = ""  # read again once the tab is visible
        self.ended_unseen.emit(show)
