"""What is asked of running ranks is done by all of them after the same step."""

from __future__ import annotations

import gzip
import json

from agents.contract.run import ControlRequest
from agents.contract.spec import CheckpointSpec
from agents.supervisor.control_requests import write_request
from agents.trainer.checkpoint.folder import read_checkpoint
from tests.agents.small_disk import fill, small_disk
from tests.agents.trainer.ranks import Run, finish, make_spec, start_rank, terminate, wait_until

NEVER = CheckpointSpec(every_minutes=None, every_steps=None)


def test_a_wish_to_save_is_a_checkpoint_while_training_goes_on(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=3000, checkpoint=NEVER), 2)
    ranks = run.start()
    wait_until(lambda: len(run.steps()) >= 2)
    write_request(run.attempt_folder, ControlRequest(wish_id="now", kind="save"))

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


def lines_of(run: Run, rank: int, kind: str) -> list[dict]:
    return [line for line in run.journal(rank) if line["kind"] == kind]


def test_the_steps_after_a_wish_are_recorded_on_every_rank(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=3000, checkpoint=NEVER), 2)
    ranks = run.start()
    wait_until(lambda: len(run.steps()) >= 2)
    write_request(run.attempt_folder, ControlRequest(wish_id="look", kind="trace", num_steps=2))
    wait_until(lambda: all(lines_of(run, rank, "trace") for rank in (0, 1)))
    told = [lines_of(run, rank, "trace")[0] for rank in (0, 1)]
    wait_until(lambda: max(run.steps()) > told[0]["last_step"] + 1)
    write_request(run.attempt_folder, ControlRequest(wish_id="more", kind="trace", num_steps=1))
    wait_until(lambda: len(lines_of(run, 0, "trace")) == 2)
    terminate(ranks)
    assert finish(ranks) == [0, 0]
    (granted,) = (w for w in lines_of(run, 0, "wish") if w["wish_id"] == "look")
    for rank, line in enumerate(told):
        first_step = granted["step"] + 1
        assert (line["first_step"], line["last_step"]) == (first_step, first_step + 1)
        path = run.attempt_folder / line["file"]
        assert line["file"] == f"trace-{first_step:08d}-rank-{rank}.json.gz"
        assert path.stat().st_size == line["size_bytes"]
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"aten::mm", "aten::addmm"} & names
        assert len(line["top"]) == 10
        assert 0 < sum(row["share"] for row in line["top"]) <= 1 + 1e-9
        shares = [row["share"] for row in line["top"]]
        assert shares == sorted(shares, reverse=True)
    assert not list(run.attempt_folder.glob(".trace*"))
    phases = [line["phase"] for line in lines_of(run, 0, "phase")]
    assert phases.count("tracing") == 2


def test_a_disk_that_is_full_costs_the_trace_and_not_the_run(tmp_path, tiny_model):
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        run = Run(disk / "run", tiny_model, make_spec(max_steps=4000, checkpoint=NEVER))
        ranks = run.start()
        wait_until(lambda: len(run.steps()) >= 2)
        write_request(run.attempt_folder, ControlRequest(wish_id="look", kind="trace", num_steps=3))
        filler = fill(disk, leave_bytes=100_000)
        wait_until(lambda: bool(lines_of(run, 0, "trace_failed")))
        (failed,) = lines_of(run, 0, "trace_failed")
        # More than fits on a page that the journal may have had: the trace gave its room back.
        # Not the newest step of now, since at some later one the journal itself fills the disk.
        wait_until(lambda: max(run.steps()) > failed["first_step"] + 20)
        filler.unlink()
        terminate(ranks)
        assert finish(ranks) == [0]
        assert len(lines_of(run, 0, "trace_failed")) == 1
        assert "could not write a complete trace" in failed["message"]
        assert not list(run.attempt_folder.glob("*trace-*"))


def test_a_profiler_that_fails_costs_the_trace_and_not_the_run(tmp_path):
    from agents.trainer.metrics import profiler

    class Told:
        lines: list[tuple[str, dict]]

        def __init__(self) -> None:
            self.lines = []

        def write(self, kind: str, **fields) -> None:
            self.lines.append((kind, fields))

    journal = Told()
    recorder = profiler.TraceRecorder(tmp_path, 0, None, journal)  # no device: it cannot be made
    recorder.begin(5, 2)
    assert recorder.is_on
    assert recorder.is_last(6)
    recorder.finish(6)
    assert not recorder.is_on
    ((kind, fields),) = journal.lines
    assert kind == "trace_failed"
    assert fields["first_step"] == 5


def test_a_run_that_ends_before_its_first_recorded_step_says_so(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=1, checkpoint=NEVER))
    intent = run.intend()
    write_request(run.attempt_folder, ControlRequest(wish_id="late", kind="trace", num_steps=3))
    assert finish([start_rank(intent, 0, run.attempt_folder, {})]) == [0]
    (failed,) = lines_of(run, 0, "trace_failed")
    assert "ended before a step could be recorded" in failed["message"]
