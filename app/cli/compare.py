"""`rackless compare`: the same prompts to several models, their answers side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.cli.chat import check_limits
from app.cli.kit.command import with_core
from app.cli.kit.output import Output
from app.conversation import Subject, to_markdown
from app.core.action import CoreApi
from app.core.chats import CompareModels, FindProject, ReadPromptFile, SavePrompts, WriteComparison


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_compare))
    parser.add_argument(
        "what",
        nargs="+",
        metavar="ARTIFACT_OR_RUN",
        help="runs or artifacts whose answers are compared",
    )
    parser.add_argument(
        "--base",
        action="store_true",
        help="also ask the base model of the first run, before the others",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="file with one prompt per line, saved for the project; default: the saved ones",
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="(256)")
    parser.add_argument("--node", metavar="NAME", help="default: a node that has it")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the answers to this Markdown file"
    )


async def _compare(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    check_limits(args.max_tokens)
    first = args.what[0]
    base = [Subject(what=first, of_base=True, node=args.node)] if args.base else []
    subjects = (*base, *(Subject(what=what, node=args.node) for what in args.what))
    project = await core.do(FindProject(what=first))
    # Saved first: `compare` asks the saved prompts of the project.
    if args.prompts is not None:
        prompts = await core.do(ReadPromptFile(path=args.prompts))
        await core.do(SavePrompts(project=project, prompts=prompts))
    found = await core.do(
        CompareModels(project=project, subjects=subjects, max_tokens=args.max_tokens), out.report
    )
    if args.out is not None:
        await core.do(WriteComparison(project=project, found=found, path=args.out))
    out.document(found)
    out.text(str(args.out) if args.out is not None else to_markdown(project, found))
    # A model without a single answer was not loaded, or never replied.
    return 1 if any(not any(one.answers) for one in found.models) else 0
