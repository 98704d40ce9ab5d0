"""`rackless check --fix`, `rackless nodes changes | undo | prepare`: repairs, asked for one by one.

Nothing is changed without consent, at the terminal or by `--yes`. `--json` allows no questions, so
it needs `--yes`; a password for sudo is asked for at a terminal only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from agents.contract.node import EnvironmentReport
from agents.contract.repair import Change
from app.cli.kit.command import Commands, add_command, with_core
from app.cli.kit.output import Output, ask_password, can_ask, confirm
from app.core.action import CoreApi
from app.core.nodes import CheckNodes, ListNodes, SetUpNode
from app.core.repairs import ApplyRepair, ReadChanges, RetestRow, ShowRepair, UndoChanges
from app.errors import AdminRefused, UnshippedLock, UsageError, UserError
from app.flows import repair as flow
from app.flows.prepare import describe_end, needs_environment
from app.flows.repair import (
    Offer,
    can_undo,
    collect_offers,
    describe_change,
    describe_change_steps,
    describe_undone,
    waits_for_restart,
)
from app.provisioning.check_row import CheckRow

_MAX_TRIES = 3
T = TypeVar("T")


def add_fix_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `check` about repairs."""
    parser.add_argument("--fix", action="store_true", help="offer to repair what can be repaired")
    _add_yes(parser)


def add_repair_verbs(verbs: Commands) -> None:
    """Declare the verbs of `nodes` about repairs."""
    help_text = "make a PC ready to train: check, repair, set up, check again"
    prepare = add_command(verbs, "prepare", help_text, with_core(_prepare))
    prepare.add_argument("name", metavar="NAME")
    _add_yes(prepare)
    help_text = "list what repairs have changed on a node"
    changes = add_command(verbs, "changes", help_text, with_core(_list_changes))
    changes.add_argument("name", metavar="NAME")
    undo = add_command(verbs, "undo", "take back what repairs have changed", with_core(_undo))
    undo.add_argument("name", metavar="NAME")
    which = undo.add_mutually_exclusive_group()
    which.add_argument(
        "--change", type=int, action="append", metavar="ID", help="this change; may be repeated"
    )
    which.add_argument("--all", action="store_true", help="all changes; the default")


def _add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="apply all repairs without asking")


def require_answers(args: argparse.Namespace, out: Output) -> None:
    """Refuse a command that would have to ask questions while its output is JSON.

    Raises:
        UsageError: `--json` was given without `--yes`.
    """
    if out.as_json and not args.yes:
        raise UsageError(
            "repairs with --json need --yes",
            "Add --yes to apply all of them, or leave --json out",
            where=args.command_name,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Repaired:
    """Outcome of the repairs of one command."""

    changes: tuple[tuple[str, Change], ...]
    """Node and record of each repair that was applied."""
    rows: tuple[CheckRow, ...]
    """Rows of the check, with those that were tested again in their new state."""
    problems: tuple[str, ...]
    """Reasons why repairs were not applied."""

    def document(self) -> dict[str, object]:
        """Return what `--json` prints."""
        changes = [{"node": node, "change": change} for node, change in self.changes]
        return {"rows": self.rows, "changes": changes, "problems": self.problems}


async def repair_rows(
    core: CoreApi, rows: Sequence[CheckRow], args: argparse.Namespace, out: Output
) -> Repaired:
    """Offer the repairs of a check one by one, apply the accepted ones, and test again."""
    desk = _Desk(core, rows, args.yes, out)
    for offer in collect_offers(rows):
        try:
            await desk.take(offer)
        except UserError as error:
            desk.refuse(f"{offer.node}: {offer.repair.title}: {error} {error.hint}".strip())
    return desk.outcome()


class _Desk:
    """The repairs of one command; keeps passwords in memory until it ends."""

    def __init__(self, core: CoreApi, rows: Sequence[CheckRow], yes: bool, out: Output) -> None:
        self._core = core
        self._rows = list(rows)
        self._names = tuple(dict.fromkeys(row.node for row in rows))
        self._yes = yes
        self._out = out
        self._changes: list[tuple[str, Change]] = []
        self._problems: list[str] = []
        self._passwords = _SudoPasswords()

    def outcome(self) -> Repaired:
        return Repaired(
            changes=tuple(self._changes),
            rows=tuple(self._rows),
            problems=tuple(self._problems),
        )

    def refuse(self, problem: str) -> None:
        self._problems.append(problem)
        self._out.text(problem)

    async def take(self, offer: Offer) -> None:
        """Show one offer, ask, apply and test again."""
        node, repair, out = offer.node, offer.repair, self._out
        out.text(f"\n{node}: {repair.title}\n{repair.explanation}")
        if repair.where != "node":
            self.refuse(f"{node}: {flow.WHERE[repair.where]}")
            out.text(repair.script)
            return
        if repair.needs_restart and await self._waits(offer):
            self.refuse(flow.RESTARTED.format(node=node))
            return
        shown = await self._core.do(ShowRepair(node=node, repair=repair))
        if flow.is_done(shown):
            self.refuse(f"{node}: already in place, but the problem remains.")
            return
        out.text("\n".join((*flow.describe_steps(repair, shown), *flow.describe_notes(repair))))
        if problem := flow.find_obstacle(offer, shown):
            self.refuse(f"{node}: {problem}")
            return
        if not self._yes and not confirm("Apply this?"):
            out.text("Not applied. Add --yes to skip the question.")
            return

        async def apply(password: str) -> Change:
            return await self._core.do(
                ApplyRepair(node=node, repair=repair, shown=shown, password=password), out.report
            )

        wanted = flow.needs_password(repair, shown)
        change = await self._passwords.with_password(node, wanted, out, apply)
        self._changes.append((node, change))
        out.text("\n".join(flow.describe_change_steps(change)))
        if change.problem:
            self._problems.append(f"{node}: {change.problem}")
            out.text(f"What was done before can be undone: rackless nodes undo {node}")
        # Before the restart, a check would only find the old problem.
        if repair.needs_restart and not change.problem:
            self.refuse(flow.RESTARTED.format(node=node))
            return
        await self._test_again(offer)

    async def _waits(self, offer: Offer) -> bool:
        log = await self._core.do(ReadChanges(node=offer.node))
        known = {node.name: node.facts for node in await self._core.do(ListNodes())}
        facts = known[offer.node]
        return waits_for_restart(offer.repair, log.changes, facts.started_s if facts else None)

    async def _test_again(self, offer: Offer) -> None:
        for row in offer.rows:
            found = await self._core.do(RetestRow(row=row, names=self._names))
            # A check may have more or fewer rows than before.
            at = self._rows.index(row)
            self._rows[at : at + 1] = found
            for one in found:
                self._out.text(f"{one.status}: {one.node}, {one.check}: {one.message}")


class _SudoPasswords:
    """Passwords for sudo, by node, asked for once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    async def with_password(
        self, node: str, wanted: bool, out: Output, act: Callable[[str], Awaitable[T]]
    ) -> T:
        """Call `act` with the password of a node; ask again a few times if sudo refuses it.

        Raises:
            AdminRefused: there is no terminal to ask at, or sudo refuses the password.
        """
        for left in reversed(range(_MAX_TRIES)):
            if wanted and node not in self._known:
                self._known[node] = _ask_password(node, out)
            try:
                return await act(self._known.get(node, ""))
            except AdminRefused as error:
                # Wrong or no longer valid: ask again instead of sending it again.
                self._known.pop(node, None)
                if not (wanted and error.again and left):
                    raise
                out.note(str(error))
        raise AssertionError("the last try returns or raises")


def _ask_password(node: str, out: Output) -> str:
    password = None if out.as_json else ask_password(f"Password for sudo on {node}: ")
    if password is None:
        raise AdminRefused(
            f"sudo on {node} wants a password",
            "Run this at a terminal without --json, which asks for it",
            where=node,
            again=False,
        )
    return password


async def _prepare(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    require_answers(args, out)
    rows = await core.do(CheckNodes(names=(args.name,)))
    repaired = await repair_rows(core, rows, args, out)
    is_built = needs_environment(repaired.rows)
    report = await set_up(core, args.name, None, args.yes, out) if is_built else None
    is_changed = is_built or bool(repaired.changes)
    if is_changed:
        rows = await core.do(CheckNodes(names=(args.name,)))
    failed = [row for row in rows if row.status == "fail"]
    out.document({**repaired.document(), "rows": rows, "environment": report})
    for row in failed:
        out.text(f"{row.check}: {row.message}\n  {row.fix}".rstrip())
    out.text(describe_end(args.name, rows, is_changed=is_changed))
    return 1 if failed else 0


async def _list_changes(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    found = (await core.do(ReadChanges(node=args.name))).changes
    out.document(found)
    for change in found:
        out.text(describe_change(change, time.time()))
        out.text("\n".join(f"    {line}" for line in describe_change_steps(change)))
    if not found:
        out.text(f"Rackless has repaired nothing on {args.name} yet")
    return 0


async def _undo(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    numbers = tuple(args.change or ())
    log = await core.do(ReadChanges(node=args.name))
    chosen = [one for one in log.changes if one.number in numbers or not numbers]
    wanted = log.admin == "password" and any(
        step.step.as_root for one in chosen if can_undo(one) for step in one.steps
    )

    async def undo(password: str) -> tuple[Change, ...]:
        return await core.do(
            UndoChanges(node=args.name, numbers=numbers, password=password), out.report
        )

    undone = await _SudoPasswords().with_password(args.name, wanted, out, undo)
    out.document(undone)
    for change in undone:
        out.text(describe_change(change, time.time()))
        out.text(f"    {change.undo_problem}" if change.undo_problem else "")
    out.text(describe_undone(undone))
    return 1 if any(one.undo_problem for one in undone) else 0


async def set_up(
    core: CoreApi, name: str, python: str | None, accept_index: bool, out: Output
) -> EnvironmentReport:
    """Set a node up; ask before accepting hashes that Rackless does not ship.

    Raises:
        UnshippedLock: the user has not accepted them.
    """
    request = SetUpNode(name=name, python=python, accept_index=accept_index)
    try:
        return await core.do(request, out.report)
    except UnshippedLock as error:
        # Never asked with --json: a program reads the output, and passes --accept-index.
        if out.as_json or not can_ask():
            raise
        out.note(f"{error.message}.")
        if not confirm(error.question):
            raise
        return await core.do(replace(request, accept_index=True), out.report)
