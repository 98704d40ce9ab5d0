"""Repairs for problems that a check has found: exact steps, who takes them, how to undo them.

The judge of a row attaches a `Repair` to it. A new repair is a function that returns it, here, in
`system_repairs.py` or in `network_repairs.py`, and `repair=` in the row. Each step has a probe for
its result, so that applying a repair twice changes nothing the second time. These modules do no
input or output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agents.contract.names import check_name
from agents.contract.node import NodeFacts
from agents.contract.repair import INSTALL_STEP_S, Probe, RepairStep
from app.shell_words import posix_command

Where = Literal["node", "windows", "person"]
"""Executor of the steps. `node`: the agent, through its connection; `windows`: the user, by running
`script` once in PowerShell on the node's Windows; `person`: the user at the PC, such as in its
firmware."""
# Otherwise packages may stop to ask questions, which nothing here answers.
_APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """One repair of one node."""

    id: str
    """Name of the kind of repair, such as `time-sync`; a node applies equal ones once."""
    title: str
    """Summary in a few words, as on a button's dialog."""
    explanation: str
    """Changes, benefit and cost, in plain sentences."""
    node: str = ""
    """Node to which it is applied; empty for that of the row."""
    where: Where = "node"
    steps: tuple[RepairStep, ...] = ()
    """Changes in their order, undone in the reverse order; only with `node`."""
    script: str = ""
    """PowerShell script with the node's own values; only with `windows`."""
    needs_restart: bool = False
    """True if the PC has to be restarted before the repair takes effect."""
    needs_admin: bool = field(init=False)
    """True if a step needs an administrator's rights."""

    def __post_init__(self) -> None:
        check_name("id", self.id)
        if (self.where == "node") != bool(self.steps):
            raise ValueError(f"repair {self.id} has {len(self.steps)} steps for {self.where}")
        if (self.where == "windows") != bool(self.script):
            raise ValueError(f"repair {self.id} needs a script where it is for Windows, only there")
        admin = self.where == "windows" or any(step.as_root for step in self.steps)
        object.__setattr__(self, "needs_admin", admin)

    @property
    def not_undone(self) -> tuple[str, ...]:
        """Steps that cannot be undone, in words; empty if all can be undone."""
        return tuple(step.says for step in self.steps if not step.can_undo)


def show_command(step: RepairStep, *, is_undo: bool = False) -> str:
    """Return the command of a step as typed in a shell; empty for an edit.

    >>> show_command(RepairStep(says="Mask sleep", run=("systemctl", "mask", "sleep.target")))
    'sudo systemctl mask sleep.target'
    """
    argv = step.undo if is_undo else step.run
    return posix_command(*(("sudo",) if step.as_root else ()), *argv) if argv else ""


def ask_administrator(repair: Repair) -> str:
    """Return the work for an administrator of the node, in one sentence."""
    commands = [show_command(step) for step in repair.steps if step.run]
    edits = [f"change {step.edit.path} ({step.says})" for step in repair.steps if step.edit]
    return f"Ask an administrator of that PC to do this: {'; '.join((*commands, *edits))}"


def package_steps(packages: tuple[str, ...]) -> tuple[RepairStep, ...]:
    """Return the steps that install packages of Debian or Ubuntu, one for each.

    Undoing removes the packages that were not there before; their dependencies stay.
    """
    query = ("dpkg-query", "-W", "-f", "${db:Status-Status}\\n")
    installed = r"(installed\s*)+"
    update = RepairStep(
        says="Read the lists of packages",
        run=(*_APT, "update"),
        undo_note="it only reads",
        done=Probe(argv=(*query, *packages), shows=installed),
        timeout_s=INSTALL_STEP_S,
    )
    steps = (
        RepairStep(
            says=f"Install {package}",
            run=(*_APT, "install", "-y", package),
            undo=(*_APT, "remove", "-y", package),
            done=Probe(argv=(*query, package), shows=installed),
            timeout_s=INSTALL_STEP_S,
        )
        for package in packages
    )
    return (update, *steps)


def install_compiler(python: str) -> Repair:
    """Return the repair that installs a C compiler and the headers of `python`, such as `3.12`."""
    return Repair(
        id="compiler",
        title="Install a compiler and Python's headers",
        explanation="torch then compiles the layers of a model for the node's GPUs, which makes "
        "training faster. Takes about 300 MB on disk.",
        steps=package_steps(("build-essential", f"python{python}-dev")),
    )


def install_driver() -> Repair:
    """Return the repair that installs the driver that Ubuntu recommends for the GPUs."""
    return Repair(
        id="gpu-driver",
        title="Install the NVIDIA driver",
        explanation="Ubuntu chooses the driver for the cards of this PC and installs it, about "
        "1 GB. The PC has to be restarted afterwards. With Secure Boot on, it asks for a password "
        "at that restart, on its own screen.",
        steps=(
            RepairStep(
                says="Install the driver that Ubuntu recommends",
                run=("ubuntu-drivers", "install"),
                timeout_s=INSTALL_STEP_S,
            ),
        ),
        needs_restart=True,
    )


def offer_driver(facts: NodeFacts) -> Repair | None:
    """Return the repair that installs a driver on this node, or None without Ubuntu's tool."""
    return install_driver() if facts.os.startswith("Ubuntu") and facts.wsl is None else None


def keep_driver_loaded() -> Repair:
    """Return the repair that keeps NVIDIA's driver loaded while no program uses a GPU."""
    return Repair(
        id="gpu-persistence",
        title="Keep the GPU driver loaded",
        explanation="Without a screen, the driver unloads itself when the last program ends, which "
        "makes the start of the next one slow and forgets power limits. An idle GPU then takes a "
        "few watts more. This lasts until a restart; the service nvidia-persistenced keeps it.",
        steps=(
            RepairStep(
                says="Switch on persistence mode",
                run=("nvidia-smi", "-pm", "1"),
                undo=("nvidia-smi", "-pm", "0"),
                done=Probe(
                    argv=("nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader"),
                    shows=r"(Enabled\s*)+",
                ),
            ),
        ),
    )
