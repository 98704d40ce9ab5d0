"""`rackless models` and `rackless data`: find, download and list what the hub has."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from agents.contract.requests.hub import CachedKind
from app.cli.kit.command import Commands, add_command, add_verbs, with_core
from app.cli.kit.output import Output, plain
from app.core.action import CoreApi
from app.core.hub import FetchFromHub, JudgeFits, ListCaches, SearchHub
from app.presentation.hub_text import describe_gate, describe_size, name_pc
from app.text import DASH, show_bytes, show_number

if TYPE_CHECKING:
    from app.hub.hub_item import HubFit, HubItem

MOST = 200
"""Maximum number of results of one search."""
_NOUNS: dict[CachedKind, str] = {"model": "model", "data": "data set"}


def declare_hub(parser: argparse.ArgumentParser, kind: CachedKind) -> Commands:
    """Declare the verbs for models or for data sets, and return them for others to add to."""
    noun, verbs = _NOUNS[kind], add_verbs(parser)
    find = add_command(
        verbs,
        "find",
        f"search the hub for {noun}s; without a connection, what this PC has",
        with_core(_find),
    )
    find.add_argument("words", metavar="WORDS", nargs="*", help="part of the name")
    find.add_argument(
        "--limit",
        metavar="N",
        type=_count,
        default=20,
        help=f"maximum number of results, up to {MOST}; default: 20",
    )
    if kind == "model":
        find.add_argument(
            "--no-fit",
            dest="fit",
            action="store_false",
            help="do not judge by the planner whether each fits the nodes",
        )
    fetch = add_command(
        verbs,
        "fetch",
        f"download a {noun} into the hub's cache; again to resume",
        with_core(_fetch),
    )
    fetch.add_argument("name", metavar="NAME", help="its name on the hub, such as org/name")
    fetch.add_argument("--node", metavar="NODE", default="", help="download there, not here")
    fetch.add_argument(
        "--revision", metavar="REV", default="", help="branch, tag or commit; default: the newest"
    )
    listed = add_command(
        verbs, "list", f"list the {noun}s in the caches of this PC and the nodes", with_core(_list)
    )
    listed.add_argument("--node", metavar="NODE", action="append", help="only there; may repeat")
    parser.set_defaults(kind=kind, fit=False)
    for verb in (find, fetch, listed):
        verb.set_defaults(kind=kind)
    return verbs


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text[:20]!a} is not a number from 1 to {MOST}")
    return number


async def _find(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    kind: CachedKind = args.kind
    found = await core.do(SearchHub(kind=kind, words=" ".join(args.words), limit=args.limit))
    fits: dict[str, HubFit] = {}
    if args.fit and found.items:
        judged = await core.do(JudgeFits(models=[item.name for item in found.items]))
        fits = {fit.model: fit for fit in judged}
    rows = [{**plain(item), "fit": plain(fits.get(item.name))} for item in found.items]
    out.document({**plain(found), "items": rows if kind == "model" else plain(found.items)})
    if found.problem:
        out.note(f"{found.problem} {found.hint}".strip())
    head = ["NAME", "SIZE", "LICENCE", "ACCESS", "DOWNLOADS", "LIKES", "HERE"]
    head += ["FITS"] if fits else []
    empty = f"Nothing on the hub matches {' '.join(args.words)!r}."
    out.table(head, [_row(item, fits.get(item.name)) for item in found.items], empty)
    if found.has_more:
        out.note("There are more: write more of the name, or use --limit.")
    return 0


def _row(item: HubItem, fit: HubFit | None) -> list[str]:
    return [
        item.name,
        describe_size(item),
        item.licence or DASH,
        describe_gate(item),
        show_number(item.downloads),
        show_number(item.likes),
        "yes" if item.is_cached else "",
        *([fit.text] if fit is not None else []),
    ]


async def _fetch(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    fetched = await core.do(
        FetchFromHub(kind=args.kind, name=args.name, node=args.node, revision=args.revision),
        out.report,
    )
    out.document(fetched)
    where = f": {fetched.folder}" if fetched.folder else ""
    out.text(f"{fetched.name} is on {name_pc(fetched.pc)}{where}")
    return 0


async def _list(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    caches = await core.do(ListCaches(kind=args.kind, names=args.node))
    out.document(caches)
    rows = [
        [
            name_pc(cache.pc),
            repo.name,
            show_bytes(repo.size_bytes),
            ", ".join(revision[:8] for revision in repo.revisions[:3]) or DASH,
            "" if repo.is_whole else "incomplete",
        ]
        for cache in caches
        for repo in cache.repos
    ]
    empty = f"No {_NOUNS[args.kind]} of the hub is here."
    out.table(["PC", "NAME", "SIZE", "REVISIONS", "STATE"], rows, empty)
    for cache in caches:
        if cache.problem:
            out.note(f"{name_pc(cache.pc)}: {cache.problem}")
    return 0
