"""Read the journals that trainer and supervisor write.

A journal is an append-only file of JSON lines. Lines are read field by field, not into dataclasses:
journals outlive versions, so a missing or odd value becomes None, and a line that is not JSON (from
a full disk) is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.contract.json_text import parse_json
from agents.contract.names import MAX_STEP, MAX_TIME_S, is_safe_name
from agents.contract.objectives import METRICS
from agents.contract.run_layout import is_stream
from agents.contract.wire import WireError
from app.events import Certificate, RankTrace, StepRecord, TraceRow

# Limits memory while a long journal is read for the first time; a line is a few hundred bytes.
MAX_READ_BYTES = 8 << 20
MAX_TEXT_CHARACTERS = 16_000
"""Maximum length of a text in a line, enough for several tracebacks."""
Line = Mapping[str, Any]


class JournalTail:
    """Reader of the complete lines that were appended to one mirrored journal since the last
    read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the new lines; an incomplete last line is left for the next call."""
        lines: list[dict[str, Any]] = []
        try:
            with self._path.open("rb") as file:
                while chunk := self._next_lines(file):
                    lines += [line for line in map(_parse, chunk.splitlines()) if line is not None]
        except FileNotFoundError:
            pass  # not fetched yet
        return lines

    def _next_lines(self, file: Any) -> bytes:
        file.seek(self._offset)
        chunk: bytes = file.read(MAX_READ_BYTES)
        # Without a newline this is empty, which ends the loop and leaves the offset in place.
        chunk = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(chunk)
        return chunk


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line, finite=False)
    except WireError:
        return None
    # Each journal line has a kind; other JSON is damage.
    return value if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


# ---------------------------------------------------------------- single values


def number_of(line: Line, key: str) -> float | None:
    """Return a finite number, else None."""
    value = line.get(key)
    # bool is a subclass of int, and JSON as Python writes it allows NaN and Infinity.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _share_of(line: Line, key: str) -> float | None:
    """Return a share from 0 to 1; older versions compared with a cold card, and found more."""
    value = number_of(line, key)
    return None if value is None else min(1.0, max(0.0, value))


def metrics_of(line: Line) -> dict[str, float]:
    """Return the metrics that the run's objective reports besides the loss, by name."""
    found = {name: number_of(line, name) for name in METRICS}
    return {name: value for name, value in found.items() if value is not None}


def whole_of(line: Line, key: str) -> int | None:
    """Return a whole number, else None."""
    value = line.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def step_of(line: Line, key: str = "step") -> int | None:
    """Return the number of a step, or None if a run cannot reach it."""
    step = whole_of(line, key)
    return step if step is not None and 0 <= step <= MAX_STEP else None


def time_of(line: Line) -> float:
    """Return the wall clock time of a line, in seconds since 1970; 0 if it is invalid."""
    time_s = number_of(line, "time_s") or 0.0
    return time_s if 0 <= time_s <= MAX_TIME_S else 0.0


def text_of(line: Line, key: str) -> str:
    """Return a text, cut to a length that can be shown; empty if it is missing."""
    value = line.get(key)
    return value[:MAX_TEXT_CHARACTERS] if isinstance(value, str) else ""


def shares_of(line: Line) -> tuple[float, ...]:
    """Return each rank's share of a batch, normalised to a sum of 1; empty if unknown."""
    values = line.get("shares")
    if not isinstance(values, list):
        return ()
    numbers = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v) and v >= 0]
    total = sum(numbers)
    # Shares belong to ranks by position, so one odd value spoils all of them.
    return tuple(v / total for v in numbers) if total > 0 and len(numbers) == len(values) else ()


def names_of(line: Line, key: str) -> tuple[str, ...]:
    """Return a list of node names; empty if it is missing or has an unsafe name."""
    values = line.get(key)
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        return ()
    return tuple(values) if all(map(is_safe_name, values)) else ()


# ---------------------------------------------------------------- whole lines


def step_record(line: Line, attempt: int) -> StepRecord | None:
    """Return the optimizer step of a rank's journal line, or None for another kind.

    A loss that is NaN is kept, because a diverged run must be visible.
    """
    step = step_of(line)
    if line.get("kind") != "step" or step is None:
        return None
    step_s, tokens = number_of(line, "step_s"), number_of(line, "global_tokens")
    # Not `number_of`, which would drop a NaN.
    loss = line.get("loss")
    return StepRecord(
        attempt=attempt,
        step=step,
        time_s=time_of(line),
        loss=float(loss) if isinstance(loss, (int, float)) else None,
        learning_rate=number_of(line, "learning_rate"),
        gradient_norm=number_of(line, "gradient_norm"),
        tokens_per_s=tokens / step_s if tokens is not None and step_s else None,
        step_s=step_s,
        wait_s=number_of(line, "wait_s"),
        eta=_share_of(line, "eta"),
        metrics=metrics_of(line),
    )


def read_certificate(line: Line) -> Certificate | None:
    """Return the certificate in a journal line, or None if the line is incomplete."""
    promise, steps = text_of(line, "promise"), whole_of(line, "steps")
    if promise not in ("A", "B") or not steps:
        return None
    # `number_of` returns None for an infinite difference.
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
    """Return the trace of a journal line, in the mirror `folder`; None for other kinds."""
    kind, first_step = text_of(line, "kind"), step_of(line, "first_step")
    if kind not in ("trace", "trace_failed") or first_step is None:
        return None
    # A failed one has no file.
    file = text_of(line, "file")
    return RankTrace(
        rank=rank,
        first_step=first_step,
        last_step=whole_of(line, "last_step") or first_step,
        path=str(folder / file if is_stream(file) else folder),
        size_bytes=whole_of(line, "size_bytes") or 0,
        top=trace_rows(line),
        problem=text_of(line, "message") if kind == "trace_failed" else "",
    )


def trace_rows(line: Line) -> tuple[TraceRow, ...]:
    """Return the slowest operations in the journal line of a trace."""
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
