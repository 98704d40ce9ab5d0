"""The only connection between Qt and the core.

The core runs on a plain asyncio loop in its own thread. The window sends operations: a coroutine
function with callbacks for success, failure and progress. Results and immutable snapshots come back
through a deque with one coalesced wake-up signal; samples, which are frequent, wait for the next
33 ms frame. Callbacks and signals run on the Qt thread only, in slices of a few milliseconds, so
that a flood of events delays figures but never a click.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import shiboken6
from PySide6.QtCore import QObject, Qt, QTimer, Signal

from agents.shared.files.secrets import format_trace
from app.core.action import Action, CoreApi, OpenCore, sentences
from app.core.nodes import ListNodes
from app.core.runs import ListRuns
from app.errors import RacklessError, StoreLost, UserError
from app.events import Event, SampleArrived, StoreFailed
from app.gui.session.garbage_collector import MainThreadCollector

FRAME_MS = 33
SLICE_S = 0.008
"""Maximum time for callbacks in one turn of the Qt event loop, in seconds."""
MAX_SAMPLES = 4096
"""Maximum number of samples queued per frame; the oldest go first. No other event is dropped."""
CLOSE_TIMEOUT_S = 10.0
"""Maximum wait for the core's thread when the window closes, in seconds."""

T = TypeVar("T")
Report = Callable[[Any], None]
Work = Callable[[CoreApi, Report], Awaitable[T]]
"""Coroutine function for what is more than one action."""
_log = logging.getLogger(__name__)


def work_of(action: Action[T]) -> Work[T]:
    """Return the work that is one action; it reports the events of that action."""
    return lambda core, report: core.do(action, report)


class Op:
    """Handle of a running operation."""

    def __init__(self, bridge: Bridge, callbacks: _Callbacks, at_close: str) -> None:
        self._bridge = bridge
        self.callbacks = callbacks
        self.at_close = at_close
        """Effect of closing the window on the work; empty: none worth a question."""
        self.task: asyncio.Task[None] | None = None
        self.is_done = False

    def cancel(self) -> None:
        """Cancel the work; no callback is called from now on."""
        self.is_done = True
        self._bridge.call_soon(self._cancel_task)

    def _cancel_task(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _Callbacks:
    def __init__(
        self,
        success: Callable[[Any], None] | None,
        failure: Callable[[RacklessError], None] | None,
        progress: Callable[[Any], None] | None,
    ) -> None:
        self.success = success
        self.failure = failure
        self.progress = progress


class Bridge(QObject):
    """Owns the core's thread; created and used on the Qt thread."""

    opened = Signal(object, object)
    """(nodes, runs) once the core is open."""
    open_failed = Signal(object)
    """The RacklessError that prevented the core from opening."""
    closed = Signal()
    event_arrived = Signal(object)
    """An event of the core other than a sample."""
    sampled = Signal(list)
    """All SampleArrived events of one frame."""
    failed = Signal(object)
    """A RacklessError of an operation without a `failure` callback."""
    crashed = Signal(str)
    """Traceback of an unexpected exception in the core."""
    _wake = Signal()

    def __init__(self, open_core: OpenCore, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._open_core = open_core
        # Both threads use these without a lock: append and popleft of a deque are atomic.
        self._inbox: deque[Callable[[], None]] = deque()
        self._samples: deque[SampleArrived] = deque(maxlen=MAX_SAMPLES)
        self._is_armed = False
        self._frame_due = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._core: asyncio.Future[CoreApi] | None = None
        self._stop: asyncio.Event | None = None
        self._waiting: list[Callable[[], None]] = []
        self._held: dict[int, tuple[Op, Work[Any]]] = {}
        self._keys = itertools.count()
        # Guards `_loop` and `_waiting`: calls may come before the core's thread has made its loop.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._garbage: MainThreadCollector | None = None
        self._frame = QTimer(self, interval=FRAME_MS, singleShot=True)
        self._frame.timeout.connect(self._drain_samples)
        # Queued: an automatic connection would call `_drain` within a post from this thread.
        self._wake.connect(self._drain, Qt.ConnectionType.QueuedConnection)

    # ------------------------------------------------------------ Qt thread

    def start(self) -> None:
        """Start the core's thread; `opened` or `open_failed` follows."""
        if self._garbage is None:
            self._garbage = MainThreadCollector(self)
        # A daemon: a core that hangs while closing must not keep the process alive.
        self._thread = threading.Thread(target=self._run_loop, name="rackless-core", daemon=True)
        self._thread.start()

    def do(
        self,
        action: Action[T],
        success: Callable[[T], None] | None = None,
        failure: Callable[[RacklessError], None] | None = None,
        progress: Callable[[str], None] | None = None,
        *,
        at_close: str = "",
    ) -> Op:
        """Start an action as `run` does; `progress` receives the sentences that it reports."""
        report = None if progress is None else sentences(progress)
        return self.run(work_of(action), success, failure, report, at_close=at_close)

    def run(
        self,
        work: Work[T],
        success: Callable[[T], None] | None = None,
        failure: Callable[[RacklessError], None] | None = None,
        progress: Callable[[Any], None] | None = None,
        *,
        at_close: str = "",
    ) -> Op:
        """Start `work(core, report)` on the core's thread and return at once.

        Each `report(value)` of the work calls `progress(value)` on the Qt thread. Without
        `failure`, a UserError goes to `failed`; any other exception always goes to `crashed`. A
        callback that belongs to a deleted widget is skipped. `at_close` is a sentence for the user
        on the effect of closing the window; without it, closing asks nothing.
        """
        op = Op(self, _Callbacks(success, failure, progress), at_close)
        key = next(self._keys)
        # Held until `_release`: references to widgets must be dropped on the Qt thread, since the
        # thread that drops the last one destroys the widget.
        self._held[key] = (op, work)
        self.call_soon(functools.partial(self._start_op, op, work, key))
        return op

    def closing_notes(self) -> tuple[str, ...]:
        """Return the effects of closing on the work under way, the oldest first."""
        notes = (op.at_close for op, _ in self._held.values() if not op.is_done)
        return tuple(dict.fromkeys(filter(None, notes)))

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call `call` on the core's thread: queued until it runs, dropped once it has ended."""
        with self._lock:
            if self._loop is None:
                self._waiting.append(call)
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """Close the core; `closed` follows. Runs keep training without it."""
        if (
            self._thread is None or not self._thread.is_alive()
        ):  # `closed` was emitted, or never will be
            self._post(self.closed.emit)
        self.call_soon(lambda: self._stop.set() if self._stop else None)

    def join(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for the thread to end; call it after the last window has closed."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._garbage is not None and not self._thread.is_alive():
            self._garbage.end()

    def _drain(self) -> None:
        self._is_armed = False  # first, so that an item posted from here on wakes us again
        if self._frame_due and not self._frame.isActive():
            self._frame.start()
        end_s = time.perf_counter() + SLICE_S
        while self._inbox:
            self._inbox.popleft()()
            if time.perf_counter() > end_s and self._inbox:
                self._arm()
                return

    def _drain_samples(self) -> None:
        self._frame_due = False
        batch = [self._samples.popleft() for _ in range(len(self._samples))]
        if batch:
            self.sampled.emit(batch)

    def _finish(self, op: Op, value: object, error: BaseException | None) -> None:
        # Cancelled while this call waited in the queue.
        if op.is_done:
            return
        op.is_done = True
        success, failure = _living(op.callbacks.success), _living(op.callbacks.failure)
        if error is None:
            if success is not None:
                success(value)
        elif isinstance(error, UserError) and failure is not None:
            failure(error)
        elif isinstance(error, UserError):
            self.failed.emit(error)
        else:
            if failure is not None:
                failure(UserError(f"Something went wrong inside Rackless: {error}"))
            self.crashed.emit(_describe(error))

    def _progress(self, op: Op, value: object) -> None:
        progress = _living(op.callbacks.progress)
        if not op.is_done and progress is not None:
            progress(value)

    def _release(self, key: int) -> None:
        del self._held[key]

    # ------------------------------------------------------------ core's thread

    def _arm(self) -> None:
        # Both threads may pass this test at once, which only costs a drain of an empty inbox.
        if not self._is_armed:
            self._is_armed = True
            self._wake.emit()

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        self._arm()

    def _receive(self, event: Event) -> None:
        if isinstance(event, SampleArrived):
            self._samples.append(event)
            # One wake-up per frame: further samples find the flag set.
            if not self._frame_due:
                self._frame_due = True
                self._arm()
        elif isinstance(event, StoreFailed):
            error = StoreLost(event.message, event.hint)
            self._post(lambda: self.failed.emit(error))
        else:
            self._post(lambda: self.event_arrived.emit(event))

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._serve())
        except UserError as error:
            failure = error
            self._post(lambda: self.open_failed.emit(failure))
        except Exception as error:  # noqa: BLE001 - top of the thread: shown and logged
            _log.exception("the core's thread ended")
            text = _describe(error)
            self._post(lambda: self.crashed.emit(text))
        # After a failure, too: the window ends only once the core is closed.
        self._post(self.closed.emit)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._core, self._stop = loop.create_future(), asyncio.Event()
        with self._lock:
            self._loop = loop
            while self._waiting:  # pop: a loop variable would keep the last one alive
                loop.call_soon(self._waiting.pop(0))
        async with self._open_core() as core:
            with core.events.listening(self._receive):
                nodes, runs = await core.do(ListNodes()), await core.do(ListRuns())
                self._post(lambda: self.opened.emit(nodes, runs))
                self._core.set_result(core)
                await self._stop.wait()

    def _start_op(self, op: Op, work: Work[T], key: int) -> None:
        op.task = asyncio.ensure_future(self._run_op(op, work))
        op.task.add_done_callback(lambda task: self._post(lambda: self._release(key)))

    async def _run_op(self, op: Op, work: Work[T]) -> None:
        if op.is_done or self._core is None:
            return
        # Shielded: cancelling this operation must not cancel the future that all operations await.
        core = await asyncio.shield(self._core)
        try:
            value = await work(core, lambda item: self._post(lambda: self._progress(op, item)))
        except asyncio.CancelledError:
            raise  # no callback: `cancel` has promised none
        except Exception as error:  # noqa: BLE001 - every operation ends in one callback
            if not isinstance(error, UserError):
                _log.exception("an operation failed")
            failure = error  # `error` is unbound once the except block ends
            self._post(lambda: self._finish(op, None, failure))
        else:
            self._post(lambda: self._finish(op, value, None))


def _living(call: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
    """Return the callback; None if a widget that it belongs to was deleted meanwhile."""
    has_gone = any(isinstance(o, QObject) and not shiboken6.isValid(o) for o in _owners(call))
    return None if has_gone else call


def _owners(call: Callable[[Any], None] | None) -> Iterator[object]:
    """Yield the object of a bound method, and the values that a closure refers to."""
    function = call.func if isinstance(call, functools.partial) else call
    yield getattr(function, "__self__", None)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            yield cell.cell_contents


def _describe(error: BaseException) -> str:
    return format_trace(error)
