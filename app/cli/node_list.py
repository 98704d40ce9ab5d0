"""`rackless nodes discover` and `rackless nodes add --from`: find PCs, and add many at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agents.shared.files.folder_files import read_regular
from app.cli.kit.output import Output, ask_password, can_ask, confirm
from app.cli.node_login import KEY_IS_ADDED, key_file
from app.core.action import CoreApi
from app.core.new_nodes import AddNodeList, DiscoverPcs
from app.core.nodes import ListNodes
from app.errors import UsageError
from app.flows.node_list import NodeOutcome, how_to_add_alone, parse_node_list, summarise_outcomes
from app.nodes.discovery.candidate import warn_of_overlay

MAX_LIST_BYTES = 1 << 20
"""Maximum size of a list of PCs, in bytes; a larger file is no such list."""
_FOUND_BY = {"ssh-config": "ssh config", "mdns": "mDNS", "neighbour": "neighbours"}
_STATES = {"open": "answers", "closed": "no answer", "not-tried": "behind a host"}


async def discover_nodes(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    """List PCs that could become nodes."""
    found = await core.do(DiscoverPcs())
    out.document(found)
    rows = [
        [
            one.target,
            one.name,
            ", ".join(_FOUND_BY[source] for source in one.sources),
            one.banner or _STATES[one.state],
            one.overlay,
            one.node,
        ]
        for one in found
    ]
    head = ["TARGET", "NAME", "FOUND BY", "SSH", "NETWORK", "NODE"]
    out.table(head, rows, "No PC was found. Add one by its address: see rackless nodes add --help")
    for overlay in sorted({one.overlay for one in found if one.overlay}):
        out.note(f"{overlay}: {warn_of_overlay(overlay)}")
    if any(not one.node for one in found):
        out.note("Add one with: rackless nodes add NAME --ssh USER@TARGET")
    return 0


async def add_from_list(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    """Add the PCs of a list; ask about all fingerprints at once, then for passwords."""
    lines = parse_node_list(
        _read_list(args.source), [node.name for node in await core.do(ListNodes())]
    )
    done: dict[int, NodeOutcome] = {}
    waiting, accepted, passwords = list(range(len(lines))), dict[str, str](), _Passwords(out)
    while waiting:
        outcomes = await core.do(
            AddNodeList(
                lines=tuple(lines[i] for i in waiting),
                accepted=accepted,
                key=key_file(args),
                run_programs=args.run_ssh_config,
                passwords=passwords.given,
            )
        )
        done.update(zip(waiting, outcomes, strict=True))
        asked = [i for i in waiting if done[i].state == "confirm"]
        waiting = _confirmed(asked, done, set(args.accept_host_key), out) if asked else []
        # Kept for later rounds: a host key is stored only once a login has succeeded.
        accepted |= {done[i].host: done[i].fingerprint for i in waiting}
        passwords.given = {}
        if not waiting:
            passwords.ask(tuple(done.values()))
            waiting = [i for i in done if done[i].account in passwords.given]
    outcomes = tuple(done[i] for i in sorted(done))
    out.document(outcomes)
    rows = [[str(o.line.number), o.line.name, o.line.target, o.state, o.message] for o in outcomes]
    out.table(["LINE", "NAME", "ADDRESS", "STATE", "DETAILS"], rows)
    out.text(summarise_outcomes(outcomes))
    for outcome in outcomes:
        if outcome.account:
            out.note(how_to_add_alone(outcome))
    if any(o.state == "confirm" for o in outcomes):
        out.note("Compare the fingerprints, then give each: --accept-host-key SHA256:...")
    return 0 if all(o.state == "added" for o in outcomes) else 1


class _Passwords:
    """Passwords for the accounts of a list, each typed and sent once, and never stored."""

    def __init__(self, out: Output) -> None:
        self.given: dict[str, str] = {}
        """Passwords for the next round, by account."""
        self._out = out
        self._tried: set[str] = set()
        self._skipped: set[str] = set()

    def ask(self, outcomes: Sequence[NodeOutcome]) -> None:
        """Ask for passwords of accounts that refuse this PC's keys: one for all, or one each."""
        refused = {o.account: o.message for o in outcomes if o.account}
        refused = {a: said for a, said in refused.items() if a not in self._skipped}
        if not refused or self._out.as_json or not can_ask():
            return
        self._out.note("\n".join(refused.values()))
        self._out.note(KEY_IS_ADDED)
        new = [account for account in refused if account not in self._tried]
        if len(new) > 1:
            question = f"One password for all {len(new)} accounts (empty: ask for each): "
            if typed := ask_password(question):
                self.given = dict.fromkeys(new, typed)
        for account in [one for one in refused if one not in self.given]:
            if typed := ask_password(f"Password of {account} (empty: skip it): "):
                self.given[account] = typed
            else:
                self._skipped.add(account)
        self._tried |= self.given.keys()


def _confirmed(
    asked: list[int], done: dict[int, NodeOutcome], verified: set[str], out: Output
) -> list[int]:
    """Return the lines with right fingerprints: given by option, or confirmed now."""
    known = [i for i in asked if done[i].fingerprint in verified]
    rest = [i for i in asked if i not in known]
    # --accept-host-key: the fingerprints were compared before the command was run.
    if not rest or out.as_json or verified:
        return known
    shown = "\n".join(f"{done[i].line.name}: {done[i].message}" for i in rest)
    how = "Compare on each PC: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
    if confirm(f"{shown}\n{how}\nDo all of them match?"):
        return [*known, *rest]
    return [*known, *(i for i in rest if confirm(f"{done[i].message}\nDoes this one match?"))]


def _read_list(source: str) -> str:
    try:
        if source == "-":
            return sys.stdin.read(MAX_LIST_BYTES)
        return read_regular(Path(source), limit=MAX_LIST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise UsageError(f"the list {source} cannot be read: {said}", "Give a text file") from error
