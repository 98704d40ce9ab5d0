"""However the layers are cut over ranks, the numbers are those of one process.

Five processes train several runs, one after the other or side by side, through the trainer's own
entry: in fp32, with dropout and rows of unequal length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from agents.contract.model_cut import ModelCut, Stage
from agents.contract.spec import CheckpointSpec, DataSpec
from tests.agents.trainer.ranks import (
    Run,
    finish,
    make_environ,
    make_pairs,
    make_spec,
    make_tiny_model,
    run_trainers,
    start,
)

pytestmark = pytest.mark.timeout(600)

NUM_LAYERS = 5
NUM_STEPS = 25
TOLERANCE = 1e-6


def make_cut(*replicas: Sequence[int], offloading: Sequence[int] = ()) -> ModelCut:
    """Return stages with so many layers each, for each replica.

    Stages of the ranks in `offloading` recompute all but their last layer, and offload inputs.
    """
    stages: list[Stage] = []
    for number, sizes in enumerate(replicas):
        ends = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
        for first, stop in pairwise(ends):
            stages.append(
                Stage(
                    rank=len(stages),
                    replica=number,
                    first_layer=first,
                    stop_layer=stop,
                    has_embedding=first == 0,
                    has_head=stop == NUM_LAYERS,
                    num_recomputed=stop - first - 1 if len(stages) in offloading else None,
                    offloads=len(stages) in offloading,
                )
            )
    return ModelCut(mode="pipeline", stages=tuple(stages), micro_sequences=4)


class Processes:
    """Processes that take their ranks in attempt after attempt."""

    def __init__(self, count: int) -> None:
        self.environs: list[list[dict[str, str]]] = [[] for _ in range(count)]

    def add(self, run: Run, places: Sequence[int], **changes: Any) -> None:
        """Let these processes be the ranks of the next attempt of a run."""
        run.num_ranks = len(places)
        intent = run.intend(**changes)
        for rank, place in enumerate(places):
            self.environs[place].append(make_environ(intent, rank, run.attempt_folder))

    def finish(self) -> None:
        codes = finish([start(run_trainers, one) for one in self.environs], timeout_s=400)
        assert codes == [0] * len(self.environs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Train every run of this module."""
    home = tmp_path_factory.mktemp("pipeline")
    model = make_tiny_model(home / "model", NUM_LAYERS)
    kept = CheckpointSpec(every_minutes=None, every_steps=10, keep=9)
    spec = make_spec(max_steps=NUM_STEPS, batch_sequences=8, checkpoint=kept)
    cut = replace(spec, parallel="pipeline")
    pairs = replace(
        make_spec(max_steps=4, objective="dpo", evaluate_every_steps=2),
        data=DataSpec(train="train.jsonl", eval="eval.jsonl"),
        adapter=replace(spec.adapter, dora=True),
    )
    found = {
        name: Run(home / name, model, one)
        for name, one in (
            ("one", spec),
            *((name, cut) for name in ("two", "three", "five")),
            ("rounded", replace(cut, activation_bits=8, max_steps=1)),
            ("replicas", replace(cut, shares=(0.4, 0.6, 1.0))),
            ("pairs", pairs),
            ("pairs-cut", replace(pairs, parallel="pipeline")),
        )
    }
    for name in ("pairs", "pairs-cut"):
        make_pairs(found[name].train)
        make_pairs(found[name].home / "eval.jsonl", num_rows=7)
    held_out = {name: str(found[name].home / "eval.jsonl") for name in ("pairs", "pairs-cut")}
    evenly = ModelCut(mode="pipeline", micro_sequences=4)
    processes = Processes(5)
    processes.add(found["five"], range(5), cut=evenly)
    processes.add(found["two"], (0, 1), cut=make_cut((2, 3), offloading=(0,)))
    processes.add(found["three"], (2, 3, 4), cut=evenly, checkpoint_ranks=(1,))
    processes.add(found["replicas"], (0, 1, 2), cut=make_cut((2, 3), (5,)))
    processes.add(found["one"], (3,))
    processes.add(found["rounded"], (3, 4), cut=make_cut((2, 3)))
    processes.add(found["pairs"], (4,), eval_path=held_out["pairs"])
    # What three ranks saved goes on with two, and what these save with one.
    processes.add(found["three"], (0, 1), cut=make_cut((1, 4)), resume_step=10)
    alone = ModelCut(mode="data")
    processes.add(found["three"], (0,), cut=alone, resume_step=20)
    # A run changes its mode as well, and back.
    streamed = ModelCut(mode="streamed")
    processes.add(found["three"], (0, 1), cut=streamed, resume_step=10)
    processes.add(found["three"], (0, 1, 2), cut=make_cut((2, 3), (5,)), resume_step=20)
    processes.add(
        *(found["pairs-cut"], (2, 3, 4)),
        cut=make_cut((2, 3), (5,), offloading=(0, 1, 2)),
        eval_path=held_out["pairs-cut"],
    )
    processes.finish()
    return found


def losses(run: Run, attempt: int | None = None, rank: int = 0) -> dict[int, float]:
    return {step: line["loss"] for step, line in run.steps(rank, attempt).items()}


@pytest.mark.parametrize("name", ["two", "three", "five", "replicas"])
def test_a_pipeline_learns_what_one_process_learns(runs, name):
    expected = losses(runs["one"])
    found = losses(runs[name], attempt=1)
    assert sorted(found) == list(range(1, NUM_STEPS + 1))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=TOLERANCE)
    assert expected[NUM_STEPS] < expected[1] - 0.1, "it has learned something"


def test_a_cut_continues_another_one(runs):
    run, expected = runs["three"], losses(runs["one"])
    for attempt, step in ((2, 10), (3, 20), (4, 10), (5, 20)):
        found = losses(run, attempt)
        assert sorted(found) == list(range(step + 1, NUM_STEPS + 1))
        for number, loss in found.items():
            assert loss == pytest.approx(expected[number], rel=TOLERANCE)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return shapes and types of all tensors of a checkpoint, and what is in its JSON files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                found[f"{path.name}/{name}"] = (part.get_shape(), part.get_dtype())
    config = json.loads((folder / "adapter_config.json").read_text())
    return {**found, "config": config}


@pytest.mark.parametrize("name", ["two", "three", "replicas"])
def test_a_checkpoint_is_laid_out_as_that_of_one_process(runs, name):
    expected = read_checkpoint(runs["one"].checkpoint(10))
    assert read_checkpoint(runs[name].checkpoint(10)) == expected


def test_preferences_and_dora_are_those_of_one_process(runs):
    one, cut = runs["pairs"], runs["pairs-cut"]
    for rank in range(3):
        found = cut.steps(rank)
        for step, line in one.steps().items():
            for key in ("loss", "reward_margin", "reward_accuracy", "gradient_norm"):
                assert found[step][key] == pytest.approx(line[key], rel=1e-5, abs=1e-7)
    evals = [
        [line["loss"] for line in run.journal() if line["kind"] == "eval"] for run in (one, cut)
    ]
    assert evals[1] == pytest.approx(evals[0], rel=TOLERANCE)
    assert len(evals[0]) == 2


def test_a_stage_offloads_where_its_plan_says_so(runs):
    """Its losses are those of one process, as the tests above compare them."""
    settings = {
        rank: next(line for line in runs["two"].journal(rank) if line["kind"] == "setting")
        for rank in range(2)
    }
    assert [one["num_recomputed"] for one in settings.values()] == [1, 0]
    assert [one["offloads_inputs"] for one in settings.values()] == [True, False]


def test_features_in_8_bits_change_a_loss_by_less_than_a_thousandth(runs):
    (loss,) = losses(runs["rounded"]).values()
    assert loss != losses(runs["one"])[1]
    assert loss == pytest.approx(losses(runs["one"])[1], rel=1e-3)
    (features,), (gradients,) = (
        [line for line in runs["rounded"].journal(rank) if line["kind"] == "rounded"]
        for rank in range(2)
    )
    assert 0 < features["features"] < 0.01
    assert 0 < gradients["gradients"] < 0.01


def test_ranks_report_their_part_of_the_work(runs):
    lines = [runs["replicas"].steps(rank)[NUM_STEPS] for rank in range(3)]
    assert lines[0]["shares"] == pytest.approx([0.4, 0.6, 1.0])
    for line in lines:
        assert line["compute_s"] + line["wait_s"] <= line["step_s"]
        assert 0 < line["eta"] <= 1
