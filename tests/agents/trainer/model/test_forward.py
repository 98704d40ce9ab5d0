"""What a model's class can do is tried: packed rows where they are exact, else a row at a time."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from transformers import AutoConfig, AutoModelForCausalLM

from agents.trainer.data.examples import Example, Segment
from agents.trainer.model import recurrent_layers
from agents.trainer.model.dropout import DropoutClock
from agents.trainer.model.forward import Forward
from agents.trainer.model.head import FullLogitsHead, Head
from agents.trainer.model.micro_batch import build_micro_batch
from agents.trainer.model.model import TrainedModel
from tests.agents.trainer.model.families import make_family
from tests.draws import seed

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
HALF = ["sliding_attention", "full_attention"]
APART = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
}


def make(kind, more, dtype=torch.float32):
    torch.manual_seed(seed(3))
    config = AutoConfig.for_model(kind, **{**SMALL, **more})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that attention and caps matter
    return model


def wrap(model, dtype=torch.float32):
    return TrainedModel(
        module=model,
        tokenizer=None,
        clock=DropoutClock(0),
        dtype=dtype,
        autocast=False,
        lora=None,
        plain_template=False,
    )


def segment(row, length):
    ids = (np.arange(length, dtype=np.int32) * (3 + row) + row) % 90 + 3
    is_target = np.arange(length) % 3 != 0
    return Segment(row, ids, is_target)


SEGMENTS = [segment(1, 13), segment(2, 4), segment(3, 9), segment(4, 2)]


def expected_loss(model, parts=SEGMENTS):
    """The model's own attention and logits, a segment at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        ids = torch.from_numpy(part.ids.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        place = np.flatnonzero(part.is_target)
        wide = torch.promote_types(logits.dtype, torch.float32)
        chosen = logits[place - 1].to(wide)
        total = total + F.cross_entropy(chosen, ids[place], reduction="sum")
    return total


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", APART)
def test_classes_without_the_registry_take_a_row_at_a_time(kind):
    model = make(kind, APART[kind])
    expected = expected_loss(model)
    expected_gradients = gradients(model, expected)
    forward = Forward(wrap(model), CPU)
    assert not forward.flat
    (limit,) = forward.limits
    assert type(model).__name__ in limit
    assert "because it computes attention itself" in limit
    assert isinstance(forward.head, Head)
    batch = build_micro_batch([Example(tuple(SEGMENTS))], CPU)
    loss = forward.head.sum_loss(forward.features(batch), batch.label_N)
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    found = gradients(model, loss)
    assert (found - expected_gradients).abs().max() < 1e-4 * expected_gradients.abs().max()


def test_layers_that_let_rows_see_each_other_are_noticed(monkeypatch):
    """As with a class whose state goes on from row to row, whatever it is called with."""
    model = make_family("Qwen3.5")
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        plain = getattr(sys.modules[type(model).__module__], name)
        plain = getattr(plain, "rackless_plain", plain)
        monkeypatch.setattr(sys.modules[type(model).__module__], name, plain)
    monkeypatch.setattr(recurrent_layers, "_FUNCTIONS", {})
    forward = Forward(wrap(model), CPU)
    assert not forward.flat
    assert "one at a time, because its logits for packed rows differ" in forward.limits[0]
    batch = build_micro_batch([Example(tuple(SEGMENTS))], CPU)
    loss = forward.head.sum_loss(forward.features(batch), batch.label_N)
    assert loss.item() == pytest.approx(expected_loss(model).item(), rel=2e-6)


def test_a_small_leak_is_noticed_where_logits_seem_to_agree():
    """Half precision forgives differences in logits that are larger than what leaks."""
    model = make("llama", {}, torch.bfloat16)
    layer = model.model.layers[0]
    plain = layer.mlp.forward
    layer.mlp.forward = lambda x: plain(x) + 0.02 * x.mean(1, keepdim=True)
    forward = Forward(wrap(model, torch.bfloat16), CPU)
    assert not forward.flat
    assert "its layers let a row see the row before it" in forward.limits[0]


TURNS = {
    "phi3": {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
    },
    "llama": {
        "max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", TURNS)
def test_angles_that_depend_on_the_length_are_those_of_each_row_alone(kind):
    parts = [segment(1, 40), segment(2, 12), segment(3, 30)]
    expected = sum(expected_loss(make(kind, TURNS[kind]), [part]).item() for part in parts)
    forward = Forward(wrap(make(kind, TURNS[kind])), CPU, 40)
    assert not forward.flat
    assert (
        "rotary angles depend on the length of the row, and rows are longer than 16"
        in (forward.limits[0])
    )
    batch = build_micro_batch([Example(tuple(parts))], CPU)
    for _ in range(2):
        loss = forward.head.sum_loss(forward.features(batch), batch.label_N)
        assert loss.item() == pytest.approx(expected, rel=2e-6)
    assert Forward(wrap(make(kind, TURNS[kind])), CPU, 16).flat, "no row is long enough"


def test_a_head_of_unknown_making_is_left_to_the_model():
    model = make("llama", {})
    plain = model.forward

    def odd(**settings):
        output = plain(**settings)
        output.logits = output.logits * 1.5 + 1.0
        return output

    model.forward = odd
    expected = expected_loss(model)
    forward = Forward(wrap(model), CPU)
    assert isinstance(forward.head, FullLogitsHead)
    assert "computes its logits itself" in forward.limits[0]
    assert forward.flat
    batch = build_micro_batch([Example(tuple(SEGMENTS))], CPU)
    loss = forward.head.sum_loss(forward.features(batch), batch.label_N)
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)


def test_a_window_that_attention_is_not_told_of_is_noticed():
    model = make("mistral", {"sliding_window": 5})
    for layer in model.model.layers:
        layer.self_attn.config.sliding_window = None  # asks for none any more
    model.config.layer_types = HALF
    forward = Forward(wrap(model), CPU)
    assert not forward.flat
    assert "its layers do not pass on their sliding windows" in forward.limits[0]
