"""The crossing: every operation ends in one callback on the Qt thread, floods never block it."""

import asyncio
import functools
import threading
import time

import pytest
import shiboken6
from PySide6.QtCore import QObject

from app.errors import UserError
from app.events import RunEvent
from app.gui.session.bridge import MAX_SAMPLES, Bridge
from app.gui.shell.selfcheck import check_reference_counts
from tests.fakes.core import FakeCore, busy_core


@pytest.fixture
def bridge(application):
    made = Bridge(FakeCore().open)
    yield made
    made.stop()
    made.join()


def wait_for(application, is_true, seconds=20.0):
    end_s = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end_s
        application.processEvents()
        time.sleep(0.001)


def test_success_progress_and_thread(application, bridge):
    seen = []

    async def work(core, report):
        seen.append(("work", threading.current_thread().name))
        report("half")
        return 42

    bridge.run(
        work,
        success=lambda value: seen.append(("done", value, threading.current_thread().name)),
        progress=lambda value: seen.append(("progress", value)),
    )
    bridge.start()  # an operation may be asked for before the core is there
    wait_for(application, lambda: len(seen) == 3)
    assert seen == [
        ("work", "rackless-core"),
        ("progress", "half"),
        ("done", 42, threading.main_thread().name),
    ]


def test_an_error_of_the_world_goes_to_failure_or_else_to_failed(application, bridge):
    bridge.start()
    told, failed, crashed = [], [], []
    bridge.failed.connect(failed.append)
    bridge.crashed.connect(crashed.append)

    async def work(core, report):
        raise UserError("no", "do this")

    bridge.run(work, failure=told.append)
    bridge.run(work)
    wait_for(application, lambda: told and failed)
    assert told[0].hint == failed[0].hint == "do this"
    assert crashed == []


def test_a_bug_is_a_crash_report_and_still_ends_the_operation(application, bridge):
    bridge.start()
    told, crashed = [], []
    bridge.crashed.connect(crashed.append)

    async def work(core, report):
        raise KeyError("oops")

    bridge.run(work, failure=told.append)
    wait_for(application, lambda: told and crashed)
    assert "KeyError: 'oops'" in crashed[0]
    assert "in work" in crashed[0]


def test_a_cancelled_operation_calls_nothing(application, bridge):
    bridge.start()
    told, state = [], []

    async def work(core, report):
        state.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            state.append("ended")

    op = bridge.run(work, success=told.append, failure=told.append)
    wait_for(application, lambda: state)
    op.cancel()
    wait_for(application, lambda: len(state) == 2)
    application.processEvents()
    assert told == []


class Listener(QObject):
    """A widget that keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def hear(self, value):
        self.told.append(value)


WRAPS = {
    "method": lambda listener: listener.hear,
    "partial": lambda listener: functools.partial(listener.hear),
    "closure": lambda listener: lambda value: listener.hear(value),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_a_widget_that_has_gone_hears_nothing_and_no_error_is_lost(application, bridge, wrap):
    bridge.start()
    failed, crashed = [], []
    bridge.failed.connect(failed.append)
    bridge.crashed.connect(crashed.append)
    go = threading.Event()

    async def work(core, report):
        await asyncio.to_thread(go.wait, 5)
        report("half")
        raise UserError("no", "")

    gone, here = Listener(), Listener()
    for listener in (gone, here):
        hear = wrap(listener)
        bridge.run(work, hear, hear, hear)
    shiboken6.delete(gone)
    go.set()
    wait_for(application, lambda: len(here.told) == 2 and failed)
    assert gone.told == []
    assert [error.message for error in failed] == ["no"]
    assert crashed == []


def test_a_core_that_cannot_open_says_so_and_the_window_can_close(application):
    class Broken(FakeCore):
        def open(self):
            raise UserError("the store is of a newer version", "update")

    bridge = Bridge(Broken().open)
    told, closed = [], []
    bridge.open_failed.connect(told.append)
    bridge.closed.connect(lambda: closed.append(1))
    bridge.start()
    wait_for(application, lambda: told and closed)
    bridge.stop()
    wait_for(application, lambda: len(closed) == 2)
    bridge.join()


def test_a_flood_never_holds_the_qt_thread_and_loses_no_event(application):
    core = busy_core()
    bridge = Bridge(core.open)
    events, samples, gaps = [], [], []
    bridge.event_arrived.connect(lambda event: (events.append(event), time.sleep(0.0001)))
    bridge.sampled.connect(samples.extend)
    opened = []
    bridge.opened.connect(lambda nodes, runs: opened.append((nodes, runs)))
    bridge.start()
    wait_for(application, lambda: opened)

    def flood():
        for number in range(3000):
            happening = RunEvent(run_id="r", time_s=number, severity="info", text="x")
            core.put_event(happening)
            core.put_sample("alpha", number)

    core.on_loop(flood)
    end_s = time.perf_counter() + 20
    while len(events) < 3000 or not samples:
        began_s = time.thread_time()
        application.processEvents()
        gaps.append(time.thread_time() - began_s)
        assert time.perf_counter() < end_s
    bridge.stop()
    bridge.join()
    assert [event.event.time_s for event in events] == list(range(3000))
    assert len(samples) <= max(MAX_SAMPLES, 3000)
    assert max(gaps) < 0.05, "CPU time of one turn: a slice of 8 ms, and some room"


def test_this_pyside_is_safe():
    check_reference_counts()


def test_a_pyside_that_drops_references_is_refused(monkeypatch):
    import app.gui.shell.selfcheck as selfcheck

    counts = iter((1000, 900))
    monkeypatch.setattr(selfcheck.sys, "getrefcount", lambda value: next(counts))
    with pytest.raises(UserError, match="corrupts reference counts"):
        selfcheck.check_reference_counts()
