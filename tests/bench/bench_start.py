"""Cold start of the window beside that of a bare QLabel: `python -m tests.bench.bench_start`.

Each is a fresh interpreter, offscreen or under the QT_QPA_PLATFORM that is set; the clock runs from
before the interpreter starts until the first frame is painted. Medians, and the ratio between the
two. Then with this PC as a node: until the window is painted with figures of now (agent's own start
included; the recorder of an earlier start, which is there from the second start on, is killed).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.nodes.transport.loopback import power_cut

REPEATS = 7
LIMIT_S = 1.5
LIVE_LIMIT_S = 3.0
NUM_LIVE = 5
ROOT = Path(__file__).resolve().parents[2]

LABEL = """
import sys
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication, QLabel
class Label(QLabel):
    def paintEvent(self, event):
        super().paintEvent(event)
        QTimer.singleShot(0, application.quit)
application = QApplication([])
label = Label("hello")
label.resize(1280, 800)
label.show()
application.exec()
"""

WINDOW = """
import sys, time
from pathlib import Path
from app.gui import application as module
connect_life = module._connect_life
def connect(application, bridge, window):
    connect_life(application, bridge, window)
    window.painted.connect(lambda: print("painted", time.time()))
    bridge.opened.connect(lambda nodes, runs: print("opened", time.time()))
    if sys.argv[2] == "opened":
        bridge.opened.connect(lambda nodes, runs: window.close_quietly())
    def look(events):
        if any(not event.replayed for event in events) and not window.is_over:
            window.grab()
            print("live", time.time())
            window.close_quietly()
    bridge.sampled.connect(look)
module._connect_life = connect
sys.exit(module.open_window(Path(sys.argv[1])))
"""


def time_label() -> float:
    """Return the seconds until a bare label is painted."""
    begin_s = time.time()
    subprocess.run([sys.executable, "-c", LABEL], check=True, env=_environ())
    return time.time() - begin_s


def time_window() -> tuple[float, float]:
    """Return the seconds until the window is painted, and until the core behind it is open."""
    with tempfile.TemporaryDirectory() as home:
        moments = _open_window(home, "opened")
    return moments["painted"], moments["opened"]


def time_live() -> float:
    """Return the seconds until the window is painted with the first live figures of this PC."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**_environ(), "HOME": folder, "RACKLESS_HOME": f"{folder}/master"}
        command = [sys.executable, "-m", "app", "nodes", "add", "this-pc", "--local"]
        subprocess.run(command, check=True, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL)
        power_cut(Path(folder))
        try:
            return _open_window(f"{folder}/master", "live", environ)["live"]
        finally:
            power_cut(Path(folder))


def _open_window(home: str, until: str, environ: dict[str, str] | None = None) -> dict[str, float]:
    """Return seconds until each moment, up to `until`, when the window closes."""
    begin_s = time.time()
    result = subprocess.run(
        [sys.executable, "-c", WINDOW, home, until],
        check=True,
        env=environ or _environ(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = (line.split() for line in result.stdout.splitlines())
    return {name: float(moment_s) - begin_s for name, moment_s in lines}


def main() -> int:
    """Print the medians and their ratio; return 0 if the window is there in time."""
    labels = [time_label() for _ in range(REPEATS)]
    windows = [time_window() for _ in range(REPEATS)]
    label_s = statistics.median(labels)
    painted_s = statistics.median(painted for painted, _ in windows)
    opened_s = statistics.median(opened for _, opened in windows)
    print(f"bare label painted and ended  {label_s:.3f} s (median of {REPEATS})")
    print(f"window painted                {painted_s:.3f} s, first run {windows[0][0]:.3f} s")
    print(f"core open behind it           {opened_s:.3f} s")
    print(f"window / label                {painted_s / label_s:.2f}")
    live_s = statistics.median(time_live() for _ in range(NUM_LIVE))
    print(f"painted with live figures     {live_s:.3f} s (median of {NUM_LIVE})")
    is_met = painted_s < LIMIT_S and live_s < LIVE_LIMIT_S
    print(f"below {LIMIT_S} s and {LIVE_LIMIT_S} s: {'yes' if is_met else 'NO'}")
    return 0 if is_met else 1


def _environ() -> dict[str, str]:
    return {"QT_QPA_PLATFORM": "offscreen", **os.environ}


if __name__ == "__main__":
    sys.exit(main())
