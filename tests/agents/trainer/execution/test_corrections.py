"""A setting is corrected in the first steps; a checkpoint ends that, and names what follows."""

from __future__ import annotations

import json
import os

import pytest

from agents.contract.spec import CheckpointSpec
from agents.trainer.checkpoint.state import STATE_FILE
from tests.agents.trainer.ranks import Run, finish, make_spec, start_rank


def run_doubted(environ: dict[str, str]) -> None:
    """Be a rank whose search believed far too much of three settings."""
    os.environ.update(environ)
    from agents.trainer import run
    from agents.trainer.__main__ import main
    from agents.trainer.autotune import SettingChoice
    from agents.trainer.execution.setting import ExecutionSetting, apply_setting

    def choose_setting(context, state, executor, reserve, resumed):
        def change(setting):
            apply_setting(executor, setting)
            return setting

        tried = [
            ExecutionSetting(micro_tokens=64 * (1 + place), tokens_per_s=1e12 / (1 + place))
            for place in range(3)
        ]
        change(tried[0])
        return SettingChoice(setting=tried[0], tried=tried, change=change)

    run.autotune.choose_setting = choose_setting
    os._exit(main())


@pytest.mark.parametrize(
    ("every_steps", "corrected", "is_judged"),
    [(None, [10, 20, 30], True), (10, [], True), (14, [10, 14], False), (18, [10, 18], True)],
    ids=str,
)
def test_a_checkpoint_ends_the_comparison_and_names_what_follows(
    tmp_path, tiny_model, every_steps, corrected, is_judged
):
    checkpoint = CheckpointSpec(every_minutes=None, every_steps=every_steps, keep=9)
    spec = make_spec(max_steps=32, batch_sequences=4, checkpoint=checkpoint)
    trained = Run(tmp_path / "run", tiny_model, spec)
    intent = trained.intend()
    (code,) = finish([start_rank(intent, 0, trained.attempt_folder, {}, run_doubted)])
    assert code == 0, trained.read_log(0)[-2000:]
    lines = [line for line in trained.journal() if line["kind"] == "setting" and "step" in line]
    assert [line["step"] for line in lines] == corrected
    for line in lines:
        measured = line["measured_tokens_per_s"]
        assert line["believed_tokens_per_s"] > 1e9
        if is_judged or line is not lines[-1]:
            assert measured < 1e9
        else:  # too few steps: what was measured before comes back
            assert (measured, line["micro_tokens"]) == (None, 64)
    phases = [line["phase"] for line in trained.journal() if line["kind"] == "phase"]
    assert phases.count("adapting") == len(corrected)
    if every_steps and corrected:
        state = json.loads((trained.checkpoint(every_steps) / STATE_FILE).read_text())
        assert state["micro_tokens"] == [lines[-1]["micro_tokens"]]


def test_a_resume_goes_on_as_the_run_did_whose_comparison_a_checkpoint_ended(tmp_path, tiny_model):
    checkpoint = CheckpointSpec(every_minutes=None, every_steps=14, keep=9)
    spec = make_spec(max_steps=20, batch_sequences=4, checkpoint=checkpoint)
    trained = Run(tmp_path / "run", tiny_model, spec)
    intent = trained.intend()
    (code,) = finish([start_rank(intent, 0, trained.attempt_folder, {}, run_doubted)])
    assert code == 0, trained.read_log(0)[-2000:]
    expected = trained.steps()
    trained.train_to_end(resume_step=14)
    found = trained.steps()
    assert sorted(found) == [*range(15, 21)]
    for step, line in found.items():
        assert line["loss_hex"] == expected[step]["loss_hex"]
