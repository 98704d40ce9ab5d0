"""Run the real demo in the window, without a display, and keep pictures of it.

    python -m tests.gui.demo_pictures FOLDER [--theme dark] [--scale 2]

Three nodes behind real SSH on this PC, a minute or two. It also prints how long the Qt thread was
held at worst while all of it went on.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0
WATCH_MS = 10


def main() -> int:
    """Write the pictures into the folder; return 0 if every step of the story happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--scale", default="1")
    chosen = parser.parse_args()
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QT_SCALE_FACTOR"] = chosen.scale
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        return show_demo(chosen.folder, Path(home), chosen.theme)


def show_demo(folder: Path, home: Path, scheme: str) -> int:
    """Tell the story once and take the pictures on the way."""
    from app.demo import Demo

    demo = Demo(home / "demo")
    demo.prepare()
    try:
        photographer = Photographer(demo, folder, scheme)
        return 0 if photographer.watch() else 1
    finally:
        demo.close()


class Photographer:
    """Owns the window and looks at it while the demo goes on."""

    def __init__(self, demo: Any, folder: Path, scheme: str) -> None:
        from PySide6.QtCore import Qt, QTimer

        from app.gui.application import core_opener, make_application
        from app.gui.kit.theme import Theme
        from app.gui.session.bridge import Bridge
        from app.gui.session.context import Context
        from app.gui.session.live_state import LiveState
        from app.gui.shell.main_window import MainWindow
        from app.gui.shell.window_state import WindowState

        self.folder, self.scheme = folder, scheme
        self.application = make_application()
        theme = Theme(self.application)
        theme.choose(Qt.ColorScheme.Dark if scheme == "dark" else Qt.ColorScheme.Light)
        self.bridge = Bridge(core_opener(demo.master_home))
        self.bridge.crashed.connect(lambda text: print(text, file=sys.stderr))
        context = Context(self.bridge, LiveState(self.bridge), theme)
        self.cluster = context.cluster
        self.window = MainWindow(context, WindowState(), demo.run)
        self.window.painted.connect(self.bridge.start)
        self.bridge.opened.connect(lambda nodes, runs: self.window.run_demo())
        self.gaps: list[float] = []
        self._last_s = time.perf_counter()
        self._watch = QTimer(self.window, interval=WATCH_MS)
        self._watch.timeout.connect(self._beat)
        self.window.painted.connect(self._start_watch)

    def watch(self) -> bool:
        """Take each picture at its moment; return whether the story ended well."""
        self.window.show()
        self._wait(lambda: self._run_step() >= 16)
        self._take("demo-overview")
        self._wait(lambda: self._step("Rejoin") == "now" and self._run_step() >= 34)
        self.window.open_run(self._run().run_id)
        self._pause(1.0)
        self._take("demo-run")
        self.window.go_to("overview")
        self._wait(lambda: self._step("Ask the model") in ("done", "failed"))
        self._pause(1.0)
        self._take("demo-end")
        self.window.close_quietly()
        self.bridge.stop()
        self.bridge.join()
        self.gaps.sort()
        worst = ", ".join(f"{gap * 1000:.0f}" for gap in self.gaps[-3:])
        median = self.gaps[len(self.gaps) // 2] * 1000
        print(f"Qt thread: a beat of {WATCH_MS} ms came after {median:.0f} ms, at worst {worst} ms")
        return all(state == "done" for _, state in self.window.overview.story._steps)

    def _run(self) -> Any:
        runs = self.cluster.run_list()
        return runs[0] if runs else None

    def _run_step(self) -> int:
        run = self._run()
        return (run.step or 0) if run else 0

    def _step(self, title: str) -> str:
        return dict(self.window.overview.story._steps).get(title, "todo")

    def _take(self, name: str) -> None:
        path = self.folder / f"{name}-{self.scheme}.png"
        self.window.grab().save(str(path))
        print(path, flush=True)
        self._last_s = time.perf_counter()  # taking the picture is not part of the figures

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() > end_s)

    def _wait(self, is_true: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_true():
            failed = any(state == "failed" for _, state in self.window.overview.story._steps)
            if time.monotonic() > end_s or failed:
                raise SystemExit(f"the demo did not come to this: {self.window.banner.message()}")
            self.application.processEvents()
            time.sleep(0.002)

    def _start_watch(self) -> None:
        self._last_s = time.perf_counter()
        self._watch.start()

    def _beat(self) -> None:
        now_s = time.perf_counter()
        self.gaps.append(now_s - self._last_s)
        self._last_s = now_s


if __name__ == "__main__":
    sys.exit(main())
