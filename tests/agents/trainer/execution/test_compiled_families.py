"""Layers that once fell back to eager compile as a whole, and compute what they do uncompiled.

Rows of unlike length and number go through one compiled function. The uncompiled side is PEFT's own
forward pass, the compiled one has fused linear layers.
"""

from functools import partial

import pytest
import torch

from agents.contract.layer_plan import LayerPlan
from agents.contract.spec import AdapterSpec
from agents.trainer.execution.layers import LayerStack
from agents.trainer.kernels import compiling, nf4
from agents.trainer.model import fused_linear
from agents.trainer.model.forward import Forward
from agents.trainer.model.micro_batch import build_micro_batch
from agents.trainer.model.model import build_trained_model, load_model
from tests.agents.trainer.execution.test_layers import PARTITION, make_part
from tests.agents.trainer.model.families import make_family
from tests.agents.trainer.ranks import make_spec, make_tiny_model
from tests.draws import seed

CPU = torch.device("cpu")
ROWS = ((13, 4, 9, 2), (6, 5, 21), (3, 8, 2, 2, 7))


def make_model(base, spec, *, compiled, plan):
    model = build_trained_model(spec, base, None, plain_template=False, device=CPU)
    draw = torch.Generator().manual_seed(seed(5))
    for _, parameter in model.named_parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    forward = Forward(model, CPU)
    warnings = []
    if compiled:
        forward.fuse_linear()
        assert not forward.limits
    layers = LayerStack(
        model, compiled=compiled, warn=lambda message, hint: warnings.append(message)
    )
    layers.set(plan)
    return model, forward, warnings


def differentiate(model, forward, lengths, start_backward=lambda: None):
    """Return the features and the gradients of all that is trained, in one row each."""
    part = make_part(*lengths)
    batch = build_micro_batch(part.examples, CPU)
    batch.ids_1M.remainder_(90).add_(3)
    fused_linear.collect_copies(model.module).refresh()
    model.clock.set(part.positions, batch.lengths, batch.num_tokens, CPU)
    found = forward.features(batch)
    weights = torch.randn(
        found.shape, generator=torch.Generator().manual_seed(seed(9)), dtype=found.dtype
    )
    trained = [parameter for _, parameter in model.named_parameters()]
    start_backward()
    gradients = torch.autograd.grad((found * weights).sum(), trained)
    model.clock.clear()
    return found.detach().flatten(), torch.cat([gradient.flatten() for gradient in gradients])


def check(plain, compiled):
    for lengths in ROWS:
        expected = differentiate(plain[0], plain[1], lengths)
        found = differentiate(compiled[0], compiled[1], lengths)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() < 1e-5 * other.norm()
    assert compiled[2] == []


@pytest.fixture
def as_on_gpus(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=PARTITION))
    torch._dynamo.reset()
    compiling.fix_settings()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize(
    ("family", "dora", "num_recomputed", "num_graphs"),
    [
        # Soft caps: a layer with a window, one without, and the last norm.
        ("Gemma 2", False, 2, 3),
        # Sinks, biases and experts: the same.
        ("gpt-oss", True, 0, 3),
        # Three layers read what one has written, and norms of two sizes stand outside.
        pytest.param("Gemma 3n, three readers", False, 4, 4, marks=pytest.mark.campaign),
    ],
)
def test_families_compile_as_a_whole(as_on_gpus, family, dora, num_recomputed, num_graphs):
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter = AdapterSpec(rank=3, dropout=0.0, dora=dora, targets=targets)
    spec = make_spec(precision="fp32", adapter=adapter)
    plan = LayerPlan(num_recomputed=num_recomputed)
    sides = []
    for compiled in (False, True):
        sides.append(make_model(make_family(family), spec, compiled=compiled, plan=plan))
    check(*sides)
    # Nothing is compiled for a size.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs


def keep_dequantized(model):
    """Let NF4 layers on a CPU pass for registered ones that are kept dequantized."""
    functional = pytest.importorskip("bitsandbytes").functional
    count = 0
    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and "bitsandbytes" in type(module).__module__:
            state = module.weight.quant_state
            module.nf4_packed, module.nf4_scale8 = module.weight.data.view(-1), state.absmax
            module.nf4_dtype, module.nf4_has_sole_reader = state.dtype, False
            module.nf4_dequantized = functional.dequantize_4bit(module.weight.data, state)
            nf4._layers[state.absmax.data_ptr()] = module
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
def test_decomposed_adapters_on_packed_weights_compile(as_on_gpus, tmp_path):
    pytest.importorskip("bitsandbytes")
    folder = make_tiny_model(tmp_path, 1, attention_bias=True)
    adapter = AdapterSpec(kind="qlora", rank=4, dropout=0.1, dora=True)
    spec = make_spec(precision="fp32", adapter=adapter)
    sides = []
    for compiled in (False, True):
        base = load_model(spec, folder, CPU)
        assert not compiled or keep_dequantized(base) == 7
        sides.append(make_model(base, spec, compiled=compiled, plan=LayerPlan()))
    check(*sides)
