"""A stage that runs out of memory between passes goes on with the same gradients."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agents.contract.layer_plan import LayerPlan
from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.trainer.data.examples import BatchPart, Example, Segment
from agents.trainer.execution.activation_offload import Offloader
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import build_trained_model, load_model, load_tokenizer
from agents.trainer.model.stage_opening import open_stage
from agents.trainer.objectives.sft import Supervised
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.parallel.pipeline.passes import StagePasses
from tests.agents.trainer.ranks import make_spec

CPU = torch.device("cpu")
LENGTHS = (30, 5, 17, 9)


def make_part() -> BatchPart:
    examples = []
    for row, length in enumerate(LENGTHS):
        ids = np.arange(length, dtype=np.int32) * (7 + row) % 700 + 6
        examples.append(Example((Segment(row, ids, np.arange(length) % 3 != 0),)))
    return BatchPart(examples=examples, places=[0] * len(LENGTHS), positions=[11, 12, 13, 14])


@pytest.fixture
def make_passes(tiny_model, monkeypatch):
    """Return what makes the passes of a pipeline of one stage, which fail at these calls."""

    def make(failing=(), *, host_bytes=1 << 28):
        spec = make_spec(precision="fp64", adapter=AdapterSpec(rank=4, dropout=0.2))
        tokenizer, plain = load_tokenizer(tiny_model)
        base = load_model(spec, tiny_model, CPU)
        model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
        model = open_stage(model, 0, 2, CPU)
        flat = FlatParameters(model.named_parameters(), CPU)
        flat.values.add_(0.01)
        layers = LayerStack(
            model, make_offloader=lambda: Offloader(CPU, [], host_bytes, holds_several=True)
        )
        layers.set(LayerPlan(num_recomputed=2))
        told = []
        executor = Executor(
            model, flat, Supervised(Forward(model, CPU)), CPU, layers=layers, micro_tokens=64,
            warn=lambda message, hint: told.append(message), beat=lambda: None,
        )  # fmt: skip
        nothing = SimpleNamespace(
            begin=lambda *args, **more: None, confirm_gradient=lambda number: None,
            finish=lambda: None, abandon=lambda: None,
        )  # fmt: skip
        assert model.stage is not None
        passes = StagePasses(
            executor, flat, model.stage, nothing, streams=1, in_flight=3, in_flight_before=0
        )
        run_forward, calls = passes._run_forward, []

        def fail_at_times(*args, **more):
            calls.append(args)
            if len(calls) in failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run_forward(*args, **more)

        monkeypatch.setattr(passes, "_run_forward", fail_at_times)
        return passes, flat, layers, told

    return make


def train(passes, flat):
    passes.add_gradients(make_part(), [[0], [1], [2], [3]])
    return flat.gradients.clone()


def test_inputs_of_layers_wait_in_host_memory_once_memory_ran_out(make_passes):
    passes, flat, layers, told = make_passes()
    expected = train(passes, flat)
    assert layers.offloader is None
    passes, flat, layers, told = make_passes(failing=[3])
    assert torch.equal(train(passes, flat), expected)
    assert layers.offloader is not None
    assert len(told) == 1
    assert "in the PC's RAM" in told[0]
    assert torch.equal(train(passes, flat), expected)


@pytest.mark.parametrize(("failing", "host_bytes"), [([2, 3], 1 << 28), ([2], 0)])
def test_what_does_not_fit_then_either_is_told(make_passes, failing, host_bytes):
    passes, flat, _, _ = make_passes(failing, host_bytes=host_bytes)
    with pytest.raises(ExpectedError, match="Memory ran out with 2 micro-batches of up to 5 "):
        train(passes, flat)


def test_a_backward_pass_that_does_not_fit_is_told(make_passes, monkeypatch):
    passes, flat, _, _ = make_passes()

    def fail(gradients):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(flat, "add", fail)
    expected = "Memory ran out in the backward pass of one of 3 micro-batches of up to 30 tokens"
    with pytest.raises(ExpectedError, match=expected):
        train(passes, flat)
