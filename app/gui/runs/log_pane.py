"""The log of one rank, read off the Qt thread, followed live and searchable."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QCheckBox, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from agents.contract.run_layout import rank_log
from app.core.action import CoreApi
from app.core.runs import FindLogs, SyncRun
from app.events import LogArrived
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import IconButton, make_label, make_panel, set_tooltip
from app.gui.logs.log_document import Block, split_blocks
from app.gui.logs.log_view import LogView
from app.gui.session.bridge import Op, Report
from app.gui.session.context import Context

_LEVELS = (("All lines", "all"), ("Warnings and errors", "warnings"), ("Errors", "errors"))


async def read_log(core: CoreApi, report: Report, run_id: str, rank: int, attempt: int) -> int:
    """Report the blocks of a rank's mirrored log; return the offset of its end."""
    size_bytes = 0
    files = await core.do(FindLogs(run_id=run_id, rank=rank, attempt=attempt))

    def pieces() -> Iterator[bytes]:
        nonlocal size_bytes
        for file in files:
            for offset, data in file.pieces():
                size_bytes = offset + len(data)
                yield data

    # Splitting a log of hundreds of megabytes takes seconds of CPU time, so it runs in a worker
    # thread.
    def read() -> None:
        for block in split_blocks(pieces()):
            report(block)

    await asyncio.to_thread(read)
    return size_bytes


async def find_ranks(core: CoreApi, run_id: str, attempt: int) -> list[tuple[int, str]]:
    """Return the rank and node of each log of an earlier attempt, fetched if it is not here."""
    find = FindLogs(run_id=run_id, attempt=attempt)
    if not await core.do(find):
        await core.do(SyncRun(run_id=run_id))
    return [(file.rank, file.node) for file in await core.do(find)]


class LogPane(QWidget):
    """Logs of one run: choice of rank and level, the text, and the search."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._run_id = ""
        # Newest attempt, and the one whose log is shown.
        self._attempt = self._shown = 0
        self._ranks: list[tuple[int, str]] = []
        # Offset up to which the log is shown, in bytes; None while the file is being read.
        self._size_bytes: int | None = None
        self._waiting: list[LogArrived] = []
        self._op: Op | None = None
        self._find: Op | None = None
        self.view = LogView(context.theme)
        self.attempts = ChoiceBox()
        self.attempts.setAccessibleName("Attempt whose log is shown")
        self.attempts.hide()
        self.ranks = ChoiceBox()
        self.ranks.setAccessibleName("Rank shown in the log")
        self.ranks.setMinimumWidth(190)
        self.levels = ChoiceBox()
        for box in (self.attempts, self.levels):
            box.setSizeAdjustPolicy(ChoiceBox.SizeAdjustPolicy.AdjustToContents)
        self.levels.setAccessibleName("Lines shown in the log")
        for text, level in _LEVELS:
            self.levels.addItem(text, level)
        # Scrolling up clears this box, and scrolling back to the end sets it again.
        self.follow = QCheckBox("Follow")
        self.follow.setChecked(True)
        set_tooltip(self.follow, "Keep the newest line in view")
        self.words = QLineEdit()
        self.words.setPlaceholderText("Find in this log")
        self.words.setAccessibleName("Find in this log")
        set_tooltip(self.words, "Enter: next, Shift+Enter: previous (Ctrl+F)")
        self.words.setClearButtonEnabled(True)
        self.words.setFixedWidth(220)
        self._result = make_label(role="caption")
        theme = context.theme
        choices = QWidget()
        left = QHBoxLayout(choices)
        left.setContentsMargins(0, 0, 0, 0)
        left.setSpacing(8)
        for widget in (self.attempts, self.ranks, self.levels, self.follow):
            left.addWidget(widget)
        left.addStretch(1)
        # In a narrow window the search goes to a line of its own.
        row = FlowLayout(lead=choices)
        row.addWidget(self._result)
        row.addWidget(self.words)
        row.addWidget(
            IconButton(
                theme, "up", "Previous match (Shift+Enter)", lambda: self.find_next(backward=True)
            )
        )
        row.addWidget(IconButton(theme, "down", "Next match (Enter)", self.find_next))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addLayout(row)
        panel = make_panel()
        inset = QVBoxLayout(panel)
        inset.setContentsMargins(4, 4, 4, 4)
        inset.addWidget(self.view)
        column.addWidget(panel, 1)
        self.attempts.currentIndexChanged.connect(lambda index: self._choose_attempt())
        self.ranks.currentIndexChanged.connect(lambda index: self._load())
        self.follow.toggled.connect(self.view.follow)
        self.view.follow_changed.connect(self.follow.setChecked)
        self.levels.currentIndexChanged.connect(
            lambda index: self.view.show_level(self.levels.currentData())
        )
        self.view.level_changed.connect(
            lambda level: self.levels.setCurrentIndex(self.levels.findData(level))
        )
        self.view.searched.connect(self._show_result)
        self.words.returnPressed.connect(self._find_from_key)
        self.words.textChanged.connect(lambda text: self._result.setText(""))
        context.cluster.log_arrived.connect(self._take)

    def show_run(self, run_id: str, attempt: int, ranks: list[tuple[int, str]]) -> None:
        """Offer the (rank, node) pairs; reload the log if the run or the attempt has changed."""
        is_new = (run_id, attempt) != (self._run_id, self._attempt)
        self._ranks = ranks
        if is_new:
            self._run_id, self._attempt = run_id, attempt
            self._offer_attempts()
        # An earlier attempt that the user reads has ranks of its own.
        if self._shown == attempt:
            self._offer_ranks(ranks, is_new=is_new)
        if is_new:
            self._load()

    def _offer_attempts(self) -> None:
        self._shown = self._attempt
        self.attempts.blockSignals(True)
        self.attempts.clear()
        for number in range(self._attempt, 0, -1):
            newest = ", newest" if number == self._attempt else ""
            self.attempts.addItem(f"Attempt {number}{newest}", number)
        self.attempts.blockSignals(False)
        self.attempts.setVisible(self._attempt > 1)

    def _choose_attempt(self) -> None:
        self._shown = int(self.attempts.currentData() or self._attempt)
        if self._find is not None:
            self._find.cancel()
        if self._shown == self._attempt:
            self._offer_ranks(self._ranks, is_new=True)
            self._load()
            return
        run_id, attempt = self._run_id, self._shown
        self._stop_reading()
        self._result.setText("fetching\u2026")
        self._find = self._context.bridge.run(
            lambda core, report: find_ranks(core, run_id, attempt),
            self._show_attempt,
            failure=lambda error: self._show_attempt([]),
        )

    def _show_attempt(self, ranks: list[tuple[int, str]]) -> None:
        if not ranks:
            self._result.setText("no log of this attempt is left")
            return
        self._result.setText("")
        self._offer_ranks(ranks, is_new=True)
        self._load()

    def _offer_ranks(self, ranks: list[tuple[int, str]], *, is_new: bool) -> None:
        texts = [f"Rank {rank} on {node}" for rank, node in ranks] or ["Rank 0"]
        shown = [self.ranks.itemText(number) for number in range(self.ranks.count())]
        if is_new or texts != shown:
            # A new attempt starts at rank 0; the same attempt keeps the rank that the user is
            # reading.
            chosen = 0 if is_new else max(self.ranks.currentIndex(), 0)
            # Filling the box would emit an index change for every item, and each of them reads a
            # log.
            self.ranks.blockSignals(True)
            self.ranks.clear()
            for number, text in enumerate(texts):
                self.ranks.addItem(text, ranks[number][0] if ranks else 0)
            self.ranks.setCurrentIndex(min(chosen, self.ranks.count() - 1))
            self.ranks.blockSignals(False)

    def start_search(self) -> None:
        """Focus the search field."""
        self.words.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.words.selectAll()

    def find_next(self, *, backward: bool = False) -> None:
        """Go to the next or previous match."""
        self._result.setText("searching\u2026" if self.words.text() else "")
        self.view.search(self.words.text(), backward=backward)

    def find_previous(self) -> None:
        self.find_next(backward=True)

    # ------------------------------------------------------------ reading

    def _stop_reading(self) -> None:
        if self._op is not None:
            self._op.cancel()
        self.view.clear()
        self._size_bytes = None
        self._waiting.clear()

    def _load(self) -> None:
        self._stop_reading()
        run_id, rank, attempt = self._run_id, int(self.ranks.currentData() or 0), self._shown
        if not run_id:
            return
        self._op = self._context.bridge.run(
            lambda core, report: read_log(core, report, run_id, rank, attempt),
            success=self._read_all,
            # Counts as empty: live bytes beyond it are a gap, and the file is read again.
            failure=lambda error: self._read_all(0),
            progress=self._add_block,
        )

    def _add_block(self, block: Block) -> None:
        self.view.append_block(block)

    def _read_all(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        waiting, self._waiting = self._waiting, []
        # `_take` may find a gap and start over; it then keeps the rest for that reading.
        for event in waiting:
            self._take(event)

    def _take(self, event: LogArrived) -> None:
        stream = rank_log(int(self.ranks.currentData() or 0))
        if (event.run_id, event.attempt, event.stream) != (self._run_id, self._shown, stream):
            return
        # Live bytes may overlap with the file that is still being read: keep them until its end
        # offset is known, then append only what lies beyond it.
        if self._size_bytes is None:
            self._waiting.append(event)
            return
        known = self._size_bytes - event.offset
        # A gap: bytes in between are on disk but were not announced, so read the file again.
        if known < 0:
            self._load()
        elif known < len(event.data):
            self.view.append(event.data[known:])
            self._size_bytes = event.offset + len(event.data)

    def _find_from_key(self) -> None:
        held = QGuiApplication.keyboardModifiers()
        self.find_next(backward=bool(held & Qt.KeyboardModifier.ShiftModifier))

    def _show_result(self, was_found: bool) -> None:
        line = self.view.found_line
        self._result.setText(
            f"line {line + 1:,}" if was_found and line is not None else "no matches"
        )
