"""`rackless settings`: lasting settings, the same as on the window's Settings page."""

from __future__ import annotations

import argparse

from app.cli.kit.command import add_command, add_verbs, with_core
from app.cli.kit.output import Output
from app.core.action import CoreApi
from app.core.nodes import GetAddress
from app.errors import UsageError
from app.settings import SETTINGS, Setting, Value


def declare(parser: argparse.ArgumentParser) -> None:
    verbs = add_verbs(parser)
    add_command(verbs, "list", "list all settings with their values", with_core(_list))
    change = add_command(verbs, "set", "change a setting", with_core(_set))
    change.add_argument("key", metavar="KEY")
    change.add_argument("value", metavar="VALUE", help="a number, on or off, or one of the choices")
    change.add_argument(
        "--node",
        metavar="NAME",
        default="",
        help="only for this node; the value `default` takes that back",
    )


async def _list(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    settings = core.settings
    rows = [
        {
            "key": s.key,
            "value": settings.get(s.key),
            "default": s.default,
            "title": s.title,
            "nodes": settings.of_nodes(s.key),
        }
        for s in SETTINGS
    ]
    out.document(rows)
    table = []
    for s in SETTINGS:
        table.append([s.key, _show(settings.get(s.key)), s.title])
        of_nodes = settings.of_nodes(s.key).items()
        table += [[f"  of {node}", _show(value), ""] for node, value in of_nodes]
    out.table(["KEY", "VALUE", "WHAT"], table)
    return 0


async def _set(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    setting = next((s for s in SETTINGS if s.key == args.key), None)
    if setting is None:
        keys = ", ".join(s.key for s in SETTINGS)
        raise UsageError(f"there is no setting {args.key}", f"Settings: {keys}")
    value = _read(setting, args.value)
    if args.node:
        await core.do(GetAddress(name=args.node))  # raises for an unknown node
        core.settings.set_of_node(args.node, args.key, None if value == "default" else value)
    else:
        core.settings.set(args.key, value)
    value = core.settings.get(args.key, args.node)
    out.document({"key": args.key, "value": value, "node": args.node or None})
    out.text(f"{args.key} is {_show(value)}{f' on {args.node}' if args.node else ''}")
    return 0


def _read(setting: Setting, text: str) -> Value:
    """Return the value of `text` for the setting, which itself refuses invalid values."""
    # An unreadable text is passed on unchanged: the setting's own check names the limits.
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
