"""What one frame of the live wall costs: `python -m tests.bench.bench_wall [--cards 16]`.

Own cards against pyqtgraph PlotWidgets, one per metric, with the same data, offscreen, all visible.
Twice: with the same look (a tinted area, antialiasing, the figure as title), and as bare curves
tuned to the least (no title, no fill, no antialiasing) that show far less than a card does. CPU
milliseconds of this process; the ratios are between rows of one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import numpy as np
from PySide6.QtWidgets import QApplication, QGridLayout, QWidget

from agents.contract.node import GpuSample, Sample
from app.gui.application import make_application
from app.gui.kit.theme import Theme
from app.gui.overview.card import DeviceCard
from app.telemetry.state import Status
from app.telemetry.stream import DeviceKey, Telemetry

POINTS = 300
FRAMES = 30
METRICS = 4
WANTED_RATIO = 8.0


def make_sample(second: int, num_gpus: int) -> Sample:
    """Return figures that move."""
    wave = float(np.sin(second * 0.3))
    gpus = tuple(
        GpuSample(
            uuid=f"GPU-{index}",
            index=index,
            name="NVIDIA GeForce RTX 4070",
            memory_used_bytes=int((8 + wave) * 1024**3),
            memory_total_bytes=12 * 1024**3,
            utilisation=0.8 + 0.2 * wave,
            temperature_celsius=65 + 5 * wave,
            power_w=180 + 20 * wave,
        )
        for index in range(num_gpus)
    )
    return Sample(time_s=float(second), seq=second, gpus=gpus)


def measure(application: QApplication, frame: Callable[[int], None]) -> float:
    """Return the median CPU milliseconds of a frame in which everything changed."""
    costs = []
    for number in range(FRAMES):
        begin_s = time.process_time()
        frame(number)
        application.processEvents()
        costs.append((time.process_time() - begin_s) * 1000)
    return statistics.median(costs)


def measure_cards(application: QApplication, theme: Theme, num_cards: int) -> float:
    """Return the cost of a frame of our own cards."""
    telemetry = Telemetry()
    for second in range(POINTS):
        telemetry.take("node", make_sample(second, num_cards))
    window, grid = _make_window(num_cards)
    status = Status("busy", "training support-chat")
    cards = []
    for index in range(num_cards):
        card = DeviceCard(theme, telemetry[DeviceKey("node", f"cuda:{index}")], status)
        grid.addWidget(card, index // 8, index % 8)
        cards.append(card)
    window.show()
    application.processEvents()

    def frame(number: int) -> None:
        telemetry.take("node", make_sample(POINTS + number, num_cards))
        for card in cards:
            card.refresh(status)

    cost = measure(application, frame)
    window.close()
    return cost


def measure_pyqtgraph(application: QApplication, num_cards: int, *, is_bare: bool) -> float:
    """Return the cost of the same data in PlotWidgets."""
    import pyqtgraph as pg

    pg.setConfigOptions(antialias=not is_bare)
    look = {} if is_bare else {"fillLevel": 0.0, "brush": (47, 80, 200, 36)}
    window, grid = _make_window(num_cards)
    curves: list[Any] = []
    for index in range(num_cards * METRICS):
        plot = pg.PlotWidget()
        plot.hideAxis("left")
        plot.hideAxis("bottom")
        plot.setMenuEnabled(False)
        plot.setRange(xRange=(0, POINTS), yRange=(0, 1), padding=0)
        curve = plot.plot(pen=pg.mkPen("b", width=1), skipFiniteCheck=True, **look)
        curves.append((plot, curve))
        grid.addWidget(plot, index // 32 * METRICS + index % METRICS, index // METRICS % 8)
    window.show()
    application.processEvents()
    x = np.arange(POINTS, dtype=np.float64)

    def frame(number: int) -> None:
        y = 0.5 + 0.4 * np.sin((x + number) * 0.3)
        for plot, curve in curves:
            curve.setData(x, y)
            if not is_bare:
                plot.setTitle(f"Load {number} %", size="9pt")

    cost = measure(application, frame)
    window.close()
    return cost


def _make_window(num_cards: int) -> tuple[QWidget, QGridLayout]:
    window = QWidget()
    window.resize(2560, 240 * -(-num_cards // 8))
    grid = QGridLayout(window)
    return window, grid


def main() -> int:
    """Print both costs and their ratio; return 0 if our cards are cheap enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", type=int, default=16)
    num_cards = parser.parse_args().cards
    application = make_application()
    own_ms = measure_cards(application, Theme(application), num_cards)
    plots_ms = measure_pyqtgraph(application, num_cards, is_bare=False)
    bare_ms = measure_pyqtgraph(application, num_cards, is_bare=True)
    print(f"{num_cards} cards x {METRICS} metrics x {POINTS} points, CPU per full frame, median")
    print(f"own cards   {own_ms:7.2f} ms ({own_ms / num_cards:.3f} ms per card)")
    print(f"pyqtgraph   {plots_ms:7.2f} ms with the same look, {bare_ms:.2f} ms as bare curves")
    print(f"pyqtgraph / own: {plots_ms / own_ms:.1f} (wanted: {WANTED_RATIO:.0f}); ", end="")
    print(f"bare curves / own: {bare_ms / own_ms:.1f}")
    return 0 if plots_ms / own_ms >= WANTED_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
