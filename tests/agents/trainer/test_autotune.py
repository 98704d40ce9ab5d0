"""Each device gets a setting; where compiling fails, training goes on without it and says so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from agents.contract.layer_plan import LayerPlan, Needs
from agents.shared.micro_shapes import group_examples
from agents.trainer.autotune import name_setting, prove, try_kept
from agents.trainer.execution import layers
from agents.trainer.execution.setting import ExecutionSetting
from agents.trainer.execution.shapes import ShapeGrid
from agents.trainer.execution.speed_watch import SpeedWatch
from agents.trainer.execution.tuner import Tuner
from agents.trainer.execution.workload import CostCurve, Workload
from agents.trainer.kernels import compiling
from agents.trainer.parallel.batch import sample_steps
from tests.agents.contract.test_layer_plan import NEEDS
from tests.agents.trainer.execution.all_examples import AllExamples
from tests.agents.trainer.execution.test_layers import CPU, make_executor, make_part
from tests.agents.trainer.optim.test_optimizer_reserve import make_reserve
from tests.agents.trainer.ranks import make_spec
from tests.draws import seed

ROOT = Path(__file__).parents[3]


def make_workload(*lengths, batch=16, world_size=1, **more):
    examples = AllExamples(make_part(*lengths).examples)
    steps = sample_steps(make_spec(batch_sequences=batch), examples, world_size=world_size, **more)
    return Workload(examples, steps, sends=world_size > 1)


class Played(Tuner):
    """A search over a table of speeds instead of a GPU; None stands for a card that is too small.

    `max_tokens` is 16384 unless named.
    """

    def __init__(self, executor, speeds, max_tokens=16384):
        super().__init__(
            executor,
            CPU,
            make_workload(*[100] * 200),
            max_tokens=max_tokens,
            recompute="auto",
            reserve=make_reserve("cpu")[0],
        )
        self._speeds = speeds
        self.asked = []

    def _measure(self) -> Needs:
        return NEEDS

    def _try(self, needs, tokens):
        self.asked.append(tokens)
        speed = self._speeds.get(tokens)
        return None if speed is None else ExecutionSetting(micro_tokens=tokens, tokens_per_s=speed)

    def _try_setting(self, setting):
        return None, False

    def _run_final(self, best):
        return best


@pytest.fixture
def executor(tiny_model):
    return make_executor(tiny_model, LayerPlan(), compiled=False)[0]


@pytest.mark.parametrize(
    ("speeds", "expected", "asked"),
    [
        ({2048: 10, 4096: 12, 8192: 13, 16384: 14}, 16384, [2048, 4096, 8192, 16384, 12288]),
        ({2048: 10, 4096: 12, 8192: 11, 6144: 12.5}, 6144, [2048, 4096, 8192, 16384, 6144]),
        ({2048: 10, 4096: 12, 8192: 11, 6144: 11}, 4096, [2048, 4096, 8192, 16384, 6144]),
        ({2048: 10, 3072: 11}, 3072, [2048, 4096, 3072]),
        ({2048: 10, 4096: 9, 8192: 11}, 8192, [2048, 4096, 8192, 16384, 12288, 6144]),
        ({2048: 10, 4096: 9, 8192: 11, 6144: 12}, 6144, [2048, 4096, 8192, 16384, 12288, 6144]),
        ({2048: 10, 4096: 9, 8192: 9.9}, 2048, [2048, 4096, 8192, 3072]),
        ({2048: 10, 4096: 10.1, 3072: 10}, 4096, [2048, 4096, 8192, 6144]),
        ({2048: 10}, 2048, [2048, 4096, 3072]),
    ],
)
def test_the_search_doubles_while_that_is_faster(executor, speeds, expected, asked):
    tuner = Played(executor, speeds)
    assert tuner.choose().micro_tokens == expected
    assert tuner.asked == asked


def test_no_more_than_a_rank_can_get_is_tried(executor):
    tuner = Played(executor, {2048: 10, 3000: 12}, max_tokens=3000)
    assert tuner.choose().micro_tokens == 3000
    assert tuner.asked == [2048, 3000]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 15, 16, 20])
@pytest.mark.parametrize("is_repeating", [False, True])
def test_a_setting_is_worth_what_whole_steps_reach_with_it(rows, is_repeating):
    """A card that takes 1 s for each micro-batch and 1 s for each of its rows."""
    workload = make_workload(*[128] * 50)
    costs = CostCurve(((128, 2.0), (128 * rows, 1.0 + rows)) if rows > 1 else ((128, 2.0),), 0.0)
    found = workload.predict_speed(128 * rows, costs, is_repeating=is_repeating)
    groups = group_examples([128] * 16, 128 * rows, is_filled=is_repeating)
    assert found == pytest.approx(16 * 128 / sum(1.0 + len(group) for group in groups))


def test_padding_and_small_micro_batches_lower_the_worth_of_a_setting():
    lengths = [40, 300, 700, 1000, 90, 260, 510, 130]
    workload = make_workload(*lengths, batch=4)
    costs = CostCurve(((1024, 1.0),))
    exact = workload.predict_speed(1024, costs, is_repeating=False)
    padded = workload.predict_speed(1024, costs, is_repeating=True)
    assert exact <= 1024.0
    assert 0.75 * exact < padded < exact
    waiting = CostCurve(((1024, 1.0),), launch_s=3.0)
    assert workload.predict_speed(1024, waiting, is_repeating=False) < 0.5 * exact
    assert workload.predict_speed(1024, waiting, is_repeating=True) == pytest.approx(padded)
    # Of several ranks each launches the last micro-batch of a step, beside the others.
    shared = make_workload(*lengths, batch=4, world_size=2)
    alone = shared.predict_speed(1024, costs, is_repeating=True)
    assert shared.predict_speed(1024, waiting, is_repeating=True) < 0.7 * alone
    # With micro-batches of 1,024 tokens many are smaller; with small ones few are.
    assert 200 < workload.find_small(1024, is_repeating=True) < 820
    assert workload.find_small(1000, is_repeating=False) is not None


def test_a_rank_that_gets_no_rows_is_tuned_with_the_longest():
    """With two equal rows for three ranks, the one in the middle has none in any step."""
    examples = AllExamples(make_part(90, 90, 90, 90).examples)
    steps = sample_steps(make_spec(batch_sequences=2), examples, rank=1, world_size=3)
    assert not any(steps)
    workload = Workload(examples, steps, sends=True)
    assert workload.mean_tokens == 90
    assert len(workload.choose_full(90, is_repeating=True).examples) == 1
    assert workload.predict_speed(90, CostCurve(((128, 2.0),)), is_repeating=True) == 45.0


def test_the_usual_shapes_cover_nearly_all_micro_batches():
    draw = np.random.default_rng(seed(3))
    lengths = np.minimum(512, draw.lognormal(4.6, 0.8, 900).astype(int) + 3)
    examples = AllExamples(make_part(*map(int, lengths)).examples)
    grid, workload = ShapeGrid(examples, 512), make_workload(*map(int, lengths))
    usual = workload.choose_usual(grid, 1024, 10)
    shapes = {grid.choose(part.examples, 1024) for part in usual}
    assert len(shapes) == len(usual) <= 10
    later = make_workload(*map(int, lengths), first_step=30)
    found = []
    for step in range(3):
        part = later.choose_step(step, 1e9)
        lengths = [one.num_tokens for one in part.examples]
        for group in group_examples(lengths, 1024, is_filled=True):
            found.append(grid.choose(part.pick(group).examples, 1024) in shapes)
    assert sum(found) > 0.8 * len(found)


def settings(*speeds):
    """Settings of rising size, with these believed speeds."""
    return [
        ExecutionSetting(micro_tokens=1024 * (place + 1), tokens_per_s=speed)
        for place, speed in enumerate(speeds)
    ]


def watch(chosen, tried, real, num_steps=40):
    """Return the corrections, where settings really have these tokens per second by size."""
    watched, used, found = SpeedWatch(chosen, tried), chosen, []
    for _ in range(num_steps):
        correction = watched.learn(1000, 1000 / real[used.micro_tokens])
        if correction is not None:
            used = correction.setting
            found.append(correction)
    assert watched.is_done
    return used, found


def test_a_setting_that_is_as_fast_as_believed_stays():
    tried = settings(100.0, 90.0, 80.0)
    used, found = watch(tried[0], tried, {1024: 91.0, 2048: 500.0, 3072: 500.0})
    assert (used, found) == (tried[0], [])


def test_a_setting_that_is_slower_than_believed_is_compared_with_the_next_best():
    tried = settings(100.0, 90.0, 80.0)
    used, found = watch(tried[0], tried, {1024: 40.0, 2048: 85.0, 3072: 99.0})
    assert used.micro_tokens == 2048
    assert [one.is_final for one in found] == [False, True]
    assert found[0].believed_tokens_per_s == 100.0
    assert found[0].measured_tokens_per_s == pytest.approx(40.0)
    assert found[1].setting.tokens_per_s == pytest.approx(85.0)


def test_the_faster_one_comes_back_and_no_more_than_two_are_tried():
    tried = settings(100.0, 90.0, 80.0, 70.0)
    used, found = watch(tried[0], tried, {1024: 60.0, 2048: 50.0, 3072: 40.0, 4096: 900.0})
    assert used.micro_tokens == 1024
    assert [one.setting.micro_tokens for one in found] == [2048, 3072, 1024]
    assert found[-1].setting.tokens_per_s == pytest.approx(60.0)


def test_nothing_changes_once_a_checkpoint_is_saved():
    tried = settings(100.0, 90.0)
    watched = SpeedWatch(tried[0], tried)
    watched.stop()
    assert all(watched.learn(1000, 100.0) is None for _ in range(40))
    assert SpeedWatch(ExecutionSetting(micro_tokens=9), []).is_done  # nothing was believed


def test_a_card_where_nothing_was_timed_recomputes_everything(executor):
    chosen = Played(executor, {}).choose()
    assert (chosen.micro_tokens, chosen.num_recomputed) == (2048, 2)


def test_a_kept_setting_belongs_to_one_rank_and_one_shape(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 4070")
    properties = SimpleNamespace(total_memory=12 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def name(rank=0, world_size=2, longest=2048, **changes):
        state = SimpleNamespace(
            train=SimpleNamespace(num_tokens=np.array([100, longest])),
            versions={},
            model=SimpleNamespace(
                module=SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"layers": 2}))
            ),
        )
        intent = SimpleNamespace(spec=make_spec(**changes))
        context = SimpleNamespace(
            attempt=SimpleNamespace(intent=intent, rank=rank),
            group=SimpleNamespace(world_size=world_size),
            device=CPU,
        )
        return name_setting(context, state, SimpleNamespace(compiled=True, stream=None))

    assert name() == name()
    others = [name(rank=1), name(world_size=1), name(longest=4096), name(exact=False)]
    assert len({name(), *others}) == 5


@pytest.mark.parametrize("error", [RuntimeError, BackendCompilerFailed], ids=["proof", "place"])
def test_layers_that_cannot_be_compiled_are_computed_as_they_are(tiny_model, monkeypatch, error):
    executor, flat = make_executor(tiny_model, LayerPlan(), compiled=True)
    plain, expected = make_executor(tiny_model, LayerPlan(), compiled=False)
    warnings = []

    def fail(*args):
        if error is RuntimeError:
            raise RuntimeError("no such thing\nand more")
        raise BackendCompilerFailed("here", RuntimeError("no such thing"), None)

    monkeypatch.setattr(executor.layers, "_compiled", fail)
    monkeypatch.setattr(executor.layers, "_warn", lambda message, hint: warnings.append(message))
    prove(executor, make_part(9), evaluates=True)
    assert len(warnings) == 1
    assert "cannot be compiled here" in warnings[0]
    assert "no such thing" in warnings[0]
    assert "and more" not in warnings[0]
    assert not executor.layers.compiled
    for one in (executor, plain):
        one.add_gradients(make_part(9, 12))
    assert torch.equal(flat.gradients, expected.gradients)


@pytest.mark.parametrize(
    ("error", "fits", "num_warnings"),
    [
        (None, True, 0),
        (torch.OutOfMemoryError("CUDA out of memory"), False, 0),
        (RuntimeError("no such thing"), False, 1),
    ],
    ids=str,
)
def test_layers_that_keep_are_compiled_first_and_alone(
    tiny_model, monkeypatch, error, fits, num_warnings
):
    executor, _ = make_executor(tiny_model, LayerPlan(), compiled=True)
    used, warnings = set(), []

    def play(name, real):
        def run(*args):
            used.add(name)
            if error is not None:
                raise error
            return real(*args)

        monkeypatch.setattr(executor.layers, name, run)

    play("_compiled", layers._compute)
    play("_compiled_recompute", layers._compute_recomputing)
    monkeypatch.setattr(executor.layers, "_warn", lambda message, hint: warnings.append(message))
    executor.layers.set(LayerPlan(num_recomputed=2))
    assert try_kept(executor, make_part(9, 12)) == fits
    assert used == {"_compiled"}
    assert len(warnings) == num_warnings
    assert executor.layers.compiled == (not warnings)
    assert executor.micro_tokens == 21  # unlike where memory runs out in training


def test_why_a_machine_cannot_compile(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert compiling.find_obstacle(CPU) == "there is no GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080")
    assert "GTX 1080 is older" in compiling.find_obstacle(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setitem(sys.modules, "triton", object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "sudo apt install build-essential" in compiling.find_obstacle(gpu)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert compiling.find_obstacle(gpu) is None


def test_compiled_code_goes_where_the_agent_keeps_it(tmp_path):
    # torch makes up its mind while it is imported, so this needs a process of its own.
    code = (
        "import sys; from pathlib import Path; from agents.trainer import __main__ as entry\n"
        "entry._configure_torch(Path(sys.argv[1]))\n"
        "import agents.trainer.run\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print(cache_dir())\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TRITON"))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == str(tmp_path / "inductor")
