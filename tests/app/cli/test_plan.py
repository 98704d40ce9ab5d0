"""What `rackless plan` prints, for people and as JSON."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace

import pytest

from agents.contract.spec import RunSpec
from app.cli import runs
from app.cli.kit.output import Output
from app.cli.main import build_parser
from app.cli.plan import _plan, plan_document, print_plan
from app.planning.candidate import Plan
from app.presentation import plan_text
from app.text import DASH
from tests.fakes.cluster import make_preview
from tests.fakes.core import SPEC, FakeCore, make_run
from tests.fakes.plans import (
    make_comparison,
    make_plan_of_all,
    make_plan_of_mixture,
    make_plan_of_stages,
)


def printed(plan: Plan, spec: RunSpec = SPEC) -> str:
    out = io.StringIO()
    print_plan(plan, spec, Output(as_json=False, out=out))
    return out.getvalue()


def test_a_plan_reads_as_sentences_and_tables() -> None:
    text = printed(make_plan_of_all())
    for part in (
        "Data parallel on alpha, beta and gamma: the fastest that fits.",
        "13 s (12 s computing, 900 ms network, 100 ms optimizer)",
        "3 h 58 min, 1,125 steps",
        "2.7 kWh",
        "11.1 GiB (10.5 to 11.7 GiB) of 16.0 GiB",
        "4,096 tokens at once, 20 layers recomputed",
        "and not trained by this version yet (8 min 47 s a step).",
        "alpha alone: 2.6 times as long per step (33 s a step).",
        "515 s of network per step over 1 Gb/s",
        "Measure gamma's laptop GPU",
        "alpha and gamma: 1 Gb/s, as their network cards say",
    ):
        assert part in text, part


def test_a_plan_names_what_follows_a_loss_and_one_that_is_not_finite() -> None:
    retry = replace(SPEC, divergence="retry")
    assert "waits for you to resume it at a lower" in printed(make_plan_of_all())
    assert "at half the learning rate (divergence: retry)" in printed(make_plan_of_all(), retry)
    off = printed(make_plan_of_all(), replace(retry, recovery="off"))
    assert "lower learning rate (recovery: off)" in off


def test_what_does_not_fit_says_so_and_what_would_help() -> None:
    text = printed(make_plan_of_all(fits=False))
    assert "No plan fits these settings. Data parallel on alpha, beta and gamma: needs" in text
    assert "does not fit" in text
    assert "Shorten sequences to 1,024 tokens: it then fits on alpha, beta and gamma" in text


def test_a_plan_names_the_model_what_is_left_of_it_and_what_holds_the_run_back() -> None:
    text = printed(make_plan_of_mixture())
    first, model = text.splitlines()[:2]
    assert first.endswith(", lora")
    assert model == "Qwen3-MoE, 30.5 billion parameters, 8 of 128 experts per token"
    left = text.split("Left as it is\n")[1].split("\n\n")[0].splitlines()
    assert left[0] == "  Experts (128 in each of 48 layers) get no adapter: 29.0 billion weights"
    assert "adapter.experts: true" in left[-1]
    check = text.split("Check first\n")[1].split("\n\n")[0]
    assert "the RTX 3090 takes about 1.4 times as long" in check
    assert "sudo apt install build-essential" in check
    document = json.loads(json.dumps(plan_document(make_plan_of_mixture())))
    assert document["model"]["family"] == "qwen3_moe"
    assert document["limits"][0]["reason"] == "no_compiler"
    assert [one["kind"] for one in document["parts"]] == [
        "no_adapter", "untouched", "no_balance_loss",
    ]  # fmt: skip


def test_json_has_every_figure_and_its_sums() -> None:
    document = json.loads(json.dumps(plan_document(make_plan_of_all())))
    chosen = document["chosen"]
    assert document["fits"] is True
    assert (chosen["mode"], chosen["runnable"]) == ("data", True)
    assert chosen["step_s"] == pytest.approx(sum(chosen["parts_s"].values()))
    assert sum(gpu["share"] for gpu in chosen["gpus"]) == pytest.approx(1.0)
    for gpu in chosen["gpus"]:
        memory = gpu["memory"]
        assert memory["expected_bytes"] == sum(memory["parts_bytes"].values())
        assert memory["low_bytes"] <= memory["expected_bytes"] <= memory["high_bytes"]
    assert [other["mode"] for other in document["others"]] == ["single", "sharded"]
    assert document["others"][1]["runnable"] is False
    short = plan_document(make_plan_of_all(fits=False))
    assert (short["fits"], short["chosen"]) == (False, None)
    assert [one["change"] for one in short["advice"]] == [
        {"adapter.kind": "qlora"}, {"sequence_tokens": 1024},
    ]  # fmt: skip


def test_comparison_leaves_out_what_nobody_knows() -> None:
    rows = plan_text.describe_comparison(make_comparison())
    assert "Whole run" in [row.what for row in rows]
    assert next(row for row in rows if row.what == "Whole run").error == DASH
    assert len([row for row in rows if row.what.endswith(": memory")]) == 4


def test_stages_of_a_divided_model_are_listed_in_a_plan_and_for_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = make_plan_of_stages()
    text = printed(plan)
    assert "10 million tokens   19.1 h" in text
    assert "Division            Bubble 7 % of a step, busiest link in use for 21 % of a" in text
    assert "layers 1 to 28, 6 in flight, 28 layers recomputed" in text
    assert "After a loss        resumed automatically with another cut" in text
    assert plan.chosen is not None
    document = plan_document(plan)
    assert document["chosen"]["gpus"][1]["layers"] == (28, 50)
    assert document["chosen"]["ten_million_tokens_s"] / 3600 == pytest.approx(19.1, abs=0.05)
    assert document["others"][0]["gpus"][3]["streams_from"] == "disk"
    core = FakeCore(run_map={"r-1": make_run("r-1", "r", "running")})
    core.comparison_map["r-1"] = make_comparison(plan)
    args = build_parser().parse_args(["runs", "show", "r-1"])
    assert asyncio.run(runs._show(core, args, Output(False))) == 0  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert "beta cuda:1: RTX 3090" in shown
    assert "layers 29 to 50 of 80, 4 in flight" in shown
    assert "planned: bubble 7 % of a step" in shown


@pytest.mark.parametrize(
    ("num_rows", "words", "code", "said"),
    [
        (400, [], 0, "of the 400 rows of chats.jsonl, 1 is left out (0 %)"),
        (3, [], 1, "A start asks about this loss: --accept-left-out accepts it."),
        (3, ["--accept-left-out"], 0, "of the 3 rows of chats.jsonl, 1 is left out (33 %)"),
    ],
)
def test_a_plan_says_how_many_rows_are_left_out(
    num_rows: int, words: list[str], code: int, said: str
) -> None:
    core = FakeCore(count_answer=make_preview(num_rows=num_rows))
    args = build_parser().parse_args(["plan", "run.yaml", *words])
    out = io.StringIO()
    assert asyncio.run(_plan(core, args, Output(as_json=False, out=out))) == code
    assert said in out.getvalue()
    out = io.StringIO()
    asyncio.run(_plan(core, args, Output(as_json=True, out=out)))
    (count,) = json.loads(out.getvalue())["left_out"]
    assert (count["found"]["num_rows"], count["found"]["num_skipped"]) == (num_rows, 1)
