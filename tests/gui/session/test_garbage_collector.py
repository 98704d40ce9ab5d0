"""No widget is ever destroyed on another thread than Qt's."""

from __future__ import annotations

import gc
import threading
import weakref

from PySide6.QtCore import QObject

from app.gui.session.bridge import Bridge
from app.gui.session.garbage_collector import collect_if_due
from tests.fakes.core import FakeCore
from tests.gui.session.test_bridge import wait_for

NUM_CYCLES = 50


def make_cycle(ended_on: list[threading.Thread]) -> QObject:
    thing = QObject()
    thing.itself = thing
    weakref.finalize(thing, lambda: ended_on.append(threading.current_thread()))
    return thing


def run_in_a_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_cycle_waits_for_the_qt_thread(application):
    ended_on: list[threading.Thread] = []
    for _ in range(NUM_CYCLES):
        make_cycle(ended_on)
    kept = []
    run_in_a_thread(lambda: kept.extend([] for _ in range(100_000)))
    assert ended_on == []
    wait_for(application, lambda: len(ended_on) == NUM_CYCLES)
    assert set(ended_on) == {threading.main_thread()}


def test_the_collector_is_python_s_own_again_after_the_end(garbage):
    assert not gc.isenabled()
    garbage.end()
    assert gc.isenabled()


def test_the_collector_is_taken_over_while_the_core_has_a_thread(garbage):
    garbage.end()
    first, second = Bridge(FakeCore().open), Bridge(FakeCore().open)
    for bridge in (first, second):
        bridge.start()
        assert not gc.isenabled()
    for bridge, is_back in ((first, False), (second, True)):
        bridge.stop()
        bridge.join()
        assert gc.isenabled() is is_back


def test_old_garbage_is_found_too():
    ended_on: list[threading.Thread] = []
    thing = make_cycle(ended_on)
    for generation in (0, 1):
        gc.collect(generation)
    del thing
    gc.collect(1)
    assert ended_on == []
    kept = []
    for _ in range(13 * 13):
        kept.extend([] for _ in range(1000))
        collect_if_due()
    assert len(ended_on) == 1


class Listener(QObject):
    def hear(self, value):
        pass


def test_what_an_operation_held_ends_on_the_qt_thread(application):
    bridge = Bridge(FakeCore().open)
    bridge.start()
    ended_on: list[threading.Thread] = []

    async def answer(core, report):
        return 1

    for place in range(400):
        listener = Listener()
        weakref.finalize(listener, lambda: ended_on.append(threading.current_thread()))
        if place % 2:
            bridge.run(answer, listener.hear)
        else:
            bridge.run(lambda core, report, held=listener: answer(held, report))
        del listener
    wait_for(application, lambda: len(ended_on) == 400)
    assert set(ended_on) == {threading.main_thread()}
    bridge.stop()
    bridge.join()
