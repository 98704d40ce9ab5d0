"""What is asked of running ranks is done by all of them after the same step."""

from __future__ import annotations

from agents.protocol import Wish
from agents.spec import CheckpointSpec
from agents.trainer.checkpoint import read_checkpoint
from agents.wishes import leave_wish
from tests.agents.trainer.ranks import Run, finish, make_spec, terminate, wait_until

NEVER = CheckpointSpec(every_minutes=None, every_steps=None)


def test_a_wish_to_save_is_a_checkpoint_while_training_goes_on(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=3000, checkpoint=NEVER), 2)
    ranks = run.start()
    wait_until(lambda: len(run.steps()) >= 2)
    leave_wish(run.attempt_folder, Wish(wish_id="now", kind="save"))

    def saved() -> list[dict]:
        return [line for line in run.journal() if line["kind"] == "checkpoint"]

    wait_until(lambda: bool(saved()))
    step = saved()[0]["step"]
    wait_until(lambda: max(run.steps()) > step + 1)
    terminate(ranks)
    assert finish(ranks) == [0, 0]
    granted = [line for line in run.journal() if line["kind"] == "wish"]
    assert [(w["wish_id"], w["wish"], w["step"]) for w in granted] == [("now", "save", step)]
    assert not [line for line in run.journal(1) if line["kind"] == "wish"]
    assert read_checkpoint(run.checkpoint(step)).verify() == ""
    assert len(saved()) == 2, "the one that was wished for, and that of the end"
