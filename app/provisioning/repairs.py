"""What repairs a problem that a check has found: exact steps, who may take them, how to undo them.

The judge of a row attaches a `Repair` to it. Adding one takes a function below that returns it, and
`repair=` in the row. Steps say how to see that they are in place already, so that applying a repair
twice changes nothing the second time. Nothing here does any input or output.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Literal

from agents.contract.names import check_name
from agents.contract.repair import INSTALL_STEP_S, Probe, RepairStep

Where = Literal["node", "windows", "person"]
"""Who takes the steps. `node`: the agent, through its connection; `windows`: a person, by running
`script` once in PowerShell on the node's Windows; `person`: somebody at the PC, such as in its
firmware."""
_APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """One repair of one node."""

    id: str
    """Name of the kind of repair, such as `time-sync`; equal ones on a node are applied once."""
    title: str
    """What it does in a few words, as on a button's dialog."""
    explanation: str
    """What changes, why it helps and what it costs, in plain sentences."""
    where: Where = "node"
    steps: tuple[RepairStep, ...] = ()
    """Changes in their order; they are undone in the reverse order. Only with `node`."""
    script: str = ""
    """PowerShell script with the node's own values; only with `windows`."""
    needs_restart: bool = False
    """Whether the PC has to be restarted before it helps."""
    needs_admin: bool = field(init=False)
    """Whether an administrator's rights are needed for one of its steps."""

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
        """What undoing does not take back, in words; empty: it takes everything back."""
        return tuple(step.says for step in self.steps if not step.can_undo)


def show_command(step: RepairStep, *, is_undo: bool = False) -> str:
    """Return the command of a step as a person would type it; empty: it is an edit.

    >>> show_command(RepairStep(says="Mask sleep", run=("systemctl", "mask", "sleep.target")))
    'sudo systemctl mask sleep.target'
    """
    argv = step.undo if is_undo else step.run
    return shlex.join((*(("sudo",) if step.as_root else ()), *argv)) if argv else ""


def ask_administrator(repair: Repair) -> str:
    """Return what an administrator of the node has to do, in one sentence."""
    commands = [show_command(step) for step in repair.steps if step.run]
    edits = [step.says for step in repair.steps if step.edit is not None]
    return f"Ask an administrator of that PC to do this: {'; '.join((*commands, *edits))}"


def synchronise_clock() -> Repair:
    """Return the repair that has the system keep its clock right."""
    return Repair(
        id="time-sync",
        title="Synchronise the clock",
        explanation="The system asks time servers from now on and corrects its clock. Logs of "
        "several nodes can then be compared. It takes up to a minute.",
        steps=(
            RepairStep(
                says="Switch on the system's time synchronisation",
                run=("timedatectl", "set-ntp", "true"),
                undo=("timedatectl", "set-ntp", "false"),
                done=Probe(argv=("timedatectl", "show", "-p", "NTP", "--value"), shows="yes"),
            ),
        ),
    )


def install_packages(id_: str, title: str, explanation: str, packages: tuple[str, ...]) -> Repair:
    """Return the repair that installs packages of Debian or Ubuntu, each a step of its own.

    Undoing removes those that were not there before; what they needed themselves stays.
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
    steps = [
        RepairStep(
            says=f"Install {package}",
            run=(*_APT, "install", "-y", package),
            undo=(*_APT, "remove", "-y", package),
            done=Probe(argv=(*query, package), shows=installed),
            timeout_s=INSTALL_STEP_S,
        )
        for package in packages
    ]
    return Repair(id=id_, title=title, explanation=explanation, steps=(update, *steps))


def install_compiler(python: str) -> Repair:
    """Return the repair that installs a C compiler and the headers of `python`, such as `3.12`."""
    return install_packages(
        "compiler",
        "Install a compiler and Python's headers",
        "torch then compiles the layers of a model for the node's GPUs, which makes training "
        "faster. Takes about 300 MB on disk.",
        ("build-essential", f"python{python}-dev"),
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


def set_mtu(interface: str, before: int, after: int) -> Repair:
    """Return the repair that gives an interface packets of `after` bytes instead of `before`."""
    device = ("ip", "link", "set", "dev", interface, "mtu")
    return Repair(
        id=f"mtu-{interface}",
        title=f"Send packets of {after} bytes",
        explanation=f"All PCs of one network need the same size, or large packets are lost. This "
        f"lasts until {interface} is set up again, such as by a restart. To keep it, with "
        f"NetworkManager: nmcli connection modify NAME 802-3-ethernet.mtu {after}; with netplan: "
        f"netplan set ethernets.{interface}.mtu={after}.",
        steps=(
            RepairStep(
                says=f"Set the packet size of {interface} from {before} to {after} bytes",
                run=(*device, str(after)),
                undo=(*device, str(before)),
                done=Probe(argv=("cat", f"/sys/class/net/{interface}/mtu"), shows=str(after)),
            ),
        ),
    )
