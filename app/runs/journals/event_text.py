"""Turn journal lines that concern the user into run events.

A describer returns the severity, the sentence, and True if the sentence identifies the event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from agents.contract.data import DataFinding
from agents.contract.objectives import METRICS
from agents.contract.wire import WireError, from_wire
from app.events import RunEvent, RunEventKind, Severity
from app.presentation.result_text import describe_certificate
from app.runs.journals.journal import (
    Line,
    metrics_of,
    names_of,
    number_of,
    read_certificate,
    text_of,
    time_of,
    trace_rows,
    whole_of,
)
from app.text import (
    count_of,
    one_line,
    show_bytes,
    show_celsius,
    show_duration,
    show_list,
    show_loss,
    show_share,
)


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """Run event with a key that is equal for the same event in another rank's journal."""

    key: tuple[object, ...]
    event: RunEvent


def describe_line(
    line: Line, run_id: str, attempt: int, node: str, rank: int | None
) -> JournalEvent | None:
    """Return the event of a journal line, or None if it does not concern the user.

    Args:
        line: parsed line.
        run_id: run that the journal belongs to.
        attempt: attempt that the journal belongs to.
        node: node that wrote it.
        rank: rank that wrote it; None for the supervisor's journal.
    """
    line_kind = text_of(line, "kind")
    describers = _SUPERVISOR_LINES if rank is None else _RANK_LINES
    kind, describer = describers.get(line_kind, ("note", _skip))
    found = describer(line, node, rank)
    if found is None:
        return None
    severity, text, own = found
    # All ranks of an attempt write the same checkpoint or evaluation line with other numbers. A
    # failure or a trace belongs to one rank, so its sentence is part of the key.
    key = (attempt, line_kind, whole_of(line, "step"), *((text,) if own else ()))
    time_s = time_of(line)
    event = RunEvent(
        run_id=run_id, time_s=time_s, kind=kind, severity=severity, text=one_line(text)
    )
    return JournalEvent(key, event)


Description = tuple[Severity, str, bool] | None
"""Severity, sentence, and True if the sentence identifies the event. Otherwise all lines of one
kind and step are the same event, even if the numbers in their sentences differ."""


def _describe_started(line: Line, node: str, rank: int | None) -> Description:
    step, total = whole_of(line, "step") or 0, whole_of(line, "total_steps")
    world = whole_of(line, "world_size")
    on = f" on {count_of(world, 'rank')}" if world else ""
    of = f" of {total}" if total is not None else ""
    skipped = whole_of(line, "num_skipped") or 0
    data = text_of(line, "data") or "the data"
    note = f"; {count_of(skipped, 'row')} of {data} skipped{_reason(line)}" if skipped else ""
    cut = whole_of(line, "truncated") or 0
    note += f"; {count_of(cut, 'row')} cut at sequence_tokens" if cut else ""
    return (
        ("warning" if skipped else "info"),
        f"training started after step {step}{of}{on}{note}",
        False,
    )


def _describe_preview(line: Line, node: str, rank: int | None) -> Description:
    tokens, learned = whole_of(line, "num_tokens"), whole_of(line, "num_targets")
    if tokens is None or learned is None:
        return None
    rows = (whole_of(line, "num_rows") or 0) - (whole_of(line, "num_skipped") or 0)
    used = f"{count_of(rows, 'usable row')}, {tokens:,} tokens"
    text = f"data format {text_of(line, 'format')}: {used}"
    fill = number_of(line, "fill")
    packed = f", packed to {show_share(fill)}" if fill is not None else ""
    # Late: a list of runs does not need it.
    from agents.shared.data.findings import list_columns

    unused = [one for one in _findings(line) if one.kind == "unknown"]
    note = f"; not used: {list_columns(unused)}" if unused else ""
    return "info", f"{text}, {learned:,} of them trained on{packed}{note}", False


def _findings(line: Line) -> list[DataFinding]:
    """Return the findings of a preview, without unreadable ones of another version."""
    listed = line.get("findings")
    found = []
    for one in listed if isinstance(listed, list) else []:
        with contextlib.suppress(WireError):
            found.append(from_wire(DataFinding, one))
    return found


def _describe_setting(line: Line, node: str, rank: int | None) -> Description:
    tokens, layers = whole_of(line, "micro_tokens"), whole_of(line, "num_layers")
    twice, moved = whole_of(line, "num_recomputed") or 0, whole_of(line, "num_moved") or 0
    streamed, from_disk = whole_of(line, "num_streamed") or 0, whole_of(line, "num_from_disk") or 0
    is_compiled = line.get("compiled") is True
    if tokens is None or layers is None or not (is_compiled or twice or moved or streamed):
        return None  # a CPU has no setting to choose
    who = f"rank {rank} on {node}"
    text = f"uses micro-batches of up to {tokens:,} tokens"
    text += ", padded to few shapes that are replayed," if line.get("is_repeating") else ""
    text += " and compiled layers" if is_compiled else ""
    source = " from inputs in the PC's memory" if line.get("offloads_inputs") else ""
    does = [f"{twice} recompute their activations{source}"] if twice else []
    does += [f"{moved} offload them to the PC's memory"] if moved else []
    if streamed:
        note = f" ({from_disk} from its disk)" if from_disk else ""
        does.append(f"{streamed} are streamed from the PC{note}")
    text += f"; of {count_of(layers, 'layer')}, {' and '.join(does)}" if does else ""
    believed = number_of(line, "believed_tokens_per_s")
    measured = number_of(line, "measured_tokens_per_s")
    if believed is None:
        return "info", f"{who} {text}", True
    if measured is None:
        why = "since a checkpoint came before another setting had been measured"
        return "info", f"{who} {text}, {why}", True
    # The trainer corrects its search if steps are slower than expected.
    why = f"the last one reached {measured:,.0f} of {believed:,.0f} expected tokens/s"
    return "info", f"{who} corrected its setting: {why}. It now {text}", True


def _reason(line: Line) -> str:
    rows = line.get("skipped")
    if isinstance(rows, list) and rows and isinstance(rows[0], dict):
        row, reason = rows[0].get("row"), rows[0].get("reason")
        return f" (row {row}: {reason})" if reason else ""
    return ""


def _describe_checkpoint(line: Line, node: str, rank: int | None) -> Description:
    if line.get("at_loss") is True:
        text = f"{node} saved step {whole_of(line, 'step')} before the attempt ended"
        return "info", text, False
    seconds = number_of(line, "seconds")
    took = f" in {show_duration(seconds)}" if seconds is not None else ""
    stall_s = number_of(line, "stall_s")
    stood = f"; training paused for {show_duration(stall_s)}" if stall_s is not None else ""
    return "info", f"checkpoint of step {whole_of(line, 'step')} saved{took}{stood}", False


def _describe_regrouped(line: Line, node: str, rank: int | None) -> Description:
    nodes, lost = names_of(line, "nodes"), names_of(line, "lost_nodes")
    if not nodes or not lost:
        return None
    cost_s = number_of(line, "cost_s")
    back = f", back after {show_duration(cost_s)}, and" if cost_s is not None else ", and"
    text = f"{text_of(line, 'reason')}; {show_list(nodes)} continued in their processes{back}"
    return "warning", f"{text} no completed step is repeated", False


def _describe_checkpoint_failed(line: Line, node: str, rank: int | None) -> Description:
    if line.get("repeated") is True:
        return None  # the reason was reported, and is the same
    step, message = whole_of(line, "step"), text_of(line, "message")
    text = f"the checkpoint of step {step} could not be saved on {node}: {message}"
    return "warning", f"{text} {text_of(line, 'hint')}".strip(), True


def _describe_disk_room(line: Line, node: str, rank: int | None) -> Description:
    free = show_bytes(whole_of(line, "free_bytes"))
    return "info", f"{node} can store checkpoints again: {free} are free", True


def _describe_paused(line: Line, node: str, rank: int | None) -> Description:
    step, message = whole_of(line, "step"), text_of(line, "message")
    text = f"training is done up to step {step} and waits, since {node} cannot save: {message}"
    return "warning", f"{text} The run continues by itself once it can", True


def _describe_too_hot(line: Line, node: str, rank: int | None) -> Description:
    at, until = (show_celsius(number_of(line, key)) for key in ("celsius", "until_celsius"))
    gpu = text_of(line, "gpu") or f"a GPU of {node}"
    return "warning", f"{gpu} has {at}: all ranks pause until it is down to {until}", True


def _describe_cooled(line: Line, node: str, rank: int | None) -> Description:
    paused = show_duration(number_of(line, "paused_s"))
    return "info", f"training continues after a pause of {paused} for cooling", False


def _describe_certificate(line: Line, node: str, rank: int | None) -> Description:
    found = read_certificate(line)
    if found is None:
        return None
    return ("info" if found.kept else "error"), describe_certificate(found), True


def _describe_trace(line: Line, node: str, rank: int | None) -> Description:
    first, last = whole_of(line, "first_step"), whole_of(line, "last_step")
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    about = f"{text_of(line, 'file')}, {show_bytes(whole_of(line, 'size_bytes'))}"
    rows = trace_rows(line)
    most = f"; slowest operation: {rows[0].name[:60]} ({show_share(rows[0].share)})" if rows else ""
    return "info", f"rank {rank} on {node} recorded {steps} ({about}){most}", True


def _describe_trace_failed(line: Line, node: str, rank: int | None) -> Description:
    return (
        "warning",
        f"rank {rank} on {node} could not record a trace: {text_of(line, 'message')}",
        True,
    )


def _describe_warning(line: Line, node: str, rank: int | None) -> Description:
    words = " ".join(text for text in (text_of(line, "message"), text_of(line, "hint")) if text)
    # Without the rank, the same event on two GPUs would count as one.
    said = _with_rank(words, node, rank) if line.get("of_rank") is True else words
    return ("warning", said, True) if words else None


def _with_rank(text: str, node: str, rank: int | None) -> str:
    """Prefix a rank's message with its name, unless the message begins with it."""
    return text if text.startswith(f"rank {rank} (node ") else f"rank {rank} on {node}: {text}"


def _describe_rounded(line: Line, node: str, rank: int | None) -> Description:
    found = [
        f"{name} by {show_share(share, 2)}"
        for name in ("features", "gradients")
        if (share := number_of(line, name)) is not None
    ]
    where = f"rank {rank} on {node}"
    return "info", f"{where} sends 8 bits, which changes {' and '.join(found)}", False


def _describe_eval(line: Line, node: str, rank: int | None) -> Description:
    figures = [f"loss {show_loss(number_of(line, 'loss'))}"]
    perplexity = number_of(line, "perplexity")
    if perplexity is not None:
        figures.append(f"perplexity {show_loss(perplexity)}")
    figures += [
        METRICS[name].sentence.format(share=show_share(value))
        for name, value in metrics_of(line).items()
        if METRICS[name].sentence
    ]
    return "info", f"evaluation after step {whole_of(line, 'step')}: {', '.join(figures)}", False


def _describe_finished(line: Line, node: str, rank: int | None) -> Description:
    step = whole_of(line, "step")
    if text_of(line, "reason") == "stopped":
        return "info", f"training stopped after step {step}", False
    return "info", f"training finished after step {step}", False


def _describe_failed(line: Line, node: str, rank: int | None) -> Description:
    return "error", _with_rank(text_of(line, "message"), node, rank), True


def _describe_adopted(line: Line, node: str, rank: int | None) -> Description:
    ranks = line.get("ranks")
    living = sorted({r for r in ranks if isinstance(r, int)}) if isinstance(ranks, list) else []
    lived = f"; rank {show_list([str(r) for r in living])} continued meanwhile" if living else ""
    # By the process id: another supervisor may be killed later as well.
    pid = whole_of(line, "pid")
    text = f"the run's supervisor on {node} was killed and replaced by process {pid}{lived}"
    return "warning", text, True


def _describe_stalled(line: Line, node: str, rank: int | None) -> Description:
    return "error", text_of(line, "message") or f"a rank on {node} is stuck", True


def _describe_standing(line: Line, node: str, rank: int | None) -> Description:
    return "warning", text_of(line, "message") or f"a rank on {node} stands still", True


def _describe_slept(line: Line, node: str, rank: int | None) -> Description:
    slept = show_duration(number_of(line, "duration_s"))
    said = text_of(line, "message") or f"Node {node} slept."
    return "warning", f"{said} Training stood still for these {slept}.", True


def _describe_clock_set(line: Line, node: str, rank: int | None) -> Description:
    by_s = number_of(line, "by_s") or 0.0
    how = "forward" if by_s > 0 else "back"
    return "info", f"the clock of {node} was set {how} by {show_duration(abs(by_s))}", True


def _describe_disk(line: Line, node: str, rank: int | None) -> Description:
    lacks = text_of(line, "lacks")
    if not lacks:
        return "info", f"the disk of {node} has room again", True
    what, remedy = "is full", "free some space there"
    if lacks == "files":
        what = "takes no more files, since its inodes are used up"
        remedy = "delete files there, also small ones (df -i)"
    text = f"the disk of {node} {what}; training continues, but its logs may have gaps: {remedy}"
    return "warning", text, True


def _describe_moving(line: Line, node: str, rank: int | None) -> Description:
    return "info", f"the ranks on {node} continue", True


def describe_exit(line: Line, node: str) -> str:
    """Return the end of a node's rank in words, from the line of its supervisor."""
    code = whole_of(line, "exit_code") or 0
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"rank {whole_of(line, 'rank')} on node {node} {text_of(line, 'how') or how}"


def _describe_exit(line: Line, node: str, rank: int | None) -> Description:
    code = whole_of(line, "exit_code")
    return ("warning", describe_exit(line, node), True) if code else None


def _describe_peer_request(line: Line, node: str, rank: int | None) -> Description:
    what, about = text_of(line, "request"), text_of(line, "message").rstrip(".")
    is_refused = line.get("is_refused") is True
    verb = "refused" if is_refused else "carried out"
    text = f"{node} {verb} the request `{what}` of {text_of(line, 'sender')}: {about}"
    return "warning" if is_refused else "info", text, True


def _skip(line: Line, node: str, rank: int | None) -> Description:
    return None


Describer = Callable[[Line, str, int | None], Description]
_RANK_LINES: dict[str, tuple[RunEventKind, Describer]] = {
    "started": ("started", _describe_started),
    "preview": ("data_read", _describe_preview),
    "setting": ("setting", _describe_setting),
    "regrouped": ("recovery", _describe_regrouped),
    "checkpoint": ("checkpoint", _describe_checkpoint),
    "checkpoint_failed": ("checkpoint_failed", _describe_checkpoint_failed),
    "disk_room": ("note", _describe_disk_room),
    "paused": ("warning", _describe_paused),
    "too_hot": ("too_hot", _describe_too_hot),
    "cooled": ("cooled", _describe_cooled),
    "certificate": ("certificate", _describe_certificate),
    "trace": ("trace", _describe_trace),
    "trace_failed": ("trace_failed", _describe_trace_failed),
    "warning": ("warning", _describe_warning),
    "rounded": ("note", _describe_rounded),
    "eval": ("evaluated", _describe_eval),
    "finished": ("finished", _describe_finished),
    "failed": ("failed", _describe_failed),
}
_SUPERVISOR_LINES: dict[str, tuple[RunEventKind, Describer]] = {
    "adopted": ("adopted", _describe_adopted),
    "stalled": ("stalled", _describe_stalled),
    "standing": ("stalled", _describe_standing),
    "moving": ("stalled", _describe_moving),
    "slept": ("slept", _describe_slept),
    "clock_set": ("clock_set", _describe_clock_set),
    "disk": ("disk", _describe_disk),
    "rank_exited": ("rank_exited", _describe_exit),
    "peer_request": ("recovery", _describe_peer_request),
}
