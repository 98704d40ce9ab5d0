"""What the head, the last norm and the optimizer need is what PyTorch makes, tensor by tensor."""

from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from agents.trainer.model import head as head_module
from agents.trainer.model.head import Head
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.optim.optimizer import make_optimizer
from app.planning.memory import forecast, phases
from app.planning.memory.gpu import GpuMemory
from app.planning.shape.model_shape import read_shape
from tests.app.planning.live_bytes import LiveBytes

# Too old for Triton: no kernels, nothing compiled, as on the CPU that these tests measure on.
OLD = GpuMemory(total_bytes=2**34, capability=(6, 1))
HIDDEN, WORDS, TOKENS = 256, 512, 2048
SHAPE = read_shape(
    {"model_type": "llama", "vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": 512,
     "num_hidden_layers": 2, "num_attention_heads": 4}
)  # fmt: skip


def make_spec(kind):
    return RunSpec(
        model="m", data=DataSpec(train="d"), adapter=AdapterSpec(kind=kind), precision="bf16"
    )


@pytest.mark.parametrize("objective", ["sft", "dpo"])
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("chunk_values", [WORDS * 64, WORDS * 1024])
def test_the_end_of_the_model_needs_what_is_said(kind, chunk_values, objective, monkeypatch):
    monkeypatch.setattr(head_module, "_CHUNK_VALUES", chunk_values)
    monkeypatch.setattr(phases, "_CHUNK_VALUES", chunk_values)
    full = kind == "full"
    dtype = torch.float32 if full else torch.bfloat16
    norm = LlamaRMSNorm(HIDDEN).to(dtype).requires_grad_(full)
    weight = torch.randn(WORDS, HIDDEN, dtype=dtype, requires_grad=full)
    head = Head(weight, None, 1.0, None, torch.bfloat16)
    source = torch.randn(1, TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    label, place = torch.randint(WORDS, (TOKENS,)), torch.arange(TOKENS)
    with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16):
        hidden = source * 1
        kept = live.now if full else 0  # the fp32 stream saves its output; a bf16 one is let go
        features = norm(hidden)[0].index_select(0, place)
        del hidden
        live.peak = live.now
        if objective == "dpo":
            loss = head.log_probabilities(features, label).sum()
        else:
            loss = head.sum_loss(features, label)
        in_loss = live.peak - kept
        del features
        live.peak = live.now
        loss.backward()
        in_norm = live.peak - kept
    expected_loss, expected_norm = phases._list_ends(SHAPE, make_spec(kind), TOKENS, OLD)
    if objective == "dpo":  # its logits are computed again in the backward pass
        assert max(in_loss, in_norm) == pytest.approx(max(expected_loss, expected_norm), rel=0.05)
        return
    assert in_loss == pytest.approx(expected_loss, rel=0.02)
    assert in_norm == pytest.approx(expected_norm, rel=0.01)


def test_a_step_of_adamw_needs_two_more_tensors():
    spec = make_spec("lora")
    values = torch.nn.Parameter(torch.zeros(1 << 16, 4))
    flat = FlatParameters([("values", values)], torch.device("cpu"))
    optimizer = make_optimizer(spec, flat)
    flat.gradients.fill_(1.0)
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    expected = phases.find_step_moment(spec, flat.values.numel()).step_bytes
    assert live.peak == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_the_state_of_an_optimizer_is_as_large_as_said(name):
    if name != "adamw":
        pytest.importorskip("bitsandbytes")
    spec = replace(make_spec("lora"), optimizer=name)
    values = torch.nn.Parameter(torch.zeros(1 << 14, 16))
    flat = FlatParameters([("values", values)], torch.device("cpu"))
    optimizer = make_optimizer(spec, flat)
    flat.gradients.fill_(1.0)
    optimizer.step()
    found = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for key, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and "qmap" not in key
    )
    assert found == forecast._STATE_BYTES[name] * values.numel()
