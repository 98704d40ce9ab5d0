"""`rackless runs`: list, show, logs, save, trace, stop, resume, delete."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.contract.data import DataPreview
from agents.contract.parallel import PARALLEL
from app.cli.kit.command import Commands, add_command, add_verbs, names_of, with_core
from app.cli.kit.output import Output, confirm, plain
from app.cli.kit.watching import Watching
from app.cli.logs import follow_logs, print_logs
from app.core.action import CoreApi, sentences
from app.core.library import WriteRunFile
from app.core.nodes import ListNodes
from app.core.runs import (
    AdoptRun,
    AwaitCertificate,
    CompareForecast,
    EraseRun,
    FindRuns,
    IgnoreRun,
    ListInterruptions,
    ReadDataPreview,
    ReadRunEvents,
    RefreshRun,
    RefreshRuns,
    ResumeRun,
    SaveCheckpoint,
    StopRun,
    StopRunOnNode,
    TakeOverRun,
    TraceRun,
)
from app.errors import UsageError, UserError
from app.events import FoundRun, NodeSnapshot, RunEvent, RunSnapshot
from app.interruption import Interruption
from app.presentation.found_text import ask_to_adopt, may_stop, may_take_over
from app.presentation.interruption_text import summarize_story, tell_story
from app.presentation.result_text import describe_certificate, describe_saved, describe_trace
from app.presentation.start_text import describe_start
from app.program import started_s
from app.telemetry.state import current_run, describe_rank
from app.telemetry.step_parts import show_rank_memory, split_step
from app.text import (
    count_of,
    show_duration,
    show_list,
    show_loss,
    show_moment,
    show_rate,
    show_share,
)

if TYPE_CHECKING:
    from app.planning.accuracy.forecast_accuracy import Forecast, ForecastComparison

SHOWN_EVENTS = 30
OPERATION_LETTERS = 60
_RANK_HEAD = [
    "RANK", "NODE", "DEVICE", "STATE", "STEP", "TOKENS/S", "SHARE", "MFU",
    "IN/COMP/WAIT/OPT %", "MEMORY",
]  # fmt: skip


def declare(parser: argparse.ArgumentParser) -> None:
    verbs = add_verbs(parser)
    add_command(verbs, "list", "list all runs", with_core(_list))
    show = _with_id(verbs, "show", "show a run and its events", _show)
    show.add_argument(
        "--run-file",
        type=Path,
        metavar="RUN.yaml",
        help="write its run file, to start a similar run",
    )
    show.add_argument(
        "--data", action="store_true", help="show what the model learns, with three rows"
    )
    logs = _with_id(verbs, "logs", "print the output of a run's ranks", _logs)
    logs.add_argument("--rank", type=int, metavar="R", help="default: all ranks")
    logs.add_argument("--attempt", type=int, metavar="N", help="default: all attempts")
    logs.add_argument("--follow", action="store_true", help="follow until the run ends")
    _with_id(verbs, "save", "save a checkpoint now and keep training", _save)
    trace = _with_id(verbs, "trace", "profile the next steps", _trace)
    trace.add_argument(
        "--steps", type=int, default=3, metavar="K", help="number of steps (default: 3)"
    )
    stop = _with_id(verbs, "stop", "save a checkpoint and stop; a second time, stop at once", _stop)
    stop.add_argument(
        "--node",
        metavar="NAME",
        help="stop a run of another master, or a forgotten one, by its whole id on this node",
    )
    add_command(verbs, "found", "list runs on the nodes that are not yours", with_core(_found))
    adopt = _with_id(verbs, "adopt", "watch a run that is on a node and not yours", _adopt)
    take_over = _with_id(
        verbs,
        "take-over",
        "resume another master's run from here after losses; that one only watches it then",
        _take_over,
    )
    for parser_of_found in (adopt, take_over):
        parser_of_found.add_argument(
            "--node", metavar="NAME", help="adopt it as this node describes it (default: any node)"
        )
        parser_of_found.add_argument(
            "--yes", action="store_true", help="agree to the files that it names without a question"
        )
    ignore = _with_id(verbs, "ignore", "hide a run that is on a node and not yours", _ignore)
    ignore.add_argument("--node", metavar="NAME", help="default: every node that lists it")
    resume = _with_id(verbs, "resume", "resume a run from a checkpoint", _resume)
    resume.add_argument(
        "--checkpoint", type=int, metavar="STEP", help="default: the newest complete checkpoint"
    )
    resume.add_argument(
        "--nodes", type=names_of, metavar="A,B", help="default: the run's nodes that answer"
    )
    resume.add_argument(
        "--verify",
        type=int,
        metavar="K",
        help="replay the last K logged steps first and compare every loss",
    )
    resume.add_argument(
        "--learning-rate",
        type=float,
        metavar="R",
        help="continue at this rate, such as half of the old one after the loss was not finite",
    )
    resume.add_argument(
        "--parallel",
        choices=("auto", *(row.name for row in PARALLEL.values() if row.runnable)),
        help="spread the run in another way from now on, such as streamed for lack of nodes",
    )
    resume.add_argument("--watch", action="store_true", help="show progress until the run ends")
    _with_id(verbs, "delete", "delete a run with its checkpoints", _delete)


def _with_id(
    verbs: Commands, name: str, help_text: str, handler: Callable[..., Any]
) -> argparse.ArgumentParser:
    parser = add_command(verbs, name, help_text, with_core(handler))
    parser.add_argument("run", metavar="ID", help="a run id, or its first characters")
    return parser


async def _list(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    # Asks the nodes, whose state decides what is shown.
    found = await core.do(RefreshRuns(), sentences(out.note))
    now_s, nodes = time.time(), await _asked_nodes(core)
    runs = [current_run(run, nodes, now_s) for run in found]
    out.document(runs)
    out.table(
        ["ID", "NAME", "STATE", "STEP", "LOSS", "NODES", "STARTED"],
        [_row(run, now_s) for run in runs],
        "There are no runs yet. Start one: rackless start RUN.yaml",
    )
    return 0


async def _asked_nodes(core: CoreApi) -> dict[str, NodeSnapshot]:
    """Return the nodes by name; only one that was asked and did not answer counts as silent."""
    return {
        node.name: node
        if node.state in ("unreachable", "refused")
        else replace(node, state="online", last_seen_s=None)
        for node in await core.do(ListNodes())
    }


def _row(run: RunSnapshot, now_s: float) -> list[str]:
    return [
        run.run_id,
        run.name,
        run.state,
        _steps(run),
        show_loss(run.loss),
        ", ".join(run.nodes),
        show_moment(run.created_s, now_s),
    ]


def _steps(run: RunSnapshot) -> str:
    if run.step is None:
        return ""
    return f"{run.step}/{run.total_steps}" if run.total_steps is not None else str(run.step)


async def _show(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    run = await core.do(RefreshRun(run_id=args.run))
    run = current_run(run, await _asked_nodes(core), time.time())
    if args.run_file is not None:
        # Written before anything is printed, so that a failure leaves no half answer.
        await core.do(WriteRunFile(spec=run.spec, path=args.run_file))
    events = await core.do(ReadRunEvents(run_id=run.run_id))
    data = await core.do(ReadDataPreview(run_id=run.run_id))
    compared = await core.do(CompareForecast(run_id=run.run_id))
    interruptions = await core.do(ListInterruptions(run_id=run.run_id))
    out.document(
        {
            **plain(run),
            "events": plain(events),
            "interruptions": plain(interruptions),
            "data": plain(data),
            "forecast": plain(compared.forecast) if compared else None,
            "measured": plain(compared.measured) if compared else None,
        }
    )
    now_s = time.time()
    for name, value in _facts(run, now_s):
        out.text(f"{name:<14}{value}")
    if run.ranks:
        out.text("")
        out.table(_RANK_HEAD, _ranks(run, now_s))
    if compared is not None:
        _print_stages(compared.forecast, out)
        _print_comparison(compared, out)
    if args.data:
        out.text("")
        _print_data(data, out)
    _print_interruptions(interruptions, now_s, out)
    _print_events(events, now_s, out)
    return 0


def _print_interruptions(found: Sequence[Interruption], now_s: float, out: Output) -> None:
    if found:
        out.text("")
        out.text(f"{summarize_story(found)}:")
    for moment in (moment for one in found for moment in tell_story(one)):
        at = show_moment(moment.time_s, now_s) if moment.time_s is not None else "now"
        out.text(f"  {at:<14}{moment.title}: {moment.text}")


def _print_stages(forecast: Forecast, out: Output) -> None:
    from app.presentation.stage_text import describe_division, list_run_stages

    rows = list_run_stages(forecast)
    if not rows:
        return
    out.text("")
    out.table(
        ["STAGE", "PIPELINE", "LAYERS", "PLANNED MEMORY"],
        [[row.title, str(row.replica + 1), row.layers_text, row.memory_text] for row in rows],
    )
    words = describe_division(rows, forecast.step_s, forecast.bubble_s, forecast.wire_s)
    if words:
        out.text(f"planned: {words}")


def _print_comparison(found: ForecastComparison, out: Output) -> None:
    from app.presentation.plan_text import describe_comparison  # planning: a list needs none

    rows = describe_comparison(found)
    if rows:
        out.text("")
        table = [[row.what, row.foretold, row.measured, row.error] for row in rows]
        out.table(["FORECAST", "FORECAST", "MEASURED", "DIFFERENCE"], table)


def _print_data(data: DataPreview | None, out: Output) -> None:
    from app.cli.preview import print_preview

    if data is None:
        out.text("the preview is available once the first rank has read the data")
    else:
        print_preview(data, out)


def _print_events(events: Sequence[RunEvent], now_s: float, out: Output) -> None:
    if events:
        out.text("")
    if len(events) > SHOWN_EVENTS:
        out.text(f"({len(events) - SHOWN_EVENTS} earlier events: rackless runs show ID --json)")
    for event in events[-SHOWN_EVENTS:]:
        out.text(f"{show_moment(event.time_s, now_s)}  {event.text}")


def _facts(run: RunSnapshot, now_s: float) -> list[tuple[str, str]]:
    rows = [
        ("run", f"{run.run_id} ({run.name})"),
        ("state", run.state + (f", {run.phase}" if run.phase else "")),
        ("starting", describe_start(run.starting, now_s) if run.starting else ""),
        ("message", run.message),
        ("what to do", run.hint),
        ("attempt", str(run.attempt)),
        ("nodes", show_list(run.nodes)),
        ("started", show_moment(run.created_s, now_s)),
        ("step", _steps(run)),
        ("loss", f"{show_loss(run.loss)} (started at {show_loss(run.first_loss)})"),
        ("speed", show_rate(run.tokens_per_s)),
        ("MFU", "" if run.mfu is None else show_share(run.mfu, 1)),
        ("efficiency", _efficiency(run)),
        ("evaluation", _evaluation(run)),
        ("certificate", describe_certificate(run.certificate) if run.certificate else ""),
        ("left", show_duration(run.remaining_s)),
        ("checkpoint", f"step {run.newest_checkpoint_step}" if run.newest_checkpoint_step else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _efficiency(run: RunSnapshot) -> str:
    return "" if run.eta is None else f"{show_share(run.eta)} of the ranks' combined speed alone"


def _evaluation(run: RunSnapshot) -> str:
    if run.evaluation_loss is None:
        return ""
    words = f"loss {show_loss(run.evaluation_loss)}"
    return words + (f", perplexity {show_loss(run.perplexity)}" if run.perplexity else "")


def _ranks(run: RunSnapshot, now_s: float) -> list[list[str]]:
    return [
        [
            str(rank.rank),
            rank.node,
            rank.device,
            describe_rank(rank, now_s),
            "" if rank.step is None else str(rank.step),
            show_rate(rank.tokens_per_s, ""),
            "" if rank.share is None else f"{rank.share:.1%}",
            "" if rank.mfu is None else show_share(rank.mfu, 1),
            "/".join(f"{part.share * 100:.0f}" for part in split_step(rank)),
            "" if rank.memory_bytes is None else show_rank_memory(rank),
        ]
        for rank in run.ranks
    ]


async def _logs(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    if not args.follow:
        return await print_logs(core, args.run, args.rank, args.attempt, out)
    if args.attempt is not None:
        raise UsageError(
            "--attempt and --follow exclude each other: only the newest attempt can be followed",
            "Leave one of them out.",
        )
    return await follow_logs(core, args.run, args.rank, out)


async def _save(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    out.note("requested; the checkpoint is saved at the end of the current step")
    saved = await core.do(SaveCheckpoint(run_id=args.run))
    out.document(saved)
    out.text(describe_saved(saved))
    return 0


async def _trace(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    out.note("requested; recording begins after the current step")
    made = await core.do(TraceRun(run_id=args.run, num_steps=args.steps))
    out.document(made)
    out.text(describe_trace(made))
    for trace in made.ranks:
        out.text(f"rank {trace.rank}: {trace.problem or trace.path}")
    whole = [trace for trace in made.ranks if not trace.problem]
    if whole:
        out.text("Open them at https://ui.perfetto.dev or in chrome://tracing.")
        out.text("")
        rows = [
            [row.name[:OPERATION_LETTERS], str(row.count), show_duration(row.seconds),
             show_share(row.share)]
            for row in whole[0].top
        ]  # fmt: skip
        out.table([f"OPERATION (RANK {whole[0].rank})", "COUNT", "TIME", "SHARE"], rows)
    # No report yet is no failure: the traces arrive with the run's logs.
    return 0 if whole or not made.ranks else 1


async def _stop(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    # Before the action, which answers only when the ranks have ended.
    out.note("stopping; the ranks finish their step and save a checkpoint")
    if args.node is not None:
        part = await core.do(StopRunOnNode(run_id=args.run, node=args.node))
        out.document(part)
        out.text(f"{part.run_id} is {part.state} on {args.node}")
        return 0
    run = await core.do(StopRun(run_id=args.run), sentences(out.note))
    out.document(run)
    out.text(f"{run.run_id} is {run.state}" + (f": {run.message}" if run.message else ""))
    return 0


async def _found(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    found = await core.do(FindRuns())
    now_s = time.time()
    out.document(found)
    out.table(
        ["ID", "ATTEMPT", "NODE", "NAME", "STATE", "STARTED", "FROM", "NAMES"],
        [
            [
                run.run_id,
                str(run.attempt),
                run.node,
                run.name,
                run.state,
                show_moment(run.started_s, now_s) if run.started_s else "",
                f"{run.master.user} on {run.master.host}" if run.master else "",
                ", ".join(run.files),
            ]
            for run in found
        ],
        "No node that answers has a run that is not yours.",
    )
    if found:
        out.text("Watch one: rackless runs adopt ID.")
    if any(map(may_stop, found)):
        out.text("Stop one that has not ended: rackless runs stop ID --node NODE.")
    if any(map(may_take_over, found)):
        out.text("Resume one from here after losses: rackless runs take-over ID.")
    return 0


async def _choose_found(core: CoreApi, args: argparse.Namespace) -> FoundRun | None:
    """Return the newest found attempt of a run, or None if no node lists it."""
    found = [
        run
        for run in await core.do(FindRuns())
        if run.run_id == args.run and args.node in (None, run.node)
    ]
    return max(found, key=lambda run: run.attempt, default=None)


async def _agree(core: CoreApi, args: argparse.Namespace, out: Output) -> RunSnapshot | None:
    """Adopt a found run if the user agrees to the files that it names; None: no node lists it."""
    chosen = await _choose_found(core, args)
    if chosen is None:
        return None
    question = ask_to_adopt(chosen)
    if not args.yes and (out.as_json or not confirm(question)):
        raise UserError(
            f"{question} This was not agreed to, and nothing was read",
            f"Agree to it: rackless runs adopt {chosen.run_id} --node {chosen.node} --yes",
        )
    return await core.do(AdoptRun(run_id=chosen.run_id, node=chosen.node, files=chosen.files))


async def _adopt(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    run = await _agree(core, args, out)
    if run is None:
        raise UserError(
            f"no node that answers has a run {args.run} that is not yours already",
            "List such runs with their whole ids: rackless runs found",
        )
    out.document(run)
    out.text(
        f"{run.run_id} is watched here; to resume it from here after a loss: "
        f"rackless runs take-over {run.run_id}"
    )
    return 0


async def _ignore(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    found = [run for run in await core.do(FindRuns()) if run.run_id == args.run]
    nodes = [args.node] if args.node else [run.node for run in found]
    for node in nodes:
        await core.do(IgnoreRun(run_id=args.run, node=node))
    out.document({"ignored": args.run, "nodes": nodes})
    out.text(f"{args.run} is no longer listed" if nodes else f"no node lists a run {args.run}")
    return 0


async def _take_over(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    await _agree(core, args, out)
    run = await core.do(TakeOverRun(run_id=args.run))
    out.document(run)
    out.text(f"{run.run_id} is this master's now: it resumes the run after a loss")
    return 0


async def _resume(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    resume = ResumeRun(
        run_id=args.run,
        checkpoint=args.checkpoint,
        nodes=args.nodes,
        verify_steps=args.verify,
        learning_rate=args.learning_rate,
        parallel=args.parallel,
        asked_s=started_s(),
    )
    if args.verify is not None and args.learning_rate is not None:
        raise UsageError(
            "--verify and --learning-rate exclude each other: at another rate, other losses follow",
            "Leave one of them out.",
        )
    if args.watch:
        # Events carry the whole id, and `args.run` may be its first characters only.
        run_id = (await core.do(RefreshRun(run_id=args.run))).run_id
        with Watching(core, out, run_id) as watching:
            run = await core.do(resume, out.report)
            return await watching.until_end(run.run_id)
    run = await core.do(resume, out.report)
    where = f"attempt {run.attempt} of {run.run_id} is running on {show_list(run.nodes)}"
    if args.verify is None:
        out.document(run)
        out.text(where)
        return 0
    out.note(f"{where}; {count_of(args.verify, 'step')} are replayed and compared")
    found = await core.do(AwaitCertificate(run_id=run.run_id))
    out.document({**plain(run), "certificate": plain(found)})
    if found is None:
        out.text(f"no step has finished yet; see: rackless runs show {run.run_id}")
        return 1
    out.text(describe_certificate(found))
    return 0 if found.kept else 1


async def _delete(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    later = await core.do(EraseRun(run_id=args.run))
    out.document({"deleted": args.run, "nodes_not_reached": list(later)})
    out.text(f"{args.run} is deleted")
    if later:
        out.note(
            f"{count_of(len(later), 'node')} could not be reached ({show_list(later)}): "
            "their files are deleted when they answer again"
        )
    return 0
