"""Training goes on while a checkpoint is written; the end of a run waits for its own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

from agents.contract.spec import CheckpointSpec
from agents.contract.wire import to_wire
from agents.node.manifest import read_manifest, write_manifest
from tests.agents.trainer.ranks import Run, finish, make_spec, start, start_rank

COMMIT_S = 0.5


def run_with_slow_disk(environ: dict[str, str]) -> None:
    """Be a rank whose commits take half a second more."""
    import os
    import time

    os.environ.update(environ)
    from agents.trainer.checkpoint.folder import CheckpointFolder

    sync = CheckpointFolder._check_fence

    def slow(self):
        time.sleep(COMMIT_S)
        sync(self)

    CheckpointFolder._check_fence = slow  # type: ignore[method-assign]
    from agents.trainer.__main__ import main

    os._exit(main())


def test_only_the_copy_stops_the_training_and_the_end_waits(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec())
    run.intend()
    assert finish(
        [start(run_with_slow_disk, {"RACKLESS_ATTEMPT_DIR": str(run.attempt_folder)})]
    ) == [0]
    lines = run.journal()
    first, last = (line for line in lines if line["kind"] == "checkpoint")
    assert first["seconds"] > COMMIT_S > 5 * first["stall_s"]
    assert last["stall_s"] == last["seconds"] > COMMIT_S
    began_s = first["time_s"] - first["seconds"]
    meanwhile = [line for line in lines if line["kind"] == "step" and line["time_s"] > began_s]
    assert meanwhile[0]["time_s"] < first["time_s"]
    assert run.checkpoint(first["step"]).is_dir()
    assert run.checkpoint(last["step"]).is_dir()


def test_memory_for_saves_is_there_after_the_first_step(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=2))
    run.intend()
    assert finish(
        [start(run_with_reported_copies, {"RACKLESS_ATTEMPT_DIR": str(run.attempt_folder)})]
    ) == [0]
    lines = [line for line in run.journal() if line["kind"] in ("step", "allocated", "copied")]
    kinds = [line["kind"] for line in lines]
    num_tensors = kinds.count("allocated")
    assert num_tensors > 2
    # The state is copied once to reserve memory, where none is saved yet, and once to be saved.
    assert kinds == ["step", *["allocated"] * num_tensors, "copied", "step", "copied"]
    phases = [line["phase"] for line in lines if line["kind"] == "copied"]
    assert phases == ["saving", "saving"], "a thread has to give the signs of life meanwhile"


def run_with_reported_copies(environ: dict[str, str]) -> None:
    """Be a rank whose journal has each copy of the state and each piece of memory for it."""
    import os

    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.checkpoint import saver, state

    allocate, take, begin = state._allocate, state.HostCopy.take, saver.Saver.__init__
    contexts = []

    def remember(self, context, *args, **options):
        contexts.append(context)
        begin(self, context, *args, **options)

    def report_allocation(tensor):
        contexts[0].journal.write("allocated")
        return allocate(tensor)

    def report_copy(self, *args):
        take(self, *args)
        contexts[0].journal.write("copied", phase=contexts[0].heartbeat._phase)

    saver.Saver.__init__ = remember  # type: ignore[method-assign]
    state._allocate = report_allocation
    state.HostCopy.take = report_copy  # type: ignore[method-assign]
    os._exit(main())


def test_a_node_that_saves_none_keeps_no_more_either(tmp_path, tiny_model):
    """Each resume brings it the checkpoint to begin from."""
    steps = CheckpointSpec(every_minutes=None, every_steps=1, keep=2)
    spec = make_spec(max_steps=6, checkpoint=steps)
    run = Run(tmp_path / "run", tiny_model, spec)
    run.train_to_end()
    there = tmp_path / "there" / "runs" / "r1"
    brought = there / "checkpoints"
    for step in (1, 2, 3, 5):
        folder = shutil.copytree(run.checkpoint(5), brought / f"step-{step:08d}")
        write_manifest(folder, {**read_manifest(folder), "step": step})
    (brought / ".partial-00000004-1-77").mkdir()

    run.num_ranks = 2
    shutil.rmtree(run.checkpoint(6))
    intent = run.intend(resume_step=5)
    ranks = (intent.ranks[0], replace(intent.ranks[1], node="there", local_rank=0))
    folders = (run.attempt_folder, there / "attempts" / str(run.attempt))
    folders[1].mkdir(parents=True)
    started = []
    for rank, folder in enumerate(folders):
        mine = replace(intent, ranks=ranks, node=ranks[rank].node)
        (folder / "intent.json").write_text(json.dumps(to_wire(mine)))
        started.append(start_rank(mine, rank, folder, {}))
    assert finish(started) == [0, 0]
    assert run.checkpoint(6).is_dir()
    assert sorted(path.name for path in brought.iterdir()) == ["step-00000003", "step-00000005"]
