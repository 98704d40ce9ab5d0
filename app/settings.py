"""Persistent settings: each entry is declared once, with type, default and texts.

The settings page of the window and the table in the documentation are made from `SETTINGS`. The
file is JSON with only the entries that differ from their default, so that a better default of a
later version applies to all who never changed it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agents.shared.files.full_disk import advise_room, name_disk_error
from app.errors import UserError
from app.paths import replace_text

Value = str | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    key: str
    kind: Literal["choice", "number", "switch"]
    default: Value
    title: str
    description: str
    section: str
    choices: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    """Label of each choice."""
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    per_node: bool = False
    """True if a node may have its own value; only choices may."""

    def __post_init__(self) -> None:
        if self.per_node and self.kind != "choice":
            raise ValueError(f"{self.key} is a {self.kind}; only a choice may differ for a node")

    def checked(self, value: object) -> Value:
        """Return `value` if it is allowed.

        Raises:
            ValueError: it is not allowed; the message names key, value and limit.
        """
        if self.kind == "choice" and isinstance(value, str) and value in self.choices:
            return value
        if self.kind == "switch" and isinstance(value, bool):
            return value
        if self.kind == "number" and isinstance(value, (int, float)) and self._in_range(value):
            return float(value)
        raise ValueError(f"{self.key} is {value!r}; it must be {self._allowed()}")

    def _in_range(self, value: float) -> bool:
        # In Python `bool` is an `int`, but `true` is not a number in a settings file. NaN fails
        # both comparisons below.
        if isinstance(value, bool):
            return False
        return (self.minimum is None or value >= self.minimum) and (
            self.maximum is None or value <= self.maximum
        )

    def _allowed(self) -> str:
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "switch":
            return "true or false"
        return f"a number from {self.minimum} to {self.maximum}"


SETTINGS = (
    Setting(
        key="theme",
        kind="choice",
        default="system",
        choices=("system", "dark", "light"),
        labels=("Follow the system", "Dark", "Light"),
        title="Theme",
        description="Light or dark, or the same as the system.",
        section="Appearance",
    ),
    Setting(
        key="when_closed",
        kind="choice",
        default="end",
        choices=("end", "tray"),
        labels=("Quit Rackless", "Keep running in the tray"),
        title="Closing the window",
        description="Runs continue either way. In the tray, Rackless keeps watching them and "
        "notifies you. Without a tray on the desktop, closing quits.",
        section="Window and notifications",
    ),
    Setting(
        key="notify_finished",
        kind="switch",
        default=True,
        title="Notify when a run finishes",
        description="Shows a desktop notification if the window is not in front.",
        section="Window and notifications",
    ),
    Setting(
        key="notify_problems",
        kind="switch",
        default=True,
        title="Notify when a run fails or is interrupted, or a disk is nearly full",
        description="Includes the reason. Click it to open the run or node.",
        section="Window and notifications",
    ),
    Setting(
        key="notify_hot",
        kind="switch",
        default=True,
        title="Notify when a GPU or CPU gets hot",
        description="GPUs at 85 \xb0C or above, CPUs at 95 \xb0C or above. At most once every "
        "ten minutes for each.",
        section="Window and notifications",
    ),
    Setting(
        key="stop_grace_s",
        kind="number",
        default=120.0,
        minimum=1.0,
        maximum=3600.0,
        unit="s",
        title="Stop timeout",
        description="Seconds that a stopping run may take to write its checkpoint.",
        section="Runs",
    ),
    Setting(
        key="lost_after_s",
        kind="number",
        default=60.0,
        minimum=3.0,
        maximum=600.0,
        unit="s",
        title="Node timeout",
        description="Seconds without a response before a stalled run gives up on a node. Shorter "
        "outages restart nothing.",
        section="Runs",
    ),
    Setting(
        key="follow_addresses",
        kind="switch",
        default=False,
        title="Follow nodes to new addresses",
        description="Looks for a node that has been silent for a minute at the other addresses of "
        "this network, and uses the one with its host key and machine id.",
        section="Nodes",
    ),
    Setting(
        key="pc_power_w",
        kind="number",
        default=80.0,
        minimum=0.0,
        maximum=2000.0,
        unit="W",
        title="Power of a PC without its GPUs",
        description="While it trains, as a wattmeter shows it minus the GPUs. Plans add it to the "
        "energy of the GPUs.",
        section="Energy",
    ),
    Setting(
        key="price_per_kwh",
        kind="number",
        default=0.0,
        minimum=0.0,
        maximum=1000.0,
        title="Price of a kilowatt-hour",
        description="In your currency. Plans then show what the electricity of a run costs. 0 "
        "hides it.",
        section="Energy",
    ),
    Setting(
        key="when_hot",
        kind="choice",
        default="warn",
        choices=("warn", "wait", "limit"),
        labels=("Warn me", "Pause until it is cooler", "Lower its power limit"),
        per_node=True,
        title="When heat slows a GPU down",
        description="What a run does after a minute of it. A GPU that reaches its slowdown "
        "temperature pauses its run in any case. Only an administrator may lower power limits "
        "on most PCs. Holds for runs that start after the change.",
        section="Runs",
    ),
    Setting(
        key="recoveries_per_hour",
        kind="number",
        default=6.0,
        minimum=0.0,
        maximum=60.0,
        title="Recoveries per hour",
        description="How often a run is resumed automatically within an hour after it lost a rank "
        "or a node. 0 turns this off for all runs.",
        section="Runs",
    ),
)


class Settings:
    """Settings of one home. Reading never fails: a broken file gives defaults and a `problem`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {setting.key: setting for setting in SETTINGS}
        self.problem = ""
        self._values: dict[str, Value] = {}
        # Own values of nodes, by name of the node.
        self._of_nodes: dict[str, dict[str, Value]] = {}
        self._read()

    def get(self, key: str, node: str = "") -> Value:
        """Return a value, that of `node` if it has its own."""
        value = self._values.get(key, self._known[key].default)
        return self._of_nodes.get(node, {}).get(key, value)

    def of_nodes(self, key: str) -> dict[str, Value]:
        """Return the values of nodes that have their own, by name."""
        return {node: own[key] for node, own in self._of_nodes.items() if key in own}

    def number(self, key: str) -> float:
        return float(self.get(key))

    def set(self, key: str, value: object) -> None:
        """Check a value and store it durably.

        Raises:
            UserError: the value is not allowed, or the file cannot be written.
        """
        try:
            self._values[key] = self._known[key].checked(value)
        except ValueError as error:
            raise UserError(str(error), "Choose an allowed value.") from error
        self._write()

    def set_of_node(self, node: str, key: str, value: object | None) -> None:
        """Check and store the value of one node; None: reset it to that of all nodes.

        Raises:
            UserError: the value is not allowed, or the file cannot be written.
        """
        own = self._of_nodes.setdefault(node, {})
        try:
            if not self._known[key].per_node:
                raise ValueError(f"{key} is the same for all nodes")
            if value is None:
                own.pop(key, None)
            else:
                own[key] = self._known[key].checked(value)
        except ValueError as error:
            raise UserError(str(error), "Choose an allowed value.") from error
        self._write()

    def forget_node(self, node: str) -> None:
        """Delete the values of a removed node."""
        if self._of_nodes.pop(node, None):
            self._write()

    def _read(self) -> None:
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            self._values = self._checked(stored)
            of_nodes = stored.get("nodes", {})
            self._of_nodes = {node: self._checked(own) for node, own in of_nodes.items()}
        except FileNotFoundError:
            return
        # AttributeError: the file is valid JSON, but not an object.
        except (OSError, ValueError, AttributeError) as error:
            self.problem = f"{self._path} cannot be read ({error}); the defaults are used"
            self._values, self._of_nodes = {}, {}

    def _checked(self, stored: dict[str, object]) -> dict[str, Value]:
        # A key of another version is skipped, so that it does not invalidate the others.
        known = {key: value for key, value in stored.items() if key in self._known}
        return {key: self._known[key].checked(value) for key, value in known.items()}

    def _write(self) -> None:
        changed: dict[str, object] = {
            k: v for k, v in self._values.items() if v != self._known[k].default
        }
        if of_nodes := {node: own for node, own in self._of_nodes.items() if own}:
            changed["nodes"] = of_nodes
        try:
            replace_text(self._path, json.dumps(changed, indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {name_disk_error(error)}",
                f"{advise_room(error)}, or check the owner of the file.",
            ) from error
