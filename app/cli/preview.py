"""`rackless preview`: preview of a run's data and what the model learns from it."""

from __future__ import annotations

import argparse

from agents.contract.data import DataPreview
from app.cli.kit.command import add_run_file, with_core
from app.cli.kit.output import Output, plain
from app.cli.plan import print_caveats, print_sent
from app.core.action import CoreApi
from app.core.library import ListSentFiles, PreviewData, ReadRunFile
from app.core.runs import ListCaveats
from app.presentation.data_text import LEARNED, describe_data, mark_learned, title_of
from app.presentation.plan_text import describe_divergence, describe_recovery

_GREEN = "\x1b[32m", "\x1b[0m"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_preview))
    add_run_file(parser)
    parser.add_argument(
        "--node", metavar="NAME", help="read the data on this node; default: this PC, if it can"
    )
    parser.add_argument("--quick", action="store_true", help="read only the first rows")


async def _preview(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    spec = await core.do(ReadRunFile(path=args.run_file, settings=args.set))
    whole = not args.quick
    found = await core.do(PreviewData(spec=spec, node=args.node, whole=whole), out.report)
    evaluation = None
    if spec.data.eval is not None:
        evaluation = await core.do(
            PreviewData(spec=spec, part="eval", node=args.node, whole=whole), out.report
        )
    sent = await core.do(ListSentFiles(spec=spec))
    caveats = await core.do(ListCaveats(spec=spec))
    known = {"parts": plain(caveats.parts), "limits": plain(caveats.limits)}
    more = {"evaluation": plain(evaluation), "sent": plain(sent), **known}
    out.document({**plain(found), **more})
    print_preview(found, out)
    if evaluation is not None:
        said = "held out of the training data" if spec.data.held_out else spec.data.eval
        out.text(f"\nevaluation: {said}")
        print_figures(evaluation, out)
    print_caveats(caveats, out)
    out.text(f"\nAfter a loss: the run {describe_recovery(spec)}.")
    out.text(f"If the loss is not finite: it {describe_divergence(spec)}.")
    print_sent(sent, out)
    # A run would refuse this data; a script learns it here before it starts one.
    return int(found.is_refused or (evaluation is not None and evaluation.is_refused))


def print_figures(found: DataPreview, out: Output) -> None:
    """Print the recognised format, the counts, and the rows left out or cut."""
    for caption, text in describe_data(found):
        out.text(f"{caption:<14}{text}")


def print_preview(found: DataPreview, out: Output) -> None:
    """Print the figures, then the rows with their learned parts marked."""
    print_figures(found, out)
    # Colours would be control codes in a file or a pipe.
    marks = _GREEN if out.is_terminal else LEARNED
    out.text(f"\n{marks[0]}Learned text{marks[1]}; the rest is context.")
    for row in found.rows:
        for conversation in row.conversations:
            out.text(f"\n--- {title_of(row, conversation)}")
            out.text(mark_learned(conversation, marks))
