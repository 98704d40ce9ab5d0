"""Examine this node for the check, all subjects in parallel, each with its own time limit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agents.contract.requests.examination import Examination
from agents.node.examination.driver import read_driver
from agents.node.examination.network import read_network
from agents.node.examination.system import read_system
from agents.node.examination.wsl import read_wsl
from agents.node.facts import is_wsl


def examine(home: Path) -> Examination:
    """Return all facts about this node; `home` is the agent's folder.

    It takes a second, or at most 15 seconds if programs do not answer.
    """
    # Threads suffice, because most of the time is spent in other programs.
    with ThreadPoolExecutor(max_workers=4) as pool:
        system = pool.submit(read_system, home)
        network = pool.submit(read_network)
        driver = pool.submit(read_driver)
        wsl = pool.submit(read_wsl) if is_wsl() else None
        return Examination(
            system=system.result(),
            network=network.result(),
            driver=driver.result(),
            wsl=None if wsl is None else wsl.result(),
        )
