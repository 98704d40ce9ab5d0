"""`rackless artifacts`: results of exports: list, show, add, copy, push, check, serve, delete."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.artifact import (
    ArtifactSnapshot,
    describe_kind,
    describe_places,
    describe_verdicts,
    tell_last,
)
from app.artifacts import RUNTIMES
from app.artifacts.deletion import find_place
from app.cli.kit import command
from app.cli.kit.output import Output, aligned, confirm
from app.core import artifacts
from app.core.action import CoreApi
from app.errors import UsageError
from app.presentation.result_text import describe_copy, describe_lineage, describe_verdict
from app.shell_words import command_here
from app.text import show_bytes, show_list, show_moment


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=command.with_core(_list))
    _add_run_option(parser)
    verbs = parser.add_subparsers(title="what to do", metavar="VERB")
    _add_run_option(
        command.add_command(verbs, "list", "list all artifacts", command.with_core(_list))
    )
    _named(verbs, "show", "show an artifact's origin, quality and copies", _show)
    copy = _named(
        verbs, "copy", "copy an artifact to a folder or a node, verified on the way", _copy
    )
    copy.add_argument("--to", required=True, metavar="FOLDER|NODE")
    push = _named(verbs, "push", "push an artifact to the Hugging Face Hub with your token", _push)
    push.add_argument("--to", required=True, metavar="OWNER/MODEL")
    push.add_argument("--public", action="store_true", help="make it public (default: private)")
    _named(verbs, "check", "read every copy and compare its hashes", _check)
    serve = _named(verbs, "serve-command", "print the commands that serve an artifact", _serve)
    serve.add_argument(
        "--with", dest="runtime", choices=RUNTIMES, help="default: every program that loads it"
    )
    delete = _named(verbs, "delete", "delete an artifact with all its copies", _delete)
    delete.add_argument("--copy", metavar="WHERE", help="only this copy: a folder, or a node")
    delete.add_argument(
        "--yes", action="store_true", help="do not ask for confirmation, even for the last copy"
    )
    add = command.add_command(
        verbs, "add", "register a folder that was made elsewhere or moved", _without_run(_add)
    )
    add.add_argument("folder", type=Path, metavar="DIR")
    add.add_argument(
        "--name", metavar="NAME", help="default: the name of its run, else of the folder"
    )


def _add_run_option(parser: argparse.ArgumentParser) -> None:
    command.add_shared_option(parser, "--run", metavar="RUN", help="only artifacts of this run")


def _without_run(handler: command.CoreHandler) -> command.Handler:
    """Refuse `--run` before a verb that works on one artifact, instead of ignoring it."""
    run = command.with_core(handler)

    def check(args: argparse.Namespace, out: Output) -> int:
        # The attribute exists only if the option was given, see `add_shared_option`.
        if hasattr(args, "run"):
            raise UsageError(
                "--run chooses the artifacts of a list, and this is no list",
                "Leave it out, or use: "
                + command_here("rackless", "artifacts", "list", "--run", args.run),
            )
        return run(args, out)

    return check


def _named(
    verbs: command.Commands, name: str, help_text: str, handler: Callable[..., Any]
) -> argparse.ArgumentParser:
    parser = command.add_command(verbs, name, help_text, _without_run(handler))
    parser.add_argument("name", metavar="NAME", help="NAME (its newest version), or NAME:VERSION")
    return parser


async def _list(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    found = await core.do(artifacts.ListArtifacts(run_id=getattr(args, "run", None)))
    out.document(found)
    now_s = time.time()
    out.table(
        ["NAME", "FORMAT", "SIZE", "RUN", "STEP", "VERDICT", "WHERE", "CREATED"],
        [_row(one, now_s) for one in found],
        "There are no artifacts yet. Make one: rackless export RUN --to gguf --out DIR",
    )
    return 0


def _row(artifact: ArtifactSnapshot, now_s: float) -> list[str]:
    return [
        artifact.label,
        describe_kind(artifact),
        show_bytes(artifact.size_bytes),
        artifact.origin.run_id if artifact.origin else "",
        str(artifact.origin.step) if artifact.origin else "",
        describe_verdicts(artifact),
        describe_places(artifact),
        show_moment(artifact.created_s, now_s),
    ]


async def _show(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    print_artifact(await core.do(artifacts.GetArtifact(name=args.name)), out)
    return 0


def print_artifact(artifact: ArtifactSnapshot, out: Output) -> None:
    """Print the details of one artifact."""
    out.document(artifact)
    rows = [
        ["name", artifact.label],
        ["format", describe_kind(artifact)],
        ["size", show_bytes(artifact.size_bytes)],
        ["created", show_moment(artifact.created_s, time.time())],
        *([name, value] for name, value in describe_lineage(artifact)),
        ["verdict", describe_verdicts(artifact)],
    ]
    out.text("\n".join(aligned(rows)))
    for verdict in artifact.verdicts:
        out.text(f"  {describe_verdict(verdict)}")
    out.text("copies")
    for copy in artifact.copies:
        out.text(f"  {describe_copy(copy)}")


async def _add(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    print_artifact(await core.do(artifacts.AddArtifact(folder=args.folder, name=args.name)), out)
    return 0


async def _copy(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    print_artifact(
        await core.do(artifacts.CopyArtifact(name=args.name, to=args.to), out.report), out
    )
    return 0


async def _push(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    private = not args.public
    found = await core.do(
        artifacts.PushArtifact(name=args.name, hub_id=args.to, private=private), out.report
    )
    print_artifact(found, out)
    return 0


async def _check(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    found = await core.do(artifacts.VerifyArtifact(name=args.name), out.report)
    print_artifact(found, out)
    # A copy that could not be asked counts as a failure too: it was not checked.
    return 0 if all(one.state == "whole" for one in found.copies) else 1


async def _delete(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    artifact = await core.do(artifacts.GetArtifact(name=args.name))
    warning = tell_last(artifact, find_place(artifact, args.copy))
    # Without a warning a copy is left, and `even_last` stays off: should that copy vanish
    # meanwhile, the deletion is refused.
    is_meant = args.yes or (
        bool(warning) and not out.as_json and confirm(f"{warning} Delete for good?")
    )
    done = await core.do(
        artifacts.DeleteCopies(name=artifact.label, place=args.copy, even_last=is_meant)
    )
    out.document(done)
    gone = f"{done.label} is deleted" if done.is_forgotten else f"{args.copy} is deleted"
    out.text(f"{gone}; {show_bytes(done.freed_bytes)} are free again")
    for why in done.left:
        out.text(why)
    return 0


async def _serve(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    artifact = await core.do(artifacts.GetArtifact(name=args.name))
    every = await core.do(artifacts.ListServeCommands(name=args.name))
    found = [one for one in every if args.runtime in (None, one.runtime)]
    if not found:
        known = show_list(sorted({one.runtime for one in every}))
        raise UsageError(
            f"{args.runtime} does not load {artifact.format}", f"Programs that load it: {known}."
        )
    for one in found:
        if (
            path := await core.do(artifacts.WriteModelfile(name=args.name, command=one))
        ) is not None:
            out.note(f"{path} is written")
        out.text(f"# {one.title}. {' '.join(one.notes)}")
        out.text(f"{one.command}\n")
    out.document(found)
    return 0
