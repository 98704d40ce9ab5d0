"""What the layers compile to can be kept for the next start: no operation of ours prevents that."""

from functools import partial

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

from agents.contract.layer_plan import LayerPlan
from agents.contract.spec import AdapterSpec
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.kernels import compiling
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import build_trained_model, load_model, load_tokenizer
from agents.trainer.objectives.sft import Supervised
from agents.trainer.optim.flat_parameters import FlatParameters
from tests.agents.trainer.execution.test_layers import make_part
from tests.agents.trainer.ranks import make_spec

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize(
    ("adapter", "plan"),
    [
        (AdapterSpec(rank=4, dropout=0.2), LayerPlan(num_recomputed=1)),
        (AdapterSpec(rank=4, dropout=0.0, dora=True), LayerPlan()),
    ],
    ids=["lora", "dora"],
)
def test_the_compiler_may_keep_every_graph(tiny_model, adapter, plan, monkeypatch):
    reasons = []

    def check(graph, _inputs):
        try:
            check_cacheable(graph)
            reasons.append("")
        except BypassAOTAutogradCache as error:
            reasons.append(str(error))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=check))
    spec = make_spec(precision="fp32", adapter=adapter)
    tokenizer, plain = load_tokenizer(tiny_model)
    base = load_model(spec, tiny_model, CPU)
    model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
    flat = FlatParameters(model.named_parameters(), CPU)
    forward = Forward(model, CPU)
    forward.fuse_linear()
    layers = LayerStack(model, compiled=True)
    layers.set(plan)
    warnings = []
    executor = Executor(
        *(model, flat, Supervised(forward), CPU),
        layers=layers,
        micro_tokens=1000,
        warn=lambda message, hint: warnings.append(message),
        beat=lambda: None,
    )
    torch._dynamo.reset()
    compiling.fix_settings()
    executor.add_gradients(make_part(30, 5, 17))
    assert (layers.compiled, warnings) == (True, [])
    assert len(reasons) >= 2
    assert set(reasons) == {""}
