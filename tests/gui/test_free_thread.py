"""The Qt thread stays free while real nodes fail: a link is cut, a disk fills up, a PC dies.

A watchdog measures each turn of the Qt loop, and so how late a click would be answered. Waiting for
a core that other processes have is left out, since three training ranks share two cores here and
the window has no part in that; so is waiting for a thread that has lost its core with Python's lock
in hand. The limit for the worst turn is twice that of 99 in 100.
"""

from __future__ import annotations

import getpass
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication

from app.core.action import CoreApi, Report
from app.core.library import ReadRunFile
from app.core.new_nodes import AddNode
from app.core.nodes import SetUpNode
from app.core.runs import RunAnnounced, StartRun
from app.gui.kit.theme import Theme
from app.nodes.node import SshAddress
from app.nodes.transport.loopback import power_cut
from tests.agents.small_disk import fill, small_disk
from tests.fakes.site import Site
from tests.gui.real_stage import PATIENCE_S, PAUSE_S, RealStage

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]

NAMES = ("alpha", "beta", "gamma")
USUAL_LIMIT_S = 0.05
WORST_LIMIT_S = 0.1
DISK_BYTES = 64 << 20
NUM_STEPS = 5000
ROOM_BYTES = 300_000
"""Left on the full disk: enough to tell of it, too little for a checkpoint."""
STEP_S = 0.25
"""From one click to the next."""
EVENTS_TAB, LOG_TAB = 1, 2


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    with small_disk(site.node_home("alpha"), DISK_BYTES):
        for name in NAMES:
            site.start_node(name)
        yield site
        site.close()


@pytest.fixture
def stage(site: Site, application: QApplication, theme: Theme) -> Iterator[RealStage]:
    stage = RealStage(application, theme, site.home)
    yield stage
    stage.end()
    assert stage.crashes == []


def test_failing_nodes_never_block_the_window(site: Site, stage: RealStage) -> None:
    add_nodes(site, stage)
    run_id = start_run(site, stage)
    walk(stage, run_id, lambda: stage.cluster.runs[run_id].loss is not None, "it trains")
    stage.turns.clear()  # each page was made by now, which happens once
    cut_a_link(site, stage, run_id)
    fill_a_disk(site, stage, run_id)
    kill_a_pc(site, stage, run_id)
    turns = sorted(stage.turns)
    usual_s, worst_s = turns[len(turns) * 99 // 100], turns[-1]
    told = f"{len(turns)} turns: p99 {usual_s * 1000:.1f} ms, worst {worst_s * 1000:.1f} ms"
    print(told)
    assert usual_s < USUAL_LIMIT_S, told
    assert worst_s < WORST_LIMIT_S, told


def add_nodes(site: Site, stage: RealStage) -> None:
    async def add(core: CoreApi, name: str) -> None:
        server = site.servers[name]
        address = SshAddress(host="127.0.0.1", port=server["port"], user=getpass.getuser())
        address = replace(address, key=site.key)
        shown = server["fingerprint"]
        await core.do(AddNode(name=name, address=address, accept_host_key=shown))
        await core.do(SetUpNode(name=name, python=sys.executable))

    ready: list[str] = []
    for name in NAMES:
        stage.bridge.run(
            lambda core, report, name=name: add(core, name),
            lambda report, name=name: ready.append(name),
        )
    stage.until(lambda: len(ready) == len(NAMES), "all nodes can train")


def start_run(site: Site, stage: RealStage) -> str:
    path = site.write_run_file(NUM_STEPS, nodes=list(NAMES), recovery="resume")
    started: list[str] = []

    async def start(core: CoreApi, report: Report) -> None:
        spec = await core.do(ReadRunFile(path=path))
        await core.do(StartRun(spec=spec), report)

    def hear(event: object) -> None:
        if isinstance(event, RunAnnounced):
            started.append(event.run_id)

    stage.bridge.run(start, progress=hear)
    stage.until(lambda: started, "the run has an id")
    return started[0]


def walk(stage: RealStage, run_id: str, is_true: Callable[[], object], what: str) -> None:
    """Go from page to page, as somebody does who wants to know what is wrong, until `is_true`."""
    window = stage.window
    window.open_run(run_id)
    tabs = window.run_page().tabs
    deeds = itertools.cycle(
        (
            lambda: tabs.setCurrentIndex(EVENTS_TAB),
            lambda: tabs.setCurrentIndex(LOG_TAB),
            window.refresh,
            lambda: window.go_to("nodes"),
            lambda: window.go_to("overview"),
            lambda: window.go_to("runs"),
            lambda: window.open_run(run_id),
        )
    )
    next_s, end_s = 0.0, time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end_s, f"{what}; {stage.told()}"
        if time.monotonic() > next_s:
            next_s = time.monotonic() + STEP_S
            stage.turn(next(deeds))
        stage.turn()
        time.sleep(PAUSE_S)


def cut_a_link(site: Site, stage: RealStage, run_id: str) -> None:
    """Freeze a node's SSH server: to TCP that looks like a cable that was pulled out."""
    nodes, pid = stage.cluster.nodes, site.servers["beta"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        walk(stage, run_id, lambda: nodes["beta"].state == "unreachable", "beta is cut off")
    finally:
        os.kill(pid, signal.SIGCONT)
    walk(stage, run_id, lambda: nodes["beta"].state == "online", "beta is back")


def fill_a_disk(site: Site, stage: RealStage, run_id: str) -> None:
    events = stage.window.run_page().events

    def is_told() -> bool:
        # Again and again: a checkpoint that is removed right now makes room for the next one.
        fill(site.node_home("alpha"), ROOM_BYTES)
        return any("is full: a checkpoint needs" in event.text for event in events.rows())

    walk(stage, run_id, is_told, "the full disk is told")
    (site.node_home("alpha") / "filler").unlink()


def kill_a_pc(site: Site, stage: RealStage, run_id: str) -> None:
    power_cut(site.node_home("gamma"))
    runs, nodes = stage.cluster.runs, stage.cluster.nodes
    walk(stage, run_id, lambda: runs[run_id].state == "interrupted", "the run is broken off")
    walk(stage, run_id, lambda: nodes["gamma"].state == "unreachable", "gamma is gone")
