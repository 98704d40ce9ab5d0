"""`rackless data show`: the rows of data on this PC, as a run learns them."""

from __future__ import annotations

import argparse
import asyncio

from agents.contract.messages import Progress
from agents.contract.requests.rows import DataFigures, RowBrief
from agents.contract.spec import DataSpec, RunSpec
from app.cli.kit.command import with_core
from app.cli.kit.output import Output, plain
from app.core.action import CoreApi
from app.core.data import ListDataRows, ReadDataFigures, ShowDataRow
from app.data.browser import BrowsedData
from app.errors import UserError
from app.presentation.data_text import mark_learned, spell_out
from app.presentation.rows_text import (
    FILTERS,
    STATE_WORDS,
    describe_figures,
    describe_place,
    describe_state,
    show_length,
)
from app.text import shorten

_POLL_S = 0.2
_TEXT_CHARS = 60


def declare_show(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rackless data show`."""
    parser.set_defaults(handler=with_core(_show))
    parser.add_argument("path", metavar="PATH", help="file, folder, or data set in the hub's cache")
    parser.add_argument("--model", default="-", help="folder of a model, whose tokenizer counts")
    parser.add_argument("--row", type=int, metavar="N", help="show this row, counted across files")
    parser.add_argument(
        "--filter", choices=tuple(FILTERS), default="all", help="list only these rows"
    )
    parser.add_argument("--search", default="", metavar="TEXT", help="list rows with this text")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="rows to list")


async def _show(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    source = BrowsedData(spec=RunSpec(model=args.model, data=DataSpec(train=args.path)))
    if args.row is not None:
        row = await core.do(ShowDataRow(source=source, place=args.row))
        out.document(row)
        out.text(f"{_describe(row.brief)}\n")
        out.text(f"As written:\n{spell_out(row.raw)}")
        if row.shown is not None:
            out.text("\nAs learned, with [[ ]] around what is learned:")
        for shown in row.shown.conversations if row.shown is not None else ():
            out.text(mark_learned(shown).rstrip())
        return 0
    figures = await _read_all(core, source, out)
    found = await core.do(
        ListDataRows(source=source, count=args.count, which=args.filter, search=args.search)
    )
    while args.search and not found.is_whole and len(found.rows) < args.count:
        found = await core.do(
            ListDataRows(source=source, count=args.count, which=args.filter, search=args.search)
        )
    out.document({"figures": plain(figures), "rows": plain(found.rows), "num_rows": found.num_rows})
    for caption, text in describe_figures(figures):
        out.text(f"{caption:<14}{text}")
    if figures.reasons:
        out.text("\nWhy rows are left out:")
    for reason, number in figures.reasons.items():
        out.text(f"{number:>8,}  {reason}")
    if figures.has_nothing and figures.offer:
        out.text(f"\n{figures.offer}.")
    out.text("")
    has_files = any(brief.file for brief in found.rows)
    head = ["ROW", "STATE", "TOKENS", "LEARNED", *(["FILE"] if has_files else []), "TEXT"]
    rows = [
        [
            f"{brief.row:,}",
            STATE_WORDS[brief.state],
            show_length(brief.num_tokens),
            show_length(brief.num_targets),
            *([brief.file] if has_files else []),
            shorten(spell_out(brief.text or brief.reason), _TEXT_CHARS),
        ]
        for brief in found.rows
    ]
    out.table(head, rows, "No such rows.")
    return 0


async def _read_all(core: CoreApi, source: BrowsedData, out: Output) -> DataFigures:
    """Wait until all rows are read.

    Raises:
        UserError: not all of them can be read.
    """
    while not (found := await core.do(ReadDataFigures(source=source))).is_whole:
        if found.problem:
            raise UserError("not all rows could be read", found.problem)
        out.report(Progress(message=f"{found.num_rows:,} rows read"))
        await asyncio.sleep(_POLL_S)
    return found


def _describe(row: RowBrief) -> str:
    tokens = f"{show_length(row.num_tokens)} tokens, {show_length(row.num_targets)} learned"
    state = describe_state(row)
    return f"{describe_place(row)}: {tokens}{f'; {state}' if state else ''}"
