"""Unlike cards: a rank that slows down gets less work, and the result stays.

What the clock of each rank tells is set from outside, by the tokens of its slice alone: how fast or
how busy this PC is decides nothing.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.agents.trainer.ranks import Run, finish, free_port, make_spec, start

SLOW_FROM = 8
TOKEN_S = 0.0005


def train_slowly(environ: dict[str, str], slowed: bool) -> None:
    """Be a rank that needs so long per token, and twice that from one step on when `slowed`."""
    os.environ.update(environ)
    from agents.trainer.__main__ import main
    from agents.trainer.metrics.stopwatch import Stopwatch
    from agents.trainer.parallel.data_parallel import DataParallel

    choose, read = DataParallel.choose_batch, Stopwatch.read
    needed_s = [0.0]

    def choose_batch(self, step):
        batch = choose(self, step)
        factor = 2.0 if slowed and step >= SLOW_FROM else 1.0
        needed_s[0] = factor * TOKEN_S * batch.my_tokens
        return batch

    DataParallel.choose_batch = choose_batch
    Stopwatch.read = lambda self: replace(read(self), compute_s=needed_s[0])
    os._exit(main())


def test_a_slowed_rank_gets_less_within_ten_steps_and_the_loss_stays(tmp_path, tiny_model):
    spec = make_spec(precision="fp64", max_steps=SLOW_FROM + 12, rebalance=True)
    run = Run(tmp_path / "run", tiny_model, spec, 2)
    intent = run.intend()
    common = {
        "RACKLESS_ATTEMPT_DIR": str(run.attempt_folder),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(intent.master_port or free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        start(train_slowly, {**common, "RANK": str(r), "LOCAL_RANK": str(r)}, r == 0)
        for r in range(2)
    ]
    assert finish(ranks) == [0, 0], run.read_log(0)
    shares = {step: line["shares"] for step, line in run.steps(0).items()}
    assert shares == {step: line["shares"] for step, line in run.steps(1).items()}
    first = shares[SLOW_FROM - 1]
    assert first[0] / sum(first) == pytest.approx(0.5, abs=0.06)
    late = shares[SLOW_FROM + 10]
    assert late[0] / sum(late) == pytest.approx(1 / 3, abs=0.05)
    alone = Run(tmp_path / "alone", tiny_model, spec)
    alone.train_to_end()
    for step, line in alone.steps().items():
        found = run.steps(0)[step]
        assert found["samples"] == line["samples"]
        assert found["loss"] == pytest.approx(line["loss"], rel=1e-9)
