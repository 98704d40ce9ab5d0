"""Faults of the files of a run: cut short, deleted, no longer writable, or older than the run."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

from agents.contract.run_layout import (
    ATTEMPTS,
    CHECKPOINTS,
    INTENT_FILE,
    SUPERVISOR_JOURNAL,
    rank_journal,
)
from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.processes import find_part, is_running, send
from tests.campaign.site import wait_until

if TYPE_CHECKING:
    from tests.campaign.case import Case


def newest_attempt(case: Case) -> Path:
    """Return the folder of the newest attempt on the victim."""
    folder = case.site.run_folder(case.node, case.run_id) / ATTEMPTS
    return max(folder.iterdir(), key=lambda path: int(path.name))


class JournalCut(Fault):
    name = "journals-cut"
    does = "a rank dies, its journal and its supervisor's lose half of their last line"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "node {node}", "sigkill"),)
        return Expectation(named=named, within_s=1.0, recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        attempt, ranks = newest_attempt(case), case.find("rank")
        # Before the kill, whose own line is the one that names it.
        cut_last_line(attempt / SUPERVISOR_JOURNAL)
        send(ranks, SIGKILL)
        wait_until(lambda: not any(map(is_running, ranks)), "the end of the rank", 5.0)
        cut_last_line(attempt / rank_journal(case.rank))


def cut_last_line(journal: Path) -> None:
    """Cut half of the last line of a journal."""
    data = journal.read_bytes()
    last = data.rstrip(b"\n").rpartition(b"\n")[2]
    os.truncate(journal, len(data) - max(len(last) // 2, 1))


class ReadOnly(Fault):
    name = "run-folder-read-only"
    does = "folder of the run on a node cannot be written for a while"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(6.0, 12.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            named=(("{node}", "read-only"),), within_s=6.0, recovery="untouched", alarms=True
        )

    def do(self, case: Case) -> None:
        self._folder = str(case.site.run_folder(case.node, case.run_id))
        case.site.in_node(case.node, "mount", "--bind", self._folder, self._folder)
        case.site.in_node(case.node, "mount", "-o", "remount,bind,ro", self._folder)

    def undo(self, case: Case) -> None:
        case.site.in_node(case.node, "umount", "-l", self._folder)


class NoCheckpoints(Fault):
    name = "checkpoints-deleted"
    does = "folder of all checkpoints of a node that has some deleted while it trains"

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def do(self, case: Case) -> None:
        # Of three nodes two hold copies.
        nodes = (case.node, *case.others)
        folders = [case.site.run_folder(node, case.run_id) / CHECKPOINTS for node in nodes]
        shutil.rmtree(next(folder for folder in folders if folder.is_dir()))


class NoCheckpointsAllDie(NoCheckpoints):
    name = "checkpoints-deleted-all-die"
    does = "folder of all checkpoints of a node deleted, all ranks die"

    @property
    def expectation(self) -> Expectation:
        # The other node's copy is taken; which copies there are is no news.
        return Expectation(recovery="recovered", alarms=True)

    def do(self, case: Case) -> None:
        for node in case.site.nodes:
            send(find_part(case.site.cluster, node, "rank"), SIGKILL)
        super().do(case)


class NoRunFolder(Fault):
    name = "run-folder-deleted"
    does = "folder of the run on a node deleted while it trains"

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            named=(("{node}", "folder"), ("{node}", "was lost"), ("{node}", "lost its part")),
            within_s=15.0,
            recovery="recovered",
            back_s=40.0,
            alarms=True,
        )

    def do(self, case: Case) -> None:
        # As often as it needs: files are written meanwhile.
        folder = case.site.run_folder(case.node, case.run_id)
        for _ in range(20):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                return
            time.sleep(0.02)


class NoKey(Fault):
    name = "run-key-deleted"
    does = "file with the key and the orders of a run on a node deleted, a rank dies"

    @property
    def expectation(self) -> Expectation:
        named = (("rank {rank}", "{node}"), ("{node}", "was lost"), ("{node}", "lost its part"))
        return Expectation(
            named=named, within_s=10.0, recovery="recovered", back_s=40.0, alarms=True
        )

    def do(self, case: Case) -> None:
        (newest_attempt(case) / INTENT_FILE).unlink()
        send(case.find("rank"), SIGKILL)


class OlderStore(Fault):
    name = "older-store"
    does = "database of the master replaced by a copy from before the run"
    is_at_start = True
    lasts_s = 1.0

    @property
    def expectation(self) -> Expectation:
        return Expectation()

    def prepare(self, case: Case) -> None:
        site = case.site
        site.keeper.stop()  # so that all is in the one file
        self._copies = {path: path.read_bytes() for path in site.master.home.glob("*.sqlite*")}
        assert self._copies, "the master has no database"
        site.keeper.start()

    def do(self, case: Case) -> None:
        case.site.keeper.stop()
        for path in case.site.master.home.glob("*.sqlite*"):
            path.unlink()
        for path, data in self._copies.items():
            path.write_bytes(data)

    def undo(self, case: Case) -> None:
        case.site.keeper.start()


KINDS = (JournalCut, ReadOnly, NoCheckpoints, NoCheckpointsAllDie, NoRunFolder, NoKey, OlderStore)
