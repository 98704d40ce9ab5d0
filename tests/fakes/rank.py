"""A training rank without torch, for tests of the supervisor: `FAKE_RANKS` selects its behaviour.

Stands in for the interpreter of the training environment, so it is started as
`rank.py -m agents.trainer`; it writes heartbeats and journals as the real trainer does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["RACKLESS_ATTEMPT_DIR"])
STEP_S = float(os.environ.get("FAKE_STEP_S", "0.05"))
INTERRUPT = "interrupt.json"
LOG_LINE = "rank {rank} says line {number} of many, each as long as this one\n"


def write_heartbeat(step: int, phase: str, generation: int = 0) -> None:
    beat = {"step": step, "phase": phase, "monotonic_s": time.monotonic(), "generation": generation}
    half = FOLDER / f".beat-{RANK}"
    half.write_text(json.dumps(beat))
    half.rename(FOLDER / f"rank-{RANK}.heartbeat")


def write_journal(kind: str, **fields: object) -> None:
    with open(FOLDER / f"rank-{RANK}.jsonl", "a") as file:
        file.write(json.dumps({"kind": kind, "time_s": time.time(), **fields}) + "\n")


def heed(handler: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def train(num_steps: int) -> None:
    """Take steps until they are done or a signal to stop comes."""
    stopped = []
    if threading.current_thread() is threading.main_thread():
        heed(lambda number, _: stopped.append(number))
    step = 0
    while step < num_steps and not stopped:
        step += 1
        write_heartbeat(step, "training")
        write_journal("step", step=step, loss=1.0 / step)
        time.sleep(STEP_S)
    write_journal(
        "finished",
        step=step,
        reason="stopped" if stopped else "completed",
        is_outside=stopped[:1] == [signal.SIGTERM] and not (FOLDER / "stop.json").exists(),
    )


def regroup() -> int:
    """Take steps until another rank is lost (`FAKE_CUT`), wait for the decision, and go on.

    If that file says `silent`, it notices nothing and waits, until its node interrupts that.
    """
    step, generation, stopped = 0, 0, []
    heed(lambda *_: stopped.append(True))
    while not stopped:
        if Path(os.environ["FAKE_CUT"]).exists() and not generation:
            while Path(os.environ["FAKE_CUT"]).read_text() and not (FOLDER / INTERRUPT).exists():
                time.sleep(0.02)
            write_heartbeat(step, "regrouping")
            while not (FOLDER / "regroup.json").exists():
                if (FOLDER / "loss.json").exists():
                    return survive(0.0)
                time.sleep(0.02)
            generation = json.loads((FOLDER / "regroup.json").read_text())["generation"]
            write_journal("regrouped", step=step, generation=generation)
        # A run that lost ranks stands at the step that all of them have done.
        step = step + 1 if generation else min(step + 1, 5)
        write_heartbeat(step, "training", generation)
        time.sleep(STEP_S)
    write_journal("finished", step=step, reason="stopped")
    return 0


def survive(save_s: float) -> int:
    """Wait for a rank that has gone, as in a collective; save for some time when asked."""
    heed(signal.SIG_IGN)
    write_heartbeat(4, "training")
    while not (FOLDER / "loss.json").exists():
        time.sleep(0.02)
    write_heartbeat(4, "saving")
    time.sleep(save_s)
    write_journal("checkpoint", step=4, at_loss=True)
    message = f"rank {RANK} (node a, cpu) lost its connection to another rank."
    write_journal("failed", message=message, hint="Look for the rank that ended first")
    return 3


def leave_daemon() -> None:
    """Start a grandchild in its own session that ignores SIGTERM."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    middle = f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', {code!r}]," + (
        " start_new_session=True)"
    )
    subprocess.run([sys.executable, "-c", middle], check=True)


def main(behaviour: str) -> int:
    if behaviour == "finish":
        train(5)
    elif behaviour == "train":
        train(10_000)
    elif behaviour == "daemon":
        leave_daemon()
        train(10_000)
    elif behaviour == "train_together":
        # Like the ranks of a real attempt, all of which fail once one of them is gone.
        threading.Thread(target=lambda: train(10_000), daemon=True).start()
        while not Path(os.environ["FAKE_CUT"]).exists():
            time.sleep(0.05)
        write_journal("failed", message="It lost its connection to another rank: reset.", hint="")
        return 3
    elif behaviour == "regroup":
        return regroup()
    elif behaviour == "deaf":
        heed(signal.SIG_IGN)
        write_heartbeat(1, "training")
        time.sleep(600)
    elif behaviour == "import":
        write_heartbeat(0, "starting")  # it heeds no signal yet
        time.sleep(600)
    elif behaviour == "load":
        heed(signal.SIG_IGN)
        write_heartbeat(0, "loading")
        time.sleep(600)
    elif behaviour == "hang":
        write_heartbeat(7, "training")
        time.sleep(600)
    elif behaviour == "fail":
        write_heartbeat(0, "loading")
        write_journal("failed", message="The model is not there.", hint="Copy it")
        return 3
    elif behaviour == "crash":
        write_heartbeat(3, "training")
        print("ValueError: no good", file=sys.stderr)
        return 1
    elif behaviour == "left_alone":
        write_heartbeat(3, "training")
        message = "rank 0 (node a, cpu) lost its connection to another rank: reset."
        write_journal("failed", message=message, hint="Look for the rank that ended first")
        return 3
    elif behaviour == "no_hub":
        write_journal("failed", message="Failed to connect to the hub.", hint="Go online")
        return 3
    elif behaviour == "peer_lost":
        write_heartbeat(3, "training")
        print("RuntimeError: [gloo] Connection reset by peer", file=sys.stderr)
        return 1
    elif behaviour == "killed":
        write_heartbeat(3, "training")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour.startswith("survive"):
        return survive(float(behaviour.removeprefix("survive ")))
    elif behaviour == "chatty":
        for number in range(20_000):
            sys.stdout.write(LOG_LINE.format(rank=RANK, number=number))
        train(3)
    elif behaviour == "endless":
        line = LOG_LINE.format(rank=RANK, number=0).encode() * 20_000
        for _ in range(100):
            os.write(1, line)
        train(10_000)
    elif behaviour == "environ":
        print(json.dumps(dict(os.environ)))
    return 0


if __name__ == "__main__":
    code = main(json.loads(os.environ["FAKE_RANKS"])[RANK])
    sys.stdout.flush()
    sys.stderr.flush()
    # While Python shuts down, a second signal would end the process as if nobody heeded it.
    os._exit(code)
