"""Say in plain words what the lines of a journal tell that a person wants to know of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.events import RunEvent, RunEventKind, Severity
from app.presentation.result_text import describe_certificate
from app.runs.journals.journal import (
    Line,
    number_of,
    read_certificate,
    text_of,
    trace_rows,
    whole_of,
)
from app.text import count_of, show_bytes, show_duration, show_loss, show_share


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """An event with what makes it the same event in another rank's journal."""

    key: tuple[object, ...]
    event: RunEvent


def describe_line(
    line: Line, run_id: str, attempt: int, node: str, rank: int | None
) -> JournalEvent | None:
    """Return what a journal line tells a person; None: nothing worth a sentence."""
    line_kind = text_of(line, "kind")
    tellers = _SUPERVISOR_TELLERS if rank is None else _RANK_TELLERS
    kind, teller = tellers.get(line_kind, ("note", _tell_nothing))
    told = teller(line, node, rank)
    if told is None:
        return None
    severity, text, own = told
    key = (attempt, line_kind, whole_of(line, "step"), *((text,) if own else ()))
    time_s = number_of(line, "time_s") or 0.0
    event = RunEvent(run_id=run_id, time_s=time_s, kind=kind, severity=severity, text=text)
    return JournalEvent(key, event)


Told = tuple[Severity, str, bool] | None
"""Severity, sentence, and whether the sentence makes the event (else all that have its kind and
step are the same one, whatever the numbers in their sentences)."""


def _tell_started(line: Line, node: str, rank: int | None) -> Told:
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
        f"training began after step {step}{of}{on}{note}",
        False,
    )


def _tell_preview(line: Line, node: str, rank: int | None) -> Told:
    tokens, learned = whole_of(line, "num_tokens"), whole_of(line, "num_targets")
    if tokens is None or learned is None:
        return None
    rows = (whole_of(line, "num_rows") or 0) - (whole_of(line, "num_skipped") or 0)
    used = f"{count_of(rows, 'row')} of use, {tokens:,} tokens"
    text = f"the data is read as {text_of(line, 'format')}: {used}"
    fill = number_of(line, "fill")
    packed = f", in packs {show_share(fill)} full" if fill is not None else ""
    return "info", f"{text}, {learned:,} of them learned{packed}", False


def _tell_setting(line: Line, node: str, rank: int | None) -> Told:
    tokens, layers = whole_of(line, "micro_tokens"), whole_of(line, "num_layers")
    twice, moved = whole_of(line, "num_recomputed") or 0, whole_of(line, "num_moved") or 0
    is_compiled = line.get("compiled") is True
    if tokens is None or layers is None or not (is_compiled or twice or moved):
        return None  # a CPU, which has nothing to choose
    text = f"rank {rank} on {node} computes up to {tokens:,} tokens at once"
    text += " with compiled layers" if is_compiled else ""
    does = [f"{twice} recompute their activations"] if twice else []
    does += [f"{moved} keep theirs in the PC's memory"] if moved else []
    more = f"; of {count_of(layers, 'layer')} {' and '.join(does)}" if does else ""
    return "info", text + more, True


def _reason(line: Line) -> str:
    rows = line.get("skipped")
    if isinstance(rows, list) and rows and isinstance(rows[0], dict):
        row, reason = rows[0].get("row"), rows[0].get("reason")
        return f" (row {row}: {reason})" if reason else ""
    return ""


def _tell_checkpoint(line: Line, node: str, rank: int | None) -> Told:
    seconds = number_of(line, "seconds")
    took = f" in {show_duration(seconds)}" if seconds is not None else ""
    stall_s = number_of(line, "stall_s")
    stood = f"; training stood still for {show_duration(stall_s)}" if stall_s is not None else ""
    return "info", f"checkpoint of step {whole_of(line, 'step')} saved{took}{stood}", False


def _tell_checkpoint_failed(line: Line, node: str, rank: int | None) -> Told:
    step, message = whole_of(line, "step"), text_of(line, "message")
    return "warning", f"the checkpoint of step {step} failed on {node}: {message}", True


def _tell_certificate(line: Line, node: str, rank: int | None) -> Told:
    found = read_certificate(line)
    if found is None:
        return None
    return ("info" if found.kept else "error"), describe_certificate(found), True


def _tell_trace(line: Line, node: str, rank: int | None) -> Told:
    first, last = whole_of(line, "first_step"), whole_of(line, "last_step")
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    about = f"{text_of(line, 'file')}, {show_bytes(whole_of(line, 'size_bytes'))}"
    rows = trace_rows(line)
    most = f"; most time: {rows[0].name[:60]} ({show_share(rows[0].share)})" if rows else ""
    return "info", f"rank {rank} on {node} recorded {steps} ({about}){most}", True


def _tell_trace_failed(line: Line, node: str, rank: int | None) -> Told:
    return "warning", f"rank {rank} on {node} made no trace: {text_of(line, 'message')}", True


def _tell_warning(line: Line, node: str, rank: int | None) -> Told:
    words = " ".join(text for text in (text_of(line, "message"), text_of(line, "hint")) if text)
    return ("warning", words, True) if words else None


def _tell_eval(line: Line, node: str, rank: int | None) -> Told:
    told = [f"loss {show_loss(number_of(line, 'loss'))}"]
    perplexity, right = number_of(line, "perplexity"), number_of(line, "reward_accuracy")
    if perplexity is not None:
        told.append(f"perplexity {show_loss(perplexity)}")
    if right is not None:
        told.append(f"{show_share(right)} of pairs ranked rightly")
    return "info", f"evaluation after step {whole_of(line, 'step')}: {', '.join(told)}", False


def _tell_finished(line: Line, node: str, rank: int | None) -> Told:
    step = whole_of(line, "step")
    if text_of(line, "reason") == "stopped":
        return "info", f"training stopped after step {step}", False
    return "info", f"training finished after step {step}", False


def _tell_failed(line: Line, node: str, rank: int | None) -> Told:
    return "error", f"rank {rank} on {node}: {text_of(line, 'message')}", True


def _tell_stalled(line: Line, node: str, rank: int | None) -> Told:
    return "error", text_of(line, "message") or f"a rank on {node} stands still", True


def _tell_exit(line: Line, node: str, rank: int | None) -> Told:
    code = whole_of(line, "exit_code")
    if code is None or code == 0:
        return None
    who = f"rank {whole_of(line, 'rank')} on {node}"
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return "warning", f"{who} {how}", True


def _tell_nothing(line: Line, node: str, rank: int | None) -> Told:
    return None


Teller = Callable[[Line, str, int | None], Told]
_RANK_TELLERS: dict[str, tuple[RunEventKind, Teller]] = {
    "started": ("started", _tell_started),
    "preview": ("data_read", _tell_preview),
    "setting": ("setting", _tell_setting),
    "checkpoint": ("checkpoint", _tell_checkpoint),
    "checkpoint_failed": ("checkpoint_failed", _tell_checkpoint_failed),
    "certificate": ("certificate", _tell_certificate),
    "trace": ("trace", _tell_trace),
    "trace_failed": ("trace_failed", _tell_trace_failed),
    "warning": ("warning", _tell_warning),
    "eval": ("evaluated", _tell_eval),
    "finished": ("finished", _tell_finished),
    "failed": ("failed", _tell_failed),
}
_SUPERVISOR_TELLERS: dict[str, tuple[RunEventKind, Teller]] = {
    "stalled": ("stalled", _tell_stalled),
    "rank_exited": ("rank_exited", _tell_exit),
}
