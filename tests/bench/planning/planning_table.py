"""How near the planner's forecasts of memory come to what was measured.

    python3 -m tests.bench.planning.planning_table  # what is in the tests' own table
    python3 -m tests.bench.planning.planning_table rows.jsonl ...  # what bench_planning has written
    python3 -m tests.bench.planning.planning_table rows.jsonl ... --write  # and make it that table

Each row is a setting with its measured peak, the forecast, and the error of the forecast: above 0
it is too high. Held-out rows are those of models that nobody looks at who fits a constant.
Below the tests' own table stand whole runs (`measured_runs`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.planning.hardware.cluster import PlannedGpu
from app.planning.hardware.rates import find_rates
from app.planning.memory.forecast import (
    GIB,
    GpuMemory,
    MemoryForecast,
    MemorySetting,
    estimate_memory,
)
from app.planning.row_lengths import RowLengths
from app.planning.shape.model_shape import read_shape
from app.planning.throughput import make_pace, measure_work
from tests.bench.planning.measured_runs import read_runs, show_runs
from tests.bench.planning.planning_jobs import SHAPES

TABLE = Path(__file__).parents[2] / "app" / "planning" / "memory" / "measured_memory.json"
H200 = GpuMemory(total_bytes=140 * GIB, capability=(9, 0), num_multiprocessors=132)
_TOLD = (
    "shape", "kind", "rank", "targets", "dropout", "dora", "experts", "objective", "optimizer",
    "sequence", "unlike", "held_out", "compiled",
)  # fmt: skip
# Passes whose longest took at most this share longer than the shortest are compared as a whole.
_QUIET = 0.15
_CARD = ("name", "total_bytes", "capability", "num_multiprocessors")


def read_table(path: Path = TABLE) -> dict[str, Any]:
    """Return the tests' own table: `shapes` by name, and `rows`."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    return found


def convert(*paths: Path) -> dict[str, Any]:
    """Return the same from the lines that `bench_planning` has written.

    Rows of models that took a slow path, of which a warning told, are left out.
    """
    texts = [path.read_text(encoding="ascii") for path in paths]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    measured = [
        one for one in lines if one["what"] == "row" and one.get("fits") and not one["warnings"]
    ]
    rows = [
        {
            **{key: one[key] for key in _TOLD},
            "tokens": one["sequence"] * one["batch"],
            "num_recomputed": one["plan"]["recomputed"],
            "num_moved": one["plan"]["moved"],
            "peak_gib": round(one["peak_bytes"] / GIB, 4),
            "memory_gib": round(one["memory_bytes"] / GIB, 4),
            "rest_gib": round(one["rest_bytes"] / GIB, 4),
            "reserved_gib": round(one["reserved_bytes"] / GIB, 4),
            "lengths": one["lengths"],
            "pass_s": min(one["pass_s"]),
            "spread": round(max(one["pass_s"]) / min(one["pass_s"]) - 1, 3),
            "step_s": min(one["step_s"]),
        }
        for one in measured
    ]
    cards = [one for one in lines if one["what"] == "calibration"]
    (card, *_) = cards or [{}]
    return {
        "about": f"Steps on one {card.get('name')} (torch {card.get('torch')}, transformers "
        f"{card.get('transformers')}), by tests.bench.bench_planning: peaks of torch.cuda."
        "max_memory_allocated, and the memory that a step's record reports.",
        "card": {key: card[key] for key in _CARD} if "name" in card else None,
        "shapes": {name: SHAPES[name] for name in dict.fromkeys(one["shape"] for one in rows)},
        "rows": rows,
    }


def read_gpu(table: dict[str, Any]) -> GpuMemory:
    """Return the card of a table."""
    card = table.get("card")
    if card is None:
        return H200
    return GpuMemory(
        total_bytes=card["total_bytes"],
        capability=(card["capability"][0], card["capability"][1]),
        num_multiprocessors=card["num_multiprocessors"],
    )


def make_spec(row: dict[str, Any]) -> RunSpec:
    """Return the run of a row."""
    targets = row["targets"]
    adapter = AdapterSpec(
        kind=row["kind"],
        rank=row["rank"],
        targets=targets if isinstance(targets, str) else tuple(targets),
        dropout=row["dropout"],
        dora=row.get("dora", False),
        experts=row.get("experts", False),
    )
    return RunSpec(
        model="bench",
        data=DataSpec(train="rows.jsonl"),
        adapter=adapter,
        objective=row.get("objective", "sft"),
        optimizer=row["optimizer"],
        compile="auto" if row.get("compiled", True) else "off",
    )


def read_setting(row: dict[str, Any]) -> MemorySetting:
    """Return the setting of a row."""
    return MemorySetting(
        micro_tokens=row["tokens"], num_recomputed=row["num_recomputed"], num_moved=row["num_moved"]
    )


def forecast(table: dict[str, Any], row: dict[str, Any]) -> MemoryForecast:
    """Return what the planner says of a row's memory."""
    return estimate_memory(
        read_shape(table["shapes"][row["shape"]]),
        make_spec(row),
        setting=read_setting(row),
        longest_tokens=row["sequence"],
        gpu=read_gpu(table),
    )


def step_error_of(table: dict[str, Any], row: dict[str, Any]) -> float:
    """Return by which share the forecast of a step's passes takes too long; below 0: too short."""
    lengths, spec = sorted(row["lengths"]), make_spec(row)
    mean = sum(lengths) / len(lengths)
    rows = RowLengths(mean_tokens=mean, lengths=() if lengths[0] == lengths[-1] else tuple(lengths))
    shape = read_shape(table["shapes"][row["shape"]])
    work = measure_work(shape, spec, mean / (2 if spec.objective == "dpo" else 1))
    card = table["card"]
    rates = find_rates(PlannedGpu(name=card["name"], capability=tuple(card["capability"])))
    pace = make_pace(work, rates, may_replay=row["compiled"], compiled=row["compiled"])
    return pace.seconds(sum(lengths), read_setting(row), rows) / row["pass_s"] - 1


def error_of(table: dict[str, Any], row: dict[str, Any]) -> float:
    """Return by which share the forecast is too high; below 0: too low."""
    return forecast(table, row).allocated_bytes / GIB / row["peak_gib"] - 1


def summarize(errors: Iterable[float]) -> str:
    """Return mean, worst and lowest error in words."""
    found = list(errors)
    if not found:
        return "no rows"
    mean = sum(abs(one) for one in found) / len(found)
    worst = max(abs(one) for one in found)
    return f"{len(found)} rows: mean {mean:.1%}, worst {worst:.1%}, lowest {min(found):+.1%}"


def show(table: dict[str, Any]) -> None:
    """Print the rows and what they come to."""
    errors, of_quiet = [], []
    for row in table["rows"]:
        error = error_of(table, row)
        errors.append(error)
        adapter = row["kind"] + (" DoRA" if row.get("dora") else "")
        said = (
            f"{row['shape']:3} {adapter:5} r={row['rank']:<3} {row['sequence']:5} of "
            f"{row['tokens']:5} tokens, {row['num_recomputed']:2} recomputed, "
            f"{row['num_moved']:2} moved, {row['optimizer']:16}"
        )
        if not row.get("compiled", True):
            said += " not compiled,"
        measured = f"{row['peak_gib']:7.2f} GiB, forecast {row['peak_gib'] * (1 + error):7.2f}"
        steps = ""
        if "pass_s" in row:
            of_steps = step_error_of(table, row)
            if row["spread"] < _QUIET:
                of_quiet.append(of_steps)
            steps = f"; passes {row['pass_s']:.3f} s, {of_steps:+4.0%} (turns {row['spread']:.0%})"
        print(f"{said} {measured}, {error:+6.1%}{steps}")
    print("all:     ", summarize(errors))
    marks = [row.get("held_out", place % 2 == 1) for place, row in enumerate(table["rows"])]
    for name, wanted in (("fitted:  ", False), ("held out:", True)):
        print(name, summarize(e for e, mark in zip(errors, marks, strict=True) if mark == wanted))
    print("passes that took about as long each time:", summarize(of_quiet))


def write_table(table: dict[str, Any]) -> str:
    """Return a table as JSON with a row a line."""
    head = {key: value for key, value in table.items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in table["rows"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def main() -> None:
    """Show a table, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="*", help="what bench_planning has written")
    parser.add_argument("--write", action="store_true", help="make it the tests' own table")
    args = parser.parse_args()
    table = convert(*args.rows) if args.rows else read_table()
    show(table)
    if not args.rows:
        show_runs(read_runs())
    if args.write and args.rows:
        TABLE.write_text(write_table(table), encoding="ascii")


if __name__ == "__main__":
    main()
