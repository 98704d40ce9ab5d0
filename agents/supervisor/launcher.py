"""Start the ranks of one node; other ways to start them implement `Launcher`.

Ranks are started directly with torchrun's environment variables, not by torchrun, which requires
the same number of ranks on every node and hides how a rank ended. All output of a rank goes to its
log, including a failed import of our own package.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from typing import Protocol

from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.run_layout import rank_log
from agents.limits import count_cpus
from agents.rendezvous.interfaces import LOOPBACK_DEVICE, listen_on, name_interface
from agents.shared.files.python_child import python_variables
from agents.shared.login_variables import LEFT_OUT, find_odd, program_environ, visible_card
from agents.state import Identity, archive_path, boot_id, identify
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.ranks import RankProcess


class Launcher(Protocol):
    """Way to start the ranks of a node."""

    def start(
        self, attempt: AttemptFolder, intent: AttemptIntent, placement: RankPlacement
    ) -> RankProcess:
        """Start one rank as a child of this process.

        Raises:
            OSError: it cannot be started.
        """
        ...


class DirectLauncher:
    """Launcher that starts each rank as a process with torchrun's environment variables."""

    def start(
        self, attempt: AttemptFolder, intent: AttemptIntent, placement: RankPlacement
    ) -> RankProcess:
        """Start the rank in its own session, with its output in its log.

        Raises:
            OSError: the interpreter cannot be started or the log cannot be created.
        """
        log_path = attempt.file(rank_log(placement.rank))
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                [intent.python, "-m", "agents.trainer"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=rank_environ(attempt, intent, placement),
                cwd=attempt.folder,
                start_new_session=True,
            )
        finally:
            os.close(log)
        return RankProcess(
            rank=placement.rank,
            device=placement.device,
            # A rank that has exited already has no readable identity, but is still our child.
            identity=identify(process.pid) or Identity(process.pid, 0, boot_id()),
            attempt=attempt,
            process=process,
            started_s=time.monotonic(),
        )


def rank_environ(
    attempt: AttemptFolder, intent: AttemptIntent, placement: RankPlacement
) -> dict[str, str]:
    """Return the complete environment of one rank."""
    num_local = sum(r.node == intent.node for r in intent.ranks)
    num_threads = intent.num_threads or choose_num_threads(num_local)
    environ = {
        **program_environ(os.environ),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of NVML, which our device names follow
        # The supervisor ends a hanging rank with SIGABRT to get its stacks into the log.
        "PYTHONFAULTHANDLER": "1",
        # The last output of a killed rank must reach its log.
        "PYTHONUNBUFFERED": "1",
        **intent.environ,
        # After the user's variables, which must not hide a rank from the sweep.
        **attempt.tag.environ(),
        "RACKLESS_AGENT_HOME": str(attempt.home.path),
        # Also after them: neither they nor the user's shell may change what a rank imports.
        **python_variables(archive_path()),
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(len(intent.ranks)),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": intent.master_address,
        "MASTER_PORT": str(intent.master_port),
        "OMP_NUM_THREADS": str(num_threads),
        # By its UUID, so that lease, sensors and computation are those of one card.
        "CUDA_VISIBLE_DEVICES": visible_card(placement.device, placement.device_id),
    }
    if len(intent.ranks) > 1:
        environ.update(listen_on(choose_interface(intent)))
    return {**environ, LEFT_OUT: list_left_out(environ)}


def list_left_out(environ: Mapping[str, str]) -> str:
    """Return the names of the login's variables that a rank does not get, separated by commas.

    Args:
        environ: environment of the rank.
    """
    # Starts of Rackless's own processes override those of Python in any case.
    own = python_variables()
    return ", ".join(
        name
        for name in find_odd(os.environ)
        if name not in own and environ.get(name) != os.environ[name]
    )


def choose_interface(intent: AttemptIntent) -> str:
    """Return the interface for the ranks of this node: loopback if it has all ranks.

    Raises:
        ExpectedError: no interface of this node has its address in the intent.
    """
    if all(place.node == intent.node for place in intent.ranks):
        return LOOPBACK_DEVICE
    return name_interface(intent.address, intent.interface)


def choose_num_threads(num_local: int) -> int:
    """Return the number of CPU threads of a rank: its share of the cores, at most OMP_NUM_THREADS.

    Several nodes on one PC limit themselves by OMP_NUM_THREADS at login: three ranks with two
    threads each on two cores take ten times as long as with one thread each.
    """
    share = max(1, count_cpus() // num_local)
    named = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(named)) if named.isdigit() and int(named) else share
