"""Watch the temperature of this rank's GPU in a thread, and request pauses of the run.

The training loop pauses with all ranks together (`Loop`), since ranks that wait alone in a
collective look like a hang. The power limit is restored when the rank ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from agents.contract.node import GpuFacts, GpuSample
from agents.telemetry.gpu import GpuReader, open_gpus
from agents.telemetry.heat import HeatJudge
from agents.telemetry.recorder import load_nvml
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.step_control import HotGpu, RankControl

PERIOD_S = 2.0
"""Time between two readings of the GPU, in seconds."""
POWER_SHARE = 0.9
"""Fraction of the power limit that one reduction leaves."""
MIN_POWER_SHARE = 0.6
"""Minimum fraction of the first power limit."""


class Journal(Protocol):
    def write(self, kind: str, **fields: object) -> None: ...


class HeatWatch:
    """Reads one GPU, warns users in the journal, and sets `control.hot_gpu`.

    Args:
        gpus: GPUs of this PC.
        facts: facts of the GPU on which this rank trains.
        attempt: source of the rule and the node.
        journal: journal of this rank.
        control: control requests of this rank.
        now_s: monotonic clock, in seconds.
    """

    def __init__(
        self,
        gpus: GpuReader,
        facts: GpuFacts,
        attempt: RankAttempt,
        journal: Journal,
        control: RankControl,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = gpus
        self._facts = facts
        self._node = attempt.placement.node
        self._journal = journal
        self._control = control
        self._now_s = now_s
        self._judge = HeatJudge(attempt.intent.when_hot, facts.slowdown_celsius)
        # Power limit before the first reduction, in watts; None before one.
        self._first_limit_w: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heat", daemon=True)

    def start(self) -> None:
        """Start to watch the GPU."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and restore a lowered power limit."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD_S)
        if self._first_limit_w is not None:
            self._gpus.set_power_limit(self._facts.uuid, self._first_limit_w)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.look()

    def look(self) -> None:
        """Read the GPU once, and act on its temperature."""
        sample = self._gpus.sample_one(self._facts.uuid)
        if sample is None:
            return
        action = self._judge.judge(sample, self._now_s())
        if action == "warn":
            self._warn(sample)
        elif action == "limit":
            self._lower_power(sample)
        elif action == "pause":
            self._pause(sample)
        elif action == "go_on":
            self._control.hot_gpu = None

    @property
    def _name(self) -> str:
        return f"GPU {self._facts.index} of {self._node} ({self._facts.name})"

    def _warn(self, sample: GpuSample) -> None:
        self._journal.write(
            "warning",
            message=f"{self._name} is too hot: at {_show(sample)} heat holds its clock down, and "
            "all ranks wait for it.",
            hint="Check its fans and the air flow. The setting when_hot makes runs wait for it "
            "(wait) or lowers its power limit (limit)",
        )

    def _pause(self, sample: GpuSample) -> None:
        celsius, until_celsius = sample.temperature_celsius, self._judge.until_celsius
        if celsius is not None and until_celsius is not None:
            self._control.hot_gpu = HotGpu(
                gpu=self._name, celsius=celsius, until_celsius=until_celsius
            )

    def _lower_power(self, sample: GpuSample) -> None:
        """Lower the power limit by a tenth; if that is impossible, say how to, and wait instead."""
        limit_w = sample.power_limit_w
        # The card reports no limit, so it cannot be lowered.
        if limit_w is None:
            self._judge.rule = "wait"
            return
        first_w = self._first_limit_w or limit_w
        least_w = max(
            MIN_POWER_SHARE * first_w, self._gpus.read_least_power_w(self._facts.uuid) or 0.0
        )
        lower_w = float(round(max(POWER_SHARE * limit_w, least_w)))
        # Already at the lowest allowed limit.
        if lower_w >= limit_w:
            self._judge.rule = "wait"
        elif self._gpus.set_power_limit(self._facts.uuid, lower_w):
            self._first_limit_w = first_w
            self._journal.write(
                "warning",
                message=f"{self._name} is too hot ({_show(sample)}): its power limit is "
                f"{lower_w:.0f} W until the run ends, down from {limit_w:.0f} W.",
                hint="",
            )
        else:
            self._judge.rule = "wait"
            self._journal.write(
                "warning",
                message=f"{self._name} is too hot ({_show(sample)}), and only an administrator "
                "may lower its power limit. The run waits for it to cool down instead.",
                hint=f"On that PC: sudo nvidia-smi -i {self._facts.index} -pl {lower_w:.0f}  "
                "(with WSL: the same without sudo, in a Windows terminal of an administrator)",
            )


@contextlib.contextmanager
def watching_heat(attempt: RankAttempt, journal: Journal, control: RankControl) -> Iterator[None]:
    """Watch the GPU of this rank inside the block; do nothing on a CPU."""
    watch = _open(attempt, journal, control)
    if watch is None:
        yield
        return
    watch.start()
    try:
        yield
    finally:
        watch.close()


def _open(attempt: RankAttempt, journal: Journal, control: RankControl) -> HeatWatch | None:
    # The device's index may differ between CUDA and NVML; the UUID does not.
    uuid = attempt.placement.device_id
    home = os.environ.get("RACKLESS_AGENT_HOME", "")
    if uuid == "cpu" or not home:
        return None
    try:
        gpus = open_gpus(lambda: load_nvml(Path(home, "agents")))
        facts = next((gpu for gpu in gpus.read_facts() if gpu.uuid == uuid), None)
    # No driver, or not started from an agent's archive.
    except (OSError, ImportError, RuntimeError):
        return None
    return HeatWatch(gpus, facts, attempt, journal, control) if facts else None


def _show(sample: GpuSample) -> str:
    return f"{sample.temperature_celsius:.0f} degrees Celsius"
