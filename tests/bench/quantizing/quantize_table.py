"""Tables of the lines that bench_quantize has written, as Markdown.

    python3 -m tests.bench.quantizing.quantize_table rows.jsonl

What was made, beside the original and the control; ours beside each method's own implementation;
and what each case took beside its forecast, by the formulas alone and by what the other
cases of the same method would have taught (`app/artifacts/estimates/learning.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.formats import ENGINES, Engine
from app.artifacts.estimates.cost import forecast_phases
from app.artifacts.estimates.forecast import ArtifactForecast, forecast_artifact
from app.artifacts.estimates.learning import ExportOutcome, find_factors, maker_of
from app.artifacts.estimates.texts import TextSizes
from app.artifacts.estimates.work import Bench, PhaseForecast
from app.planning.shape.model_shape import read_shape
from tests.bench.quantizing.quantize_jobs import TARGETS

NODE = "here"
_MEMORY_BYTES_PER_S = 20e9
MERGING = ("check", "load", "merge")
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    rows: list[Row] = []
    for path in argv:
        rows += [json.loads(line) for line in Path(path).read_text(encoding="ascii").splitlines()]
    machine = next(one for one in rows if one["case"] == "machine")
    print("\n".join(f"- {key}: {value}" for key, value in machine.items() if key != "case"))
    for table in (list_quality(rows), list_references(rows), list_costs(rows, machine)):
        print()
        print("\n".join(table))
    return 0


def list_quality(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what was made of the model that has learned something."""
    yield "| made | bytes | KL | control | top-1 | perplexity | of bf16 | same answers | tokens/s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        for proof in row.get("proofs") or () if row["case"].startswith("learned ") else ():
            far, first = proof["distance"], proof["original_perplexity"]
            named = row["case"].removeprefix("learned ") == "autoawq"
            yield (
                f"| {'awq (AutoAWQ)' if named else proof['name']} | {proof['size_bytes']:,} | "
                f"{far['kl']:.2g} | {proof['control']['kl']:.2g} | {far['top1']:.4f} | "
                f"{far['perplexity']:.4f} | {100 * (far['perplexity'] / first - 1):+.2f} % | "
                f"{proof['same_answers']:.2f} | {proof['tokens_per_s']:,.0f} |"
            )


def list_references(rows: Sequence[Row]) -> Iterator[str]:
    """Yield ours beside each method's own implementation."""
    yield "| made | the same | KL, ours | theirs | perplexity, ours | theirs |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        if row["case"].startswith("reference ") and row.get("ours"):
            ours, theirs = row["ours"], row["theirs"]
            share = row.get("same_weights", row.get("same_file"))
            yield (
                f"| {row['case'].removeprefix('reference ')} | {share} | {ours['kl']:.6f} | "
                f"{theirs['kl']:.6f} | {ours['perplexity']:.5f} | {theirs['perplexity']:.5f} |"
            )


def list_costs(rows: Sequence[Row], machine: Row) -> Iterator[str]:
    """Yield measured over forecast, alone and after what the other cases teach."""
    yield (
        "| case | s | of forecast | learned | memory MB | of it | learned "
        "| GPU MB | of it | disk MB | of it |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    cases = [row for row in rows if row.get("phases") and "method" in row]
    outcomes = [_weigh(row, machine) for row in cases]
    for place, (row, own) in enumerate(zip(cases, outcomes, strict=True)):
        others = outcomes[:place] + outcomes[place + 1 :]
        factors = find_factors(others, NODE, own.method)
        disk = max(one["disk_bytes"] for one in row["phases"])
        ram = max(one["ram_bytes"] for one in row["phases"])
        seconds = sum(one["seconds"] for one in row["phases"])
        yield (
            f"| {row['case']} | {seconds:.0f} | {own.seconds_ratio:.2f} | "
            f"{own.seconds_ratio / factors.seconds.value:.2f} | {ram / 1e6:,.0f} | "
            f"{own.ram_ratio:.2f} | {(own.ram_ratio or 0) / factors.ram.value:.2f} | "
            f"{_peak(row) / 1e6:,.0f} | {own.vram_ratio or 0:.2f} | "
            f"{disk / 1e6:,.1f} | {disk / foretell_disk(row):.3f} |"
        )


def foretell(row: Row, machine: Row) -> list[PhaseForecast]:
    """Return the phases of a case as the formulas say them."""
    shape = read_shape(row["config"])
    made = _foretell_artifact(row)
    bench = Bench(
        is_gpu="gpu" in machine,
        num_cores=machine["cores" if "gpu" in machine else "threads"],
        flops_per_s=machine["matrix_flops_per_s"],
        memory_bytes_per_s=machine.get("memory_bytes_per_s", _MEMORY_BYTES_PER_S),
        vram_bytes=int(cap * 2**30) if (cap := row.get("cap_gib")) else machine.get("vram_bytes"),
        ram_bytes=machine.get("ram_bytes"),
    )
    phases = forecast_phases(
        shape, row["method"], row["types"], made, bench, _texts(row), TARGETS, _engine(row)
    )
    if row["method"] == "merged":
        return list(phases)
    return [one for one in phases if one.name not in MERGING]


def _foretell_artifact(row: Row) -> ArtifactForecast:
    return forecast_artifact(
        read_shape(row["config"]),
        row["method"],
        row["types"],
        texts=_texts(row),
        engine=_engine(row),
    )


def _engine(row: Row) -> Engine:
    engine: Engine = row.get("engine", ENGINES[0])
    return engine


def _weigh(row: Row, machine: Row) -> ExportOutcome:
    said = foretell(row, machine)
    seconds = sum(one["seconds"] for one in row["phases"])
    ram = max(one["ram_bytes"] for one in row["phases"])
    vram = max(one.vram_bytes or 0 for one in said)
    return ExportOutcome(
        node=NODE,
        method=maker_of(row["method"], _engine(row)),
        ended_s=0.0,
        seconds_ratio=seconds / sum(one.seconds for one in said),
        ram_ratio=ram / max(one.ram_bytes for one in said),
        vram_ratio=_peak(row) / vram if vram else None,
    )


def _peak(row: Row) -> int:
    return max(one["vram_bytes"] or 0 for one in row["phases"])


def foretell_disk(row: Row) -> int:
    """Return what lies in the folder at a time at most, as the formulas say it."""
    made = replace(_foretell_artifact(row), merged_bytes=0)
    return made.final_bytes + made.temporary_bytes


def _texts(row: Row) -> TextSizes:
    judged, fitted = row["held_out_tokens"], row["calibration_tokens"]
    every = judged + fitted
    return TextSizes(
        calibration_rows=len(fitted),
        held_out_rows=len(judged),
        mean_tokens=sum(every) / len(every),
        longest_tokens=max(judged),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
