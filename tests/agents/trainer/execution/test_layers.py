"""Compiled layers compute what plain ones do, and no more layers than needed save memory."""

from functools import partial

import numpy as np
import pytest
import torch

from agents.contract.layer_plan import LayerPlan
from agents.contract.spec import AdapterSpec
from agents.trainer.data.examples import BatchPart, Example, Segment
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.kernels import compiling
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import build_trained_model, load_model, load_tokenizer
from agents.trainer.objectives.sft import Supervised
from agents.trainer.optim.flat_parameters import FlatParameters
from tests.agents.trainer.ranks import make_spec
from tests.draws import seed

CPU = torch.device("cpu")
PARTITION = "aot_eager_decomp_partition"
"""Traces layers and divides them into passes as on GPUs, but makes no code for CPUs."""


def make_part(*lengths):
    examples = []
    for row, length in enumerate(lengths, 1):
        ids = np.arange(length, dtype=np.int32) * 7 % 700 + 6
        examples.append(Example((Segment(row, ids, np.arange(length) % 3 != 0),)))
    count = len(lengths)
    return BatchPart(examples=examples, places=[0] * count, positions=list(range(count)))


def make_executor(tiny_model, plan, *, compiled, fused=False):
    spec = make_spec(precision="fp32", adapter=AdapterSpec(rank=4, dropout=0.2))
    tokenizer, plain = load_tokenizer(tiny_model)
    base = load_model(spec, tiny_model, CPU)
    model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
    flat = FlatParameters(model.named_parameters(), CPU)
    draw = torch.Generator().manual_seed(seed(3))
    flat.values.add_(0.05 * torch.randn(len(flat.values), generator=draw))
    forward = Forward(model, CPU)
    if fused:
        forward.fuse_linear()
    layers = LayerStack(model, compiled=compiled)
    layers.set(plan)
    executor = Executor(
        model,
        flat,
        Supervised(forward),
        CPU,
        layers=layers,
        micro_tokens=1000,
        warn=lambda message, hint: None,
        beat=lambda: None,
    )
    return executor, flat


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
def test_compiled_layers_compute_the_same_whatever_the_sizes(tiny_model, monkeypatch):
    """One layer is recomputed and one kept, with dropout and fused linear layers, as on GPUs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=PARTITION))
    plain, plain_flat = make_executor(tiny_model, LayerPlan(), compiled=False)
    plan = LayerPlan(num_recomputed=1)
    compiled, flat = make_executor(tiny_model, plan, compiled=True, fused=True)
    torch._dynamo.reset()
    compiling.fix_settings()
    counts = []
    for lengths in ((30, 5, 17), (9, 12, 4), (21, 4, 8), (6, 6, 6)):
        part = make_part(*lengths)
        plain.add_gradients(part)
        compiled.add_gradients(part)
        error = (flat.gradients - plain_flat.gradients).abs().max()
        assert error < 1e-5 * plain_flat.gradients.abs().max()
        assert compiled.loss_sum.item() == pytest.approx(plain.loss_sum.item(), rel=1e-6)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled.layers.compiled
    assert counts[-1] == counts[0] > 0  # no size is compiled again


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
def test_what_cannot_be_compiled_after_all_is_computed_as_it_is(tiny_model, monkeypatch):
    plain, expected = make_executor(tiny_model, LayerPlan(), compiled=False)
    compiled, found = make_executor(tiny_model, LayerPlan(), compiled=True)
    warnings = []
    monkeypatch.setattr(compiled.layers, "_warn", lambda message, hint: warnings.append(message))
    refuse = torch._dynamo.graph_break
    for layer in compiled.layers._layers:
        layer.mlp.register_forward_pre_hook(lambda *given: refuse())
    for executor in (plain, compiled):
        executor.add_gradients(make_part(9, 12, 5))
    assert torch.equal(found.gradients, expected.gradients)
    assert len(warnings) == 1
    assert "LlamaDecoderLayer cannot be compiled" in warnings[0]
    assert "1.4 to 1.9 times" in warnings[0]
    assert not compiled.layers.compiled


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (LayerPlan(), "kkkk"),
        (LayerPlan(num_recomputed=4), "rrrr"),
        (LayerPlan(num_moved=2), "mkmk"),
        (LayerPlan(num_moved=4), "mmmm"),
        (LayerPlan(num_recomputed=2, num_moved=1), "mrrk"),
        (LayerPlan(num_recomputed=2, num_moved=2), "mrmr"),
        (LayerPlan(num_recomputed=9, num_moved=9), "rrrr"),
    ],
)
def test_layers_that_move_are_spread_and_the_first_others_recompute(plan, expected):
    assert "".join(mode[0] for mode in plan.modes(4)) == expected


def test_without_a_gpu_nothing_moves(tiny_model):
    executor, _ = make_executor(tiny_model, LayerPlan(num_moved=2), compiled=False)
    assert executor.layers.plan == LayerPlan()
