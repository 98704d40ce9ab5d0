"""`rackless nodes`: add, list, remove, setup, prune, storage, measure; `repairs`, `windows`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.cli.kit.command import Commands, add_command, add_verbs, with_core
from app.cli.kit.output import Output, confirm, plain
from app.cli.node_list import add_from_list, discover_nodes
from app.cli.node_login import act_asking, add_login_options, resolve_target
from app.cli.repairs import add_repair_verbs, set_up
from app.cli.storage import show_storage
from app.cli.windows import add_windows_verb
from app.core.action import CoreApi
from app.core.hub import DescribeToken, ListNodeTokens, RemoveToken, SendToken
from app.core.new_nodes import AddNode, FindNode, SetAddress, TakeBackKey
from app.core.nodes import (
    CalibrateNode,
    GetAddress,
    ListCalibrations,
    ListLeftovers,
    PruneNode,
    ReachNodes,
    RefreshNode,
    RemoveNode,
    WakeNode,
)
from app.core.plans import ExportCluster
from app.errors import UsageError
from app.events import NodeSnapshot
from app.flows.add_node import find_overlay, warn_of_lost_key
from app.hub.node_tokens import describe_tokens
from app.nodes.discovery.candidate import warn_of_overlay
from app.nodes.node import LocalAddress, NodeAddress, SshAddress, WslAddress
from app.planning.hardware.mig import describe_mig
from app.presentation.environment_text import describe_environment, describe_trial
from app.presentation.limit_text import show_cores, show_memory
from app.text import DASH, show_bytes, show_duration, show_moment

NO_NODES = (
    "There are no nodes yet. Add this PC: rackless nodes add NAME --local\n"
    "Add another one: rackless nodes add NAME --ssh USER@HOST"
)


def declare(parser: argparse.ArgumentParser) -> None:
    verbs = add_verbs(parser)
    _add_add(verbs)
    help_text = "list PCs of ~/.ssh/config and of this network that could become nodes"
    add_command(verbs, "discover", help_text, with_core(discover_nodes))
    add_command(verbs, "list", "list the nodes and their state", with_core(_list))
    _named(verbs, "show", "show the details of a node", _show)
    move = _named(verbs, "set-address", "reach a node at a new address; runs stay", _set_address)
    move.add_argument("--ssh", metavar="[USER@]HOST[:PORT]", required=True, help="new address")
    add_login_options(move)
    _named(verbs, "find", "look for a node at a new address of this network, and use it", _find)
    _named(verbs, "wake", "wake a node that sleeps or is off, and wait until it answers", _wake)
    _named(verbs, "remove", "remove a node from the list; nothing on it is deleted", _remove)
    setup = _named(verbs, "setup", "build the training environment on a node", _setup)
    setup.add_argument("--python", metavar="FILE", help="use this interpreter on the node instead")
    setup.add_argument(
        "--accept-index",
        action="store_true",
        help="lock a build of torch that Rackless ships no hashes of by those of PyTorch's index",
    )
    prune = _named(verbs, "prune", "delete environments that nothing needs on a node", _prune)
    prune.add_argument("--yes", action="store_true", help="delete without asking")
    _add_storage(verbs)
    _named(
        verbs,
        "measure",
        "measure a node's GPUs, 20 seconds each, for more accurate plans",
        _measure,
    )
    help_text = "write the nodes, as measured, as a cluster file for rackless plan"
    export = add_command(verbs, "export-cluster", help_text, with_core(_export_cluster))
    export.add_argument("file", metavar="FILE", type=Path, help="new file")
    add_repair_verbs(verbs)
    add_windows_verb(verbs)
    _add_token(verbs)
    key = _named(verbs, "key", "take back the key that Rackless added on a node", _key)
    key.add_argument("--take-back", action="store_true", required=True, help="remove its line")
    key.add_argument("--yes", action="store_true", help="remove it without asking")


def _add_storage(verbs: Commands) -> None:
    help_text = "show what fills a node's disk and what needs it, or delete some of it"
    parser = _named(verbs, "storage", help_text, _storage)
    parser.add_argument(
        "--free",
        nargs="*",
        metavar="WHAT",
        help="delete these kinds or items; alone: interrupted transfers, files without a name, "
        "and environments that nothing needs",
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")


def _add_token(verbs: Commands) -> None:
    help_text = "show which nodes have this PC's Hugging Face token, or send it to them"
    parser = add_command(verbs, "token", help_text, with_core(_token))
    parser.add_argument("names", metavar="NAME", nargs="*", help="node name; default: all nodes")
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--give", action="store_true", help="send the token to nodes that have none"
    )
    direction.add_argument("--take-back", action="store_true", help="delete the token from nodes")


def _add_add(verbs: Commands) -> None:
    help_text = "add a PC, or those of a list, and start the agent there"
    parser = add_command(verbs, "add", help_text, with_core(_add))
    parser.add_argument("name", metavar="NAME", nargs="?", help="its name; not with --from")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--ssh", metavar="[USER@]HOST[:PORT]", help="a PC reached by SSH, as after 'ssh'"
    )
    way.add_argument("--local", action="store_true", help="this PC")
    way.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="a list: NAME USER@HOST[:PORT], or only a host; one a line; - reads it from stdin",
    )
    way.add_argument("--wsl", metavar="DISTRO", help="a WSL distro of this PC")
    add_login_options(parser)


def _named(
    verbs: Commands, name: str, help_text: str, handler: Callable[..., Any]
) -> argparse.ArgumentParser:
    parser = add_command(verbs, name, help_text, with_core(handler))
    parser.add_argument("name", metavar="NAME")
    return parser


async def _add(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    if (args.source is None) == (args.name is None):
        what = "needs a NAME" if args.source is None else "takes no NAME with --from"
        raise UsageError(f"rackless nodes add {what}", "See: rackless nodes add --help")
    if args.source is not None:
        return await add_from_list(core, args, out)
    address = await _address(core, args, out)
    node = await act_asking(core, AddNode(name=args.name, address=address), args, out)
    out.document(node)
    out.text(f"{node.name} ({node.address}) is added: {_devices(node)}")
    if node.problem:
        out.note(f"{node.name}: {node.problem}. {node.hint}")
    if node.facts is not None and (overlay := find_overlay(node.facts)):
        out.note(warn_of_overlay(overlay))
    return 0


async def _set_address(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    address = await resolve_target(core, args.ssh, args, out)
    old = await core.do(GetAddress(name=args.name))
    if args.key is None and isinstance(old, SshAddress):
        address = replace(address, key=old.key)
    node = await act_asking(core, SetAddress(name=args.name, address=address), args, out)
    out.document(node)
    out.text(f"{node.name} is reached at {node.address} from now on")
    return 0


async def _find(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    node = await core.do(FindNode(name=args.name))
    out.document(node)
    out.text(
        f"{node.name} is at {node.address} now: host key and machine id are the same. It is "
        "reached there from now on"
    )
    return 0


async def _address(core: CoreApi, args: argparse.Namespace, out: Output) -> NodeAddress:
    if args.ssh:
        return await resolve_target(core, args.ssh, args, out)
    return WslAddress(distro=args.wsl) if args.wsl else LocalAddress()


async def _wake(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    node = await core.do(WakeNode(name=args.name), out.report)
    out.document(node)
    out.text(f"{node.name} answers")
    return 0


async def _list(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    nodes = await core.do(ReachNodes())
    out.document(nodes)
    rows = [
        [node.name, node.state, node.address, _devices(node), _memory(node), node.problem]
        for node in nodes
    ]
    head = ["NAME", "STATE", "ADDRESS", "TRAINS ON", "RAM", "PROBLEM"]
    out.table(head, rows, NO_NODES)
    return 0


async def _show(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    from app.presentation.plan_text import describe_calibration  # planning: a list needs none

    node = await core.do(RefreshNode(name=args.name))
    measured = await core.do(ListCalibrations(name=args.name))
    out.document({**plain(node), "measured": plain(measured)})
    rows = [*_facts(node), *(("measured", describe_calibration(m)) for m in measured.values())]
    for name, value in rows:
        out.text(f"{name:<14}{value}")
    return 0


async def _remove(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    await core.do(RemoveNode(name=args.name))
    out.document({"removed": args.name})
    out.text(f"{args.name} is removed")
    return 0


async def _setup(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    report = await set_up(core, args.name, args.python, args.accept_index, out)
    out.document(report)
    out.text(f"{args.name} trains with {report.python} ({describe_environment(report)})")
    for said in describe_trial(report):
        out.text(said)
    return 0


async def _prune(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    kept = await core.do(ListLeftovers(name=args.name))
    rows = [
        [one.kind, one.name, show_bytes(one.size_bytes), one.needed_by or "nothing"] for one in kept
    ]
    empty = f"Building environments has left nothing on {args.name}."
    out.table(["KIND", "NAME", "SIZE", "NEEDED BY"], rows, empty)
    unneeded = [one for one in kept if not one.needed_by]
    size = show_bytes(sum(one.size_bytes for one in unneeded))
    what = f"{len(unneeded)} of {len(kept)} on {args.name}, {size}"
    # Never asked with --json: a program reads the output, and passes --yes.
    is_agreed = args.yes or (not out.as_json and confirm(f"Delete what nothing needs ({what})?"))
    freed = 0
    if unneeded and is_agreed:
        freed = await core.do(PruneNode(name=args.name, items=[one.name for one in unneeded]))
        out.text(f"{show_bytes(freed)} are free again on {args.name}")
    out.document({"kept": plain(kept), "freed_bytes": freed})
    return 0


async def _storage(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    return await show_storage(core, args, out)


async def _key(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    if not args.yes:
        if out.as_json:
            raise UsageError(
                "taking the key back with --json needs --yes",
                "Add --yes to take it back, or leave --json out",
                where=args.command_name,
            )
        if not confirm(f"{warn_of_lost_key(args.name)}\nTake it back?"):
            out.text("The key stays. Add --yes to skip the question.")
            return 1
    was_there = await core.do(TakeBackKey(name=args.name))
    out.document({"node": args.name, "removed": was_there})
    out.text(
        f"The line that Rackless added to ~/.ssh/authorized_keys on {args.name} "
        f"{'is removed' if was_there else 'was gone already'}"
    )
    return 0


async def _measure(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    from app.presentation.plan_text import describe_calibration

    found = await core.do(CalibrateNode(name=args.name), out.report)
    out.document(found)
    for one in found:
        out.text(f"{one.card}: {describe_calibration(one)}")
    return 0


async def _export_cluster(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    path = await core.do(ExportCluster(path=args.file))
    out.document({"file": str(path)})
    out.text(f"Written: {path}. Edit it, then: rackless plan RUN.yaml --cluster {args.file}")
    return 0


async def _token(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    if args.give:
        found = await core.do(SendToken(names=args.names))
    elif args.take_back:
        found = await core.do(RemoveToken(names=args.names))
    else:
        found = await core.do(ListNodeTokens(names=args.names))
    out.document(found)
    out.text(describe_tokens(found) or "There are no nodes yet.")
    if where := await core.do(DescribeToken()):
        out.note(f"This PC keeps the token {where}.")
    for one in found:
        if one.problem:
            out.note(f"{one.node}: {one.problem}")
    # A node that did not answer may still have the token.
    return 1 if any(one.place == "unknown" for one in found) else 0


def _devices(node: NodeSnapshot) -> str:
    if node.facts is None:
        return DASH
    names = [gpu.name for gpu in node.facts.gpus]
    counted = [f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names)]
    counted += [f"{gpu.name} (MIG, not used)" for gpu in node.facts.mig_gpus]
    return ", ".join(counted) or node.facts.cpu or "CPU"


def _memory(node: NodeSnapshot) -> str:
    return show_bytes(node.facts.memory_bytes if node.facts else None)


def _facts(node: NodeSnapshot) -> list[tuple[str, str]]:
    rows = [
        ("name", node.name),
        ("address", f"{node.address} ({node.transport})"),
        ("state", f"{node.state} {node.problem}".strip()),
        ("round trip", show_duration(node.round_trip_s)),
    ]
    facts = node.facts
    if facts is None:
        return rows
    environment = facts.environment.python if facts.environment else None
    rows += [
        ("system", f"{facts.os}, kernel {facts.kernel}, {facts.architecture}"),
        ("up since", show_moment(facts.started_s, time.time())),
        ("python", facts.python),
        ("trains with", environment or f"{DASH} (rackless nodes setup {node.name})"),
        ("cpu", f"{facts.cpu or DASH}, {show_cores(facts)}"),
        ("ram", show_memory(facts)),
        ("disk free", f"{show_bytes(facts.disk_free_bytes)} of {show_bytes(facts.disk_bytes)}"),
    ]
    rows += [
        (f"gpu {gpu.index}", f"{gpu.name}, {show_bytes(gpu.memory_bytes)}, driver {gpu.driver}")
        for gpu in facts.gpus
    ]
    rows += [(f"gpu {gpu.index}", describe_mig(gpu)) for gpu in facts.mig_gpus]
    if facts.gpu_problem:
        rows.append(("gpu problem", facts.gpu_problem))
    return rows
