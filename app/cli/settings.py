"""`rackless settings`: lasting settings, the same as on the window's Settings page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from app.cli.command import Commands, add_command, add_verbs, with_core
from app.cli.output import Output
from app.errors import UsageError

if TYPE_CHECKING:
    from app.core.core import Core
    from app.settings import Setting, Value


def add_parser(commands: Commands) -> None:
    verbs = add_verbs(add_command(commands, "settings", "list and change settings"))
    add_command(verbs, "list", "list all settings with their values", with_core(_list))
    change = add_command(verbs, "set", "change a setting", with_core(_set))
    change.add_argument("key", metavar="KEY")
    change.add_argument("value", metavar="VALUE", help="a number, on or off, or one of the choices")


async def _list(core: Core, args: argparse.Namespace, out: Output) -> int:
    from app.settings import SETTINGS

    rows = [
        {"key": s.key, "value": core.settings.get(s.key), "default": s.default, "title": s.title}
        for s in SETTINGS
    ]
    out.document(rows)
    values = [[row["key"], _show(core.settings.get(str(row["key"]))), row["title"]] for row in rows]
    out.table(["KEY", "VALUE", "WHAT"], [[str(cell) for cell in cells] for cells in values])
    return 0


async def _set(core: Core, args: argparse.Namespace, out: Output) -> int:
    from app.settings import SETTINGS

    setting = next((s for s in SETTINGS if s.key == args.key), None)
    if setting is None:
        keys = ", ".join(s.key for s in SETTINGS)
        raise UsageError(f"there is no setting {args.key}", f"Settings: {keys}")
    core.settings.set(args.key, _read(setting, args.value))
    value = core.settings.get(args.key)
    out.document({"key": args.key, "value": value})
    out.text(f"{args.key} is {_show(value)}")
    return 0


def _read(setting: Setting, text: str) -> Value:
    """Return the value of `text` for the setting, which itself refuses invalid values."""
    # An unreadable text is passed on as it is: the setting's own check names the limits.
    if setting.kind == "switch":
        return {"on": True, "true": True, "off": False, "false": False}.get(text.lower(), text)
    if setting.kind == "number":
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _show(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
