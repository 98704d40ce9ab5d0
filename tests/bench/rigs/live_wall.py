"""The whole window with a live wall over simulated nodes, for the benchmarks of pages and wall.

Everything is as in real life but the nodes: samples come from another thread through the bridge at
2 Hz, each node at a moment of its own; the answers to pings, too, at 1 Hz. All cards are in view.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

from PySide6.QtCore import Qt, QTimer

from app.events import NodeChanged
from app.gui.application import make_application
from app.gui.kit.theme import Theme
from app.gui.overview.card import HEIGHT_PX
from app.gui.overview.wall import GAP_PX, HEAD_PX
from tests.fakes.core import FakeCore, make_node
from tests.gui.cpu_wait import CpuWait
from tests.gui.stage import Stage

GPUS_PER_NODE = 8
WIDTH_PX = 2560
POINTS = 300
SAMPLE_S, PING_S = 0.5, 1.0
ASKED_FPS = 60


@dataclass(frozen=True, slots=True)
class Live:
    fps: float
    """Turns of a 60 Hz timer that the Qt thread served, per second."""
    core_share: float
    """CPU time of this process, simulated nodes included, over wall time."""
    waited_share: float
    """Time that the Qt thread waited for a core which others had, over wall time: on a PC with
    other work, frames are late for that alone."""


def open_stage(num_gpus: int) -> Stage:
    """Open the window on nodes of eight GPUs each, with their last minutes."""
    core = FakeCore()
    cards = [("NVIDIA GeForce RTX 3090", 24)] * GPUS_PER_NODE
    names = [f"pc-{number:02d}" for number in range(-(-num_gpus // GPUS_PER_NODE))]
    core.node_map = {name: make_node(name, *cards) for name in names}
    application = make_application()
    height = 400 + len(names) * (HEAD_PX + HEIGHT_PX + 2 * GAP_PX)
    stage = Stage(application, Theme(application), core, size=(WIDTH_PX, height))
    for name in names:
        for second in range(POINTS):
            core.on_loop(core.put_sample, name, second)
        stage.settle(0.05)
    stage.wait_for(lambda: len(stage.window.overview.wall.cards()) == num_gpus)
    stage.settle(1.0)
    return stage


def measure_live(num_gpus: int, seconds: float) -> Live:
    """Watch the wall while figures come in."""
    stage = open_stage(num_gpus)
    stage.core.on_loop(lambda: asyncio.ensure_future(feed(stage.core)))
    stage.settle(1.0)
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1

    timer = QTimer(interval=1000 // ASKED_FPS, timerType=Qt.TimerType.PreciseTimer)
    timer.timeout.connect(tick)
    timer.start()
    QTimer.singleShot(round(seconds * 1000), stage.application.quit)
    began_s, began_cpu_s, wait = time.perf_counter(), time.process_time(), CpuWait()
    stage.application.exec()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    waited_s = wait.seconds()
    timer.stop()
    stage.end()
    return Live(ticks / took_s, cpu_s / took_s, waited_s / took_s)


async def feed(core: FakeCore) -> None:
    """Let every node send samples and answer pings, each at its own moment."""

    async def be(name: str, place: float) -> None:
        await asyncio.sleep(place * SAMPLE_S)
        second = POINTS
        while True:
            core.put_sample(name, second)
            if second % round(PING_S / SAMPLE_S) == 0:
                node = replace(core.node_map[name], last_seen_s=time.time())
                core.events.publish(NodeChanged(node))
            second += 1
            await asyncio.sleep(SAMPLE_S)

    names = list(core.node_map)
    await asyncio.gather(*(be(name, place / len(names)) for place, name in enumerate(names)))
