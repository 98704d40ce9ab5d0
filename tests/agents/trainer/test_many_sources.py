"""Runs on several sources: the same steps on any number of ranks and after a resume."""

from __future__ import annotations

import json
from dataclasses import replace

from agents.contract.data import SourceSpec
from agents.contract.spec import DataSpec
from tests.agents.trainer.ranks import Run, make_rows, make_spec


def make_run(home, model, num_ranks):
    run = Run(home, model, make_spec(), num_ranks)
    other = home / "more.jsonl"
    rows = [{"instruction": f"Who founded town {n}?", "output": "Oren Dale."} for n in range(20)]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (SourceSpec(path=str(run.train)), SourceSpec(path=str(other), weight=1.5))
    data = DataSpec(train=str(run.train), sources=sources, eval="0.1", deduplicate="exact")
    kept = replace(run.spec.checkpoint, keep=9)
    run.spec = replace(run.spec, data=data, epochs=2, max_steps=None, checkpoint=kept)
    return run, {"more_paths": (str(other),)}


def test_a_resume_continues_with_the_same_rows_and_losses(tmp_path, tiny_model):
    run, paths = make_run(tmp_path / "two", tiny_model, 2)
    run.train_to_end(**paths)
    straight = run.steps()
    journal = run.journal()
    assert any(line["kind"] == "eval" for line in journal)
    seen = next(line for line in journal if line["kind"] == "preview")
    assert [source["name"] for source in seen["sources"]] == ["train.jsonl", "more.jsonl"]
    assert seen["choice"]["num_held_out"] > 0
    num_in_epoch = sum(source["num_in_epoch"] for source in seen["sources"])
    assert len(straight) == -(-2 * num_in_epoch // run.spec.batch_sequences)
    run.train_to_end(resume_step=4, **paths)
    again = run.steps()
    assert min(again) == 5
    for step, line in again.items():
        assert line["loss_hex"] == straight[step]["loss_hex"]
        assert line["samples"] == straight[step]["samples"]

    alone, paths = make_run(tmp_path / "one", tiny_model, 1)
    alone.train_to_end(**paths)
    samples = {step: line["samples"] for step, line in alone.steps().items()}
    assert samples == {step: line["samples"] for step, line in straight.items()}


def test_other_held_out_rows_are_another_run(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec())
    make_rows(run.train, 60)
    run.spec = replace(run.spec, data=replace(run.spec.data, eval="10"), max_steps=2)
    run.train_to_end()
    run.spec = replace(run.spec, data=replace(run.spec.data, eval="20"), max_steps=4)
    processes = run.start(resume_step=2)
    for process in processes:
        process.join()
    assert "data.eval was '10' and is '20'" in run.journal()[-1]["message"]
