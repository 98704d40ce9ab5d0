"""Read the journals that trainer and supervisor write, and say in plain words what they tell.

A journal is append-only JSON lines. What a line says is taken field by field: a missing or odd
value becomes None, a line that is no JSON (the disk was full) is passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.events import Certificate, RankTrace, RunEvent, StepRecord, TraceRow
from app.telling import describe_certificate
from app.text import count_of, show_bytes, show_duration, show_loss, show_share

MAX_READ_BYTES = 8 << 20
Line = Mapping[str, Any]
Severity = Literal["info", "warning", "error"]


class JournalTail:
    """Reads the complete lines that were appended to one mirrored journal since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the new lines; a last line without its end stays for the next time."""
        lines: list[dict[str, Any]] = []
        try:
            with self._path.open("rb") as file:
                while chunk := self._next_lines(file):
                    lines += [line for line in map(_parse, chunk.splitlines()) if line is not None]
        except FileNotFoundError:
            pass
        return lines

    def _next_lines(self, file: Any) -> bytes:
        file.seek(self._offset)
        chunk: bytes = file.read(MAX_READ_BYTES)
        chunk = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(chunk)
        return chunk


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


# ---------------------------------------------------------------- single values


def number_of(line: Line, key: str) -> float | None:
    """Return a finite number, else None."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def whole_of(line: Line, key: str) -> int | None:
    """Return a whole number, else None."""
    value = line.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text_of(line: Line, key: str) -> str:
    value = line.get(key)
    return value if isinstance(value, str) else ""


def shares_of(line: Line) -> tuple[float, ...]:
    """Return each rank's part of a batch, normalised to 1; empty when not told."""
    values = line.get("shares")
    if not isinstance(values, list):
        return ()
    numbers = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v) and v >= 0]
    total = sum(numbers)
    return tuple(v / total for v in numbers) if total > 0 and len(numbers) == len(values) else ()


# ---------------------------------------------------------------- whole lines


def step_record(line: Line, attempt: int) -> StepRecord | None:
    """Return the optimizer step that a rank's journal line tells; None: it tells none.

    `loss` stays not-a-number when it is, because a diverged run must show.
    """
    step = whole_of(line, "step")
    if line.get("kind") != "step" or step is None:
        return None
    step_s, tokens = number_of(line, "step_s"), number_of(line, "global_tokens")
    loss = line.get("loss")
    return StepRecord(
        attempt=attempt,
        step=step,
        time_s=number_of(line, "time_s") or 0.0,
        loss=float(loss) if isinstance(loss, (int, float)) else None,
        learning_rate=number_of(line, "learning_rate"),
        gradient_norm=number_of(line, "gradient_norm"),
        tokens_per_s=tokens / step_s if tokens is not None and step_s else None,
        step_s=step_s,
        wait_s=number_of(line, "wait_s"),
        eta=number_of(line, "eta"),
    )


def read_certificate(line: Line) -> Certificate | None:
    """Return the certificate that a journal line is; None: it lacks something."""
    promise, steps = text_of(line, "promise"), whole_of(line, "steps")
    if promise not in ("A", "B") or not steps:
        return None
    difference = number_of(line, "largest_difference")
    return Certificate(
        promise="A" if promise == "A" else "B",
        first_step=whole_of(line, "first_step") or 0,
        last_step=whole_of(line, "last_step") or 0,
        steps=steps,
        equal_to_the_bit=line.get("equal_to_the_bit") is True,
        largest_difference=math.inf if difference is None else difference,
        other_samples=whole_of(line, "other_samples") or 0,
        kept=line.get("kept") is True,
    )


def read_trace(line: Line, rank: int, folder: Path) -> RankTrace | None:
    """Return what a journal line tells of a trace in the mirror `folder`; None: nothing."""
    kind, first_step = text_of(line, "kind"), whole_of(line, "first_step")
    if kind not in ("trace", "trace_failed") or first_step is None:
        return None
    return RankTrace(
        rank=rank,
        first_step=first_step,
        last_step=whole_of(line, "last_step") or first_step,
        path=str(folder / text_of(line, "file")),
        size_bytes=whole_of(line, "size_bytes") or 0,
        top=trace_rows(line),
        problem=text_of(line, "message") if kind == "trace_failed" else "",
    )


def trace_rows(line: Line) -> tuple[TraceRow, ...]:
    """Return the operations that a trace's record tells."""
    rows = line.get("top")
    return tuple(
        TraceRow(
            name=text_of(row, "name"),
            count=whole_of(row, "count") or 0,
            seconds=number_of(row, "seconds") or 0.0,
            share=number_of(row, "share") or 0.0,
        )
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict)
    )


@dataclass(frozen=True, slots=True)
class Happening:
    """An event with what makes it the same event in another rank's journal."""

    key: tuple[object, ...]
    severity: Severity
    time_s: float
    text: str

    def event(self, run_id: str) -> RunEvent:
        return RunEvent(run_id=run_id, time_s=self.time_s, severity=self.severity, text=self.text)


def happening(line: Line, attempt: int, node: str, rank: int | None) -> Happening | None:
    """Return what a journal line tells a person; None: nothing worth a sentence."""
    kind = text_of(line, "kind")
    time_s = number_of(line, "time_s") or 0.0
    teller = _RANK_TELLERS.get(kind) if rank is not None else _SUPERVISOR_TELLERS.get(kind)
    told = teller(line, node, rank) if teller else None
    if told is None:
        return None
    severity, text, own = told
    key = (attempt, kind, whole_of(line, "step"), *((text,) if own else ()))
    return Happening(key, severity, time_s, text)


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
    size = show_bytes(whole_of(line, "size_bytes"))
    rows = trace_rows(line)
    most = f"; most time: {rows[0].name[:60]} ({show_share(rows[0].share)})" if rows else ""
    return "info", f"rank {rank} on {node} recorded {steps}: {size}{most}", True


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


_RANK_TELLERS = {
    "started": _tell_started,
    "checkpoint": _tell_checkpoint,
    "checkpoint_failed": _tell_checkpoint_failed,
    "certificate": _tell_certificate,
    "trace": _tell_trace,
    "trace_failed": _tell_trace_failed,
    "warning": _tell_warning,
    "eval": _tell_eval,
    "finished": _tell_finished,
    "failed": _tell_failed,
}
_SUPERVISOR_TELLERS = {"stalled": _tell_stalled, "rank_exited": _tell_exit}
__all__ = [
    "Happening",
    "JournalTail",
    "happening",
    "number_of",
    "read_certificate",
    "read_trace",
    "shares_of",
    "step_record",
    "text_of",
    "trace_rows",
    "whole_of",
]
