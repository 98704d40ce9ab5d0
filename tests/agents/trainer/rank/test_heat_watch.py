"""A hot GPU, played by an NVML of the test's own: what is reported, lowered, and paused."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agents.contract.run import HeatRule
from agents.telemetry.gpu import GpuReader
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.heat_watch import PERIOD_S, HeatWatch
from agents.trainer.rank.step_control import HotGpu, RankControl
from tests.agents.trainer.ranks import Run, finish, make_spec, start_rank, wait_until
from tests.fakes.nvml import FakeCard, FakeNvml

HOT = 0x20
NAME = "GPU 0 of here (NVIDIA GeForce RTX 4070)"


@dataclass
class Lines:
    lines: list[dict[str, Any]] = field(default_factory=list)

    def write(self, kind: str, **fields: object) -> None:
        self.lines.append({"kind": kind, **fields})


class Site:
    """One card and its watch, with a clock of the test."""

    def __init__(self, folder: Path, rule: HeatRule, card: FakeCard) -> None:
        self.card, self.journal = card, Lines()
        self.control = RankControl(folder, 0)
        self.now_s = 0.0
        intent = Run(folder / "run", folder, make_spec()).intend(when_hot=rule)
        gpus = GpuReader(FakeNvml(card))
        self.watch = HeatWatch(
            gpus,
            gpus.read_facts()[0],
            RankAttempt(folder=folder, intent=intent, rank=0),
            self.journal,
            self.control,
            lambda: self.now_s,
        )

    def pass_minutes(self, number: int) -> None:
        for _ in range(int(number * 62 / PERIOD_S)):
            self.watch.look()
            self.now_s += PERIOD_S

    @property
    def limit_w(self) -> float:
        return float(self.card.values["nvmlDeviceGetEnforcedPowerLimit"] / 1000)


def make_card(*, celsius: int, throttle: int = 0, takes_limits: bool = True) -> FakeCard:
    card = FakeCard(throttle=throttle, takes_limits=takes_limits)
    card.values["nvmlDeviceGetTemperature"] = celsius
    card.values["nvmlDeviceGetTemperatureThreshold"] = 95
    card.values["nvmlDeviceGetPowerManagementLimitConstraints"] = [100_000, 220_000]
    return card


def test_the_default_warns_and_says_what_else_could_be_chosen(tmp_path):
    site = Site(tmp_path, "warn", make_card(celsius=84, throttle=HOT))
    site.pass_minutes(3)
    (line,) = site.journal.lines
    assert line["message"].startswith(f"{NAME} is too hot: at 84 degrees Celsius")
    assert "when_hot" in line["hint"]
    assert site.control.hot_gpu is None


def test_a_card_at_its_slowdown_temperature_is_waited_for(tmp_path):
    site = Site(tmp_path, "warn", make_card(celsius=96))
    site.watch.look()
    assert site.control.hot_gpu == HotGpu(gpu=NAME, celsius=96.0, until_celsius=86.0)
    assert site.control.poll()["too_hot"]
    site.card.values["nvmlDeviceGetTemperature"] = 85
    site.watch.look()
    assert site.control.hot_gpu is None


def test_the_power_limit_is_lowered_step_by_step_and_set_back_at_the_end(tmp_path):
    site = Site(tmp_path, "limit", make_card(celsius=84, throttle=HOT))
    limits = []
    for _ in range(5):
        site.pass_minutes(1)
        limits.append(site.limit_w)
    # Not below 60 % of 200 W; after that the run waits.
    assert limits == [180.0, 162.0, 146.0, 131.0, 120.0]
    assert site.journal.lines[0]["message"].endswith("180 W until the run ends, down from 200 W.")
    site.pass_minutes(2)
    assert site.control.hot_gpu is not None
    assert site.limit_w == 120.0
    site.watch.close()
    assert site.limit_w == 200.0


def test_a_driver_that_refuses_is_reported_with_the_command_and_the_run_waits(tmp_path):
    site = Site(tmp_path, "limit", make_card(celsius=84, throttle=HOT, takes_limits=False))
    site.pass_minutes(1)
    (line,) = site.journal.lines
    assert "sudo nvidia-smi -i 0 -pl 180 " in line["hint"]
    site.pass_minutes(1)
    assert site.control.hot_gpu == HotGpu(gpu=NAME, celsius=84.0, until_celsius=74.0)
    assert len(site.journal.lines) == 1


def be_hot_for_a_while(environ: dict[str, str]) -> None:
    """Be a rank whose GPU is too hot after its third step, for as long as the test says."""
    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.loop import Loop

    do_step, flag = Loop._do_step, Path(os.environ["HOT_FLAG"])

    def heat(self, step):
        result = do_step(self, step)
        if step == 3:
            hot = HotGpu(gpu="GPU 0 of here (x)", celsius=96.0, until_celsius=86.0)
            flag.touch()
            self._context.control.hot_gpu = hot
            threading.Thread(target=cool_down, args=(self._context.control,), daemon=True).start()
        return result

    def cool_down(control: RankControl) -> None:
        while flag.exists():
            time.sleep(0.05)
        control.hot_gpu = None

    Loop._do_step = heat  # type: ignore[method-assign]
    os._exit(main())


@pytest.mark.parametrize("end", ["cooled", "stopped"])
def test_all_ranks_pause_together_until_it_is_cooler_or_a_person_stops_the_run(
    tmp_path, tiny_model, end
):
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=6), 2)
    intent, flag = run.intend(), tmp_path / "hot"
    ranks = [
        start_rank(intent, 0, run.attempt_folder, {}),
        start_rank(intent, 1, run.attempt_folder, {"HOT_FLAG": str(flag)}, be_hot_for_a_while),
    ]

    def phases(rank: int) -> list[str]:
        return [line["phase"] for line in run.journal(rank) if line["kind"] == "phase"]

    wait_until(lambda: all("cooling" in phases(rank) for rank in (0, 1)))
    time.sleep(1.5)
    assert max(run.steps()) == 4, "ranks agree with the statistics of the next step"
    if end == "cooled":
        flag.unlink()
    else:
        ranks[0].terminate()
    assert finish(ranks) == [0, 0], run.read_log(0)
    assert max(run.steps()) == (6 if end == "cooled" else 5)
    kinds = {"too_hot", "cooled"}
    lines = {rank: [x for x in run.journal(rank) if x["kind"] in kinds] for rank in (0, 1)}
    assert lines[0] == []
    began, ended = lines[1]
    assert (began["gpu"], began["step"], began["celsius"]) == ("GPU 0 of here (x)", 4, 96.0)
    assert (ended["kind"], ended["step"]) == ("cooled", 4)
    assert ended["paused_s"] > 1.4
