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
from agents.contract.micro_shapes import group_examples
from agents.trainer.autotune import name_setting, prove
from agents.trainer.data.examples import Part
from agents.trainer.execution.setting import ExecutionSetting
from agents.trainer.execution.tuner import Tuner
from agents.trainer.kernels import compiling
from tests.agents.trainer.execution.test_layers import CPU, make_executor, make_part
from tests.agents.trainer.execution.test_tuner import NEEDS
from tests.agents.trainer.optim.test_optimizer_reserve import make_reserve
from tests.agents.trainer.ranks import make_spec

ROOT = Path(__file__).parents[3]


class Played(Tuner):
    """A search over a table of speeds instead of a GPU; None stands for a card that is too small.

    `max_tokens` is 16384 unless named.
    """

    def __init__(self, executor, speeds, max_tokens=16384):
        super().__init__(
            executor,
            CPU,
            lambda tokens: Part(
                examples=[SimpleNamespace(num_tokens=100)] * (tokens // 100),
                places=[],
                positions=[],
            ),
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


class Timed(Tuner):
    """A search on a card that takes 1 s for each micro-batch and 1 s for each of its rows."""

    def __init__(self, executor, *, step_rows):
        def choose(tokens):
            return SimpleNamespace(examples=[SimpleNamespace(num_tokens=100)] * (tokens // 100))

        super().__init__(
            executor,
            CPU,
            choose,
            max_tokens=16384,
            step_tokens=step_rows and 100.0 * step_rows,
            recompute="auto",
            reserve=make_reserve("cpu")[0],
        )

    def _time(self, part):
        return 1.0 + len(part.examples)

    def rate(self, rows):
        part = self._choose_part(100 * rows)
        return self._rate(part, self._time(part))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 15, 16, 20])
def test_a_setting_is_worth_what_a_whole_step_reaches_with_it(executor, rows):
    groups = group_examples([100] * 16, 100 * rows)
    whole_s = sum(1.0 + len(group) for group in groups)
    alike = rows > 16 or 16 % rows == 0
    expected = 100 * rows / (1.0 + rows) if alike else 1600 / whole_s
    assert Timed(executor, step_rows=16).rate(rows) == pytest.approx(expected)


def test_where_shares_change_a_setting_is_worth_its_largest_micro_batch(executor):
    assert Timed(executor, step_rows=None).rate(3) == pytest.approx(300 / 4)


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
        return name_setting(context, state, SimpleNamespace(compiled=True))

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
