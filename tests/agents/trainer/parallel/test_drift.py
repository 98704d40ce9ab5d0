"""GPUs of different kinds may round differently; at every checkpoint the ranks are made equal."""

from __future__ import annotations

import json

from tests.agents.trainer.ranks import Run, finish, make_spec, start, start_rank


def run_drifting(environ: dict[str, str]) -> None:
    """Be a rank whose optimizer rounds a little differently from that of rank 0."""
    import os

    os.environ.update(environ)
    from agents.trainer.parallel.data_parallel import DataParallel

    step_optimizer = DataParallel.step_optimizer

    def drifting(self, *args):
        step_optimizer(self, *args)
        self._flat.values.mul_(1 + 1e-6)

    DataParallel.step_optimizer = drifting  # type: ignore[method-assign]
    from agents.trainer.__main__ import main

    os._exit(main())


def test_a_checkpoint_takes_the_state_of_rank_0_everywhere(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(shares=(1.0, 1.0)), 2)
    other = Run(tmp_path / "other", tiny_model, run.spec, 2)
    intent = run.intend(checkpoint_ranks=(0, 1))
    other.intend(checkpoint_ranks=(0, 1), master_port=intent.master_port)
    environ = {
        "RACKLESS_ATTEMPT_DIR": str(other.attempt_folder),
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(intent.master_port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [start_rank(intent, 0, run.attempt_folder, {}), start(run_drifting, environ)]
    assert finish(ranks) == [0, 0]
    for step in (2, 4):
        manifests = [
            json.loads((r.checkpoint(step) / "manifest.json").read_text()) for r in (run, other)
        ]
        assert manifests[0]["files"] == manifests[1]["files"]
