"""What runs beside a training run is what the kernel ends first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agents.program import OOM_SCORE, command

LOOK = """
from pathlib import Path
def main(arguments):
    print(Path("/proc/self/oom_score_adj").read_text().strip(), *arguments)
    return 7
"""


def test_a_job_is_ended_before_a_run_and_its_code_is_handed_on(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command(sys.executable, "look", "a", "b"),
        env={"PYTHONPATH": f"{root}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (7, [str(OOM_SCORE), "a", "b"]), done.stderr
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert own < OOM_SCORE
