"""A setting is corrected in the first steps, and never in a step whose checkpoint names it."""

from __future__ import annotations

import os

import pytest

from agents.contract.spec import CheckpointSpec
from tests.agents.trainer.ranks import Run, finish, make_spec, start_rank


def run_doubted(environ: dict[str, str]) -> None:
    """Be a rank whose search believed far too much of three settings."""
    os.environ.update(environ)
    from agents.trainer import run
    from agents.trainer.__main__ import main
    from agents.trainer.autotune import Choice
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
        return Choice(setting=tried[0], tried=tried, change=change)

    run.choose_setting = choose_setting
    os._exit(main())


@pytest.mark.parametrize(
    ("every_steps", "corrected"), [(None, [10, 20, 30]), (10, []), (14, [10])], ids=str
)
def test_a_step_that_saves_corrects_nothing_and_none_after_it_does(
    tmp_path, tiny_model, every_steps, corrected
):
    checkpoint = CheckpointSpec(every_minutes=None, every_steps=every_steps)
    spec = make_spec(max_steps=32, batch_sequences=4, checkpoint=checkpoint)
    trained = Run(tmp_path / "run", tiny_model, spec)
    intent = trained.intend()
    (code,) = finish([start_rank(intent, 0, trained.attempt_folder, {}, run_doubted)])
    assert code == 0, trained.read_log(0)[-2000:]
    records = [line for line in trained.journal() if line["kind"] == "setting" and "step" in line]
    assert [line["step"] for line in records] == corrected
    for line in records:
        assert line["measured_tokens_per_s"] < 1e9 < line["believed_tokens_per_s"]
    phases = [line["phase"] for line in trained.journal() if line["kind"] == "phase"]
    assert phases.count("adapting") == len(corrected)
