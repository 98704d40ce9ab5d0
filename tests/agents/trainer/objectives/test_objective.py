"""DPO against its formula, a pair at a time; what the reference model is; variants of LoRA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from agents.contract.layer_plan import LayerPlan
from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import AdapterSpec
from agents.trainer.data.examples import BatchPart, Example, Segment
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import build_trained_model, load_model, load_tokenizer
from agents.trainer.objectives.reference_model import compute_reference
from agents.trainer.objectives.registry import KnownOfRows, make_objective
from agents.trainer.optim.flat_parameters import FlatParameters
from tests.agents.trainer.ranks import DEMO, make_spec
from tests.draws import seed

CPU = torch.device("cpu")
BETA = 0.3


def segment(row, length, num_asked, step):
    ids = (np.arange(length, dtype=np.int32) * step + 5 * row) % 700 + 6
    ids[:num_asked] = np.arange(num_asked) + row
    return Segment(row, ids, np.arange(length) >= num_asked)


PAIRS = [
    Example((segment(row, 9 + 5 * row, 4, 3), segment(row, 20 - 2 * row, 4, 11)))
    for row in range(1, 5)
]
PART = BatchPart(examples=PAIRS, places=list(range(4)), positions=[11, 12, 13, 14])


class Pairs:
    num_tokens = np.array([pair.num_tokens for pair in PAIRS], dtype=np.int32)
    weights = np.ones(4, dtype=np.int32)
    parts = (4,)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return PAIRS[index]


def make(tiny_model, adapter, micro_tokens=1000, num_recomputed=0, objective="dpo"):
    spec = make_spec(precision="fp64", objective=objective, dpo_beta=BETA, adapter=adapter)
    tokenizer, plain = load_tokenizer(tiny_model)
    base = load_model(spec, tiny_model, CPU)
    model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
    forward = Forward(model, CPU)
    flat = FlatParameters(model.named_parameters(), CPU)
    reference = None
    if objective == "dpo" and adapter.kind == "full":
        parts = [
            compute_reference(spec, forward, (Pairs(), None), rank=r, world_size=2, device=CPU)
            for r in range(2)
        ]
        reference = parts[0] + parts[1]
    draw = torch.Generator().manual_seed(seed(2))
    flat.values.add_(0.02 * torch.randn(len(flat.values), generator=draw, dtype=torch.float64))
    layers = LayerStack(model)
    layers.set(LayerPlan(num_recomputed=num_recomputed))
    return Executor(
        model,
        flat,
        make_objective(spec, forward, KnownOfRows(reference=reference)),
        CPU,
        layers=layers,
        micro_tokens=micro_tokens,
        warn=lambda message, hint: None,
        beat=lambda: None,
    )


def compute(executor):
    executor.add_gradients(PART)
    return executor._flat.gradients.clone(), executor.sums.clone()


def log_probability(model, part):
    ids = torch.from_numpy(part.ids.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
    chosen = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return (chosen * torch.from_numpy(part.is_target[1:])).sum()


def expect(policy, reference):
    """Equation 7 of Rafailov et al. 2023, a pair at a time; the loss, the margins, the right."""
    loss, margins = torch.zeros((), dtype=torch.float64), []
    for pair in PAIRS:
        with torch.no_grad(), reference[1]():
            base = [log_probability(reference[0], part) for part in pair.segments]
        good, bad = (log_probability(policy, part) for part in pair.segments)
        margin = BETA * ((good - base[0]) - (bad - base[1]))
        loss = loss - F.logsigmoid(margin)
        margins.append(margin.item())
    return loss, margins


def plain_lora(tiny_model, executor, **changes):
    """Plain Transformers and PEFT with the adapter of ours, as a user would load it."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    config = LoraConfig(
        r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", **changes
    )
    model = get_peft_model(base, config).double().eval()
    result = set_peft_model_state_dict(model, executor._flat.views)
    assert not result.unexpected_keys
    return model


VARIANTS = pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"]
)


def adapter_of(changes, dropout=0.0):
    names = {"use_rslora": "rslora", "use_dora": "dora"}
    return AdapterSpec(rank=4, dropout=dropout, **{names[key]: True for key in changes})


@VARIANTS
def test_dpo_is_its_formula_with_the_adapter_off_as_reference(tiny_model, changes):
    executor = make(tiny_model, adapter_of(changes))
    gradients, sums = compute(executor)
    model = plain_lora(tiny_model, executor, **changes)
    loss, margins = expect(model, (model, model.disable_adapter))
    assert sums[0].item() == pytest.approx(loss.item(), rel=1e-6)  # RMSNorm works in fp32
    assert sums[1].item() == pytest.approx(sum(margins), rel=1e-5)
    assert sums[2].item() == sum(margin > 0 for margin in margins)
    loss.backward()
    names = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(names) == len(executor._flat.views)
    plain_norm = torch.cat([g.flatten() for g in names.values()]).norm()
    assert gradients.norm().item() == pytest.approx(plain_norm.item(), rel=1e-5)


def test_a_full_run_compares_with_the_weights_it_began_with(tiny_model):
    from contextlib import nullcontext

    executor = make(tiny_model, AdapterSpec(kind="full"))
    _, sums = compute(executor)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    policy.load_state_dict(executor._flat.views, strict=False)
    policy.tie_weights()
    loss, margins = expect(policy, (base, nullcontext))
    assert sums[0].item() == pytest.approx(loss.item(), rel=1e-6)
    assert sums[1].item() == pytest.approx(sum(margins), rel=1e-4)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
@VARIANTS
def test_neither_grouping_nor_recomputing_moves_a_number(tiny_model, changes, objective):
    adapter = adapter_of(changes, dropout=0.2)
    expected = compute(make(tiny_model, adapter, objective=objective))
    for settings in ({"micro_tokens": 1}, {"num_recomputed": 2}):
        found = compute(make(tiny_model, adapter, objective=objective, **settings))
        for one, other in zip(found, expected, strict=True):
            error = (one - other).abs().max() / other.abs().max()
            assert error < 1e-12
    assert len(expected[1]) == len(OBJECTIVES[objective].sums)


@VARIANTS
def test_dropout_is_counted_in_every_variant(tiny_model, changes):
    with_dropout = compute(make(tiny_model, adapter_of(changes, dropout=0.4)))
    without = compute(make(tiny_model, adapter_of(changes)))
    assert (with_dropout[0] - without[0]).abs().max() > 1e-3 * without[0].abs().max()


def test_dora_starts_as_the_base_model(tiny_model):
    adapter = AdapterSpec(rank=4, dropout=0.0, dora=True)
    spec = make_spec(precision="fp64", adapter=adapter)
    tokenizer, plain = load_tokenizer(tiny_model)
    base = load_model(spec, tiny_model, CPU)
    ids = torch.arange(20)[None]
    expected = base(input_ids=ids).logits
    model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
    torch.testing.assert_close(model.module(input_ids=ids).logits, expected)
    lengths = [name for name, _ in model.named_parameters() if "magnitude" in name]
    assert len(lengths) == 14
    assert all(name.endswith(".lora_magnitude_vector") for name in lengths)


def test_weights_of_four_bits_give_the_gradient_of_what_they_stand_for():
    from peft.utils.integrations import dequantize_module_weight

    spec = make_spec(precision="fp32", adapter=AdapterSpec(kind="qlora", rank=4, dropout=0.0))
    tokenizer, plain = load_tokenizer(DEMO / "model")
    base = load_model(spec, DEMO / "model", CPU)
    model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
    Forward(model, CPU)  # tries the model without gradients first
    layer = base.model.layers[1].mlp.up_proj.base_layer
    x = torch.randn(5, layer.in_features, requires_grad=True)
    factor = torch.randn(5, layer.out_features)
    layer(x).backward(factor)
    weight = dequantize_module_weight(layer).float()
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(x.grad, factor @ weight, rtol=1e-3, atol=1e-3)
