"""Cold start of the window beside that of a bare QLabel: `python -m tests.bench.bench_start`.

Each is a fresh interpreter, offscreen; the clock runs from before the interpreter starts until the
first frame is painted. Medians, and the ratio between the two.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 7
LIMIT_S = 1.5
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
    bridge.opened.connect(lambda nodes, runs: window.close_quietly())
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
        begin_s = time.time()
        result = subprocess.run(
            [sys.executable, "-c", WINDOW, home],
            check=True,
            env=_environ(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
    moments = dict(line.split() for line in result.stdout.splitlines())
    return float(moments["painted"]) - begin_s, float(moments["opened"]) - begin_s


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
    print(f"below {LIMIT_S} s: {'yes' if painted_s < LIMIT_S else 'NO'}")
    return 0 if painted_s < LIMIT_S else 1


def _environ() -> dict[str, str]:
    return {**os.environ, "QT_QPA_PLATFORM": "offscreen"}


if __name__ == "__main__":
    sys.exit(main())
