"""Scales and clippings are found as by AWQ's own formulas, as they are written down here."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agents.quantizers.formats import awq_by_gptqmodel as module
from agents.quantizers.formats.awq_by_gptqmodel import (
    find_clips,
    find_scales,
    mended_awq,
    pack_by_groups,
)
from agents.quantizers.formats.patching import replaced
from agents.quantizers.proof.reference_model import round_to_nearest
from tests.draws import seed

GROUP = 32


def round_into(source: Tensor, target: Tensor) -> None:
    target.copy_(round_to_nearest(source.flatten(1), 4, GROUP).view_as(target))


def try_all(weight: Tensor, inputs: Tensor) -> Tensor:
    """As `_compute_best_clip` of gptqmodel 7.6 does it, with sums in float64."""
    weight = weight.view(len(weight), 1, -1, GROUP)
    inputs = inputs.double().view(1, len(inputs), -1, GROUP)
    most = weight.abs().amax(-1, keepdim=True)
    errors, bounds = [], [most * (1 - step / 20) for step in range(10)]
    for bound in bounds:
        rounded = torch.empty_like(weight)
        round_into(weight.clamp(-bound, bound), rounded)
        errors.append((inputs * (rounded.double() - weight.double())).sum(-1).pow(2).mean(1))
    best = torch.stack(errors).argmin(0)
    return torch.stack(bounds)[:, :, 0].gather(0, best[None, ..., None])[0]


@pytest.fixture
def layer() -> tuple[Tensor, Tensor]:
    """Weights with a few large ones, and inputs of which some are far larger than others."""
    draw = torch.Generator().manual_seed(seed(3))
    weight = torch.randn(320, 96, generator=draw) * 0.02
    weight[::7, ::11] *= 6
    inputs = torch.randn(400, 96, generator=draw)
    inputs[:, ::13] *= 20
    return weight, inputs


def test_they_are_those_of_the_formula(layer):
    weight, inputs = layer
    found = find_clips(weight, inputs, GROUP, round_into)
    assert found.shape == (320, 3, 1)
    wanted = try_all(weight, inputs)
    assert (found == wanted).double().mean() > 0.999
    most = weight.view(320, 3, GROUP).abs().amax(-1, keepdim=True)
    assert 0.2 < (found < most).double().mean() < 1, "some groups are clipped, not all"


def test_of_many_tokens_about_512_are_taken_evenly(layer):
    weight, inputs = layer
    told = torch.cat([inputs, torch.zeros_like(inputs)], 1).view(2, 400, 96).repeat(2, 1, 1)
    many = find_clips(weight, told, GROUP, round_into)  # 1600 tokens: each third one
    few = find_clips(weight, told.view(-1, 96)[::3], GROUP, round_into)
    assert torch.equal(many, few)


def test_the_type_of_the_weights_stays(layer):
    weight, inputs = layer
    found = find_clips(weight.bfloat16(), inputs.bfloat16(), GROUP, round_into)
    assert found.dtype == torch.bfloat16


def test_a_name_is_replaced_for_a_while_and_has_to_be_there():
    class Package:
        name = "theirs"

    def fail() -> None:
        with replaced(Package, "name", "ours"):
            assert Package.name == "ours"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert Package.name == "theirs"
    with pytest.raises(AttributeError), replaced(Package, "other", 1):
        pass


class AWQProcessor:
    """Stands in for gptqmodel's, with the members that are changed."""

    def __init__(self, rotary: Any = None) -> None:
        self._rotary = rotary

    def _compute_best_clip(self) -> None: ...

    def _compute_best_scale(self, x: Any, *given: Any) -> tuple[Any, float]:
        return x, 0.5

    def _feature_kwargs_from_batch_indices(self, batch_indices: list[int]) -> dict[str, Any]:
        return {"position_ids": [[0, 1]] * len(batch_indices), "attention_mask": "mask"}

    def _get_rotary_for_device(self, device: str) -> Any:
        return self._rotary

    def _iter_module_forward_outputs(self, x: Any, module: Any, kwargs: Any) -> Iterator[Any]:
        yield self._get_rotary_for_device("cpu")(x, [0, 1])


class AwqTorchLinear:
    """The same."""

    def pack(self) -> None: ...


def keep_codes(codes: Tensor, zeros: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Stand in for its `pack_awq`: a row of words for each row of codes, which stay as they are."""
    assert bits == 4
    return codes, zeros


@pytest.fixture
def gptqmodel(stand_in):
    stand_in(
        {
            "gptqmodel.looper.awq_processor": {"AWQProcessor": AWQProcessor},
            "gptqmodel.nn_modules.qlinear.torch_awq": {"AwqTorchLinear": AwqTorchLinear},
            "gptqmodel.quantization.awq.utils.packing_utils": {"pack_awq": keep_codes},
        }
    )


@pytest.mark.usefixtures("gptqmodel")
def test_no_rows_of_positions_are_joined():
    """They would be as many as batches; what is read from a mask is as many as blocks."""
    with mended_awq("cpu"):
        assert AWQProcessor()._feature_kwargs_from_batch_indices([0, 1]) == {
            "attention_mask": "mask"
        }


class Gated(torch.nn.Module):
    """As the middle of a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(96, 64, bias=False) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


class Searcher:
    """Stands in for gptqmodel's processor, as far as a search asks it."""

    duo_scaling = True

    def __init__(self, hint: float | None) -> None:
        self._scale_context = SimpleNamespace(prev_scale=hint)

    def _pseudo_quantize_tensor_into(self, source: Tensor, target: Tensor) -> None:
        round_into(source, target)

    def _iter_module_forward_outputs(self, x: Tensor, module: Any, kwargs: Any) -> Iterator[Tensor]:
        yield from map(module, x.split(2))

    def _iter_reference_output_chunks(self, x: Tensor, wanted: Any) -> Iterator[Tensor]:
        yield from wanted


def try_scales(block: Gated, x: Tensor, sizes: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """As `_compute_best_scale` of gptqmodel 7.6 does it (arXiv:2306.00978, equation 5)."""
    wanted, found = block(x), []
    for step in range(20):
        scale = (sizes ** (step / 20) / (weights ** (1 - step / 20) + 1e-4)).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        other = Gated()
        for mine, its in ((other.gate, block.gate), (other.up, block.up)):
            round_into(its.weight * scale, mine.weight)
            mine.weight /= scale
        found.append((float((other(x) - wanted).double().square().mean()), scale))
    error, scale = min(found, key=lambda pair: pair[0])
    return scale, error


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("hint", [None, 0.5])
def test_scales_are_those_of_the_formula(hint, device):
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(seed(4))
    block, x = Gated(), torch.randn(7, 11, 96)
    x[..., ::13] *= 20
    sizes, weights = x.abs().mean((0, 1)), torch.rand(96) + 0.1
    before = {name: value.clone() for name, value in block.state_dict().items()}
    expected, error = try_scales(block, x, sizes, weights * (hint or 1.0))
    wanted = [chunk.clone() for chunk in block(x).split(2)]
    block.to(device)
    found, least = find_scales(
        Searcher(hint), x, weights, sizes, block, [block.gate, block.up], wanted, {}
    )
    assert torch.allclose(found, expected, rtol=1e-4)
    assert least == pytest.approx(error, rel=1e-3)
    for name, value in block.state_dict().items():
        assert torch.equal(value.cpu(), before[name])


@pytest.mark.usefixtures("gptqmodel")
def test_where_there_is_no_room_scales_are_tried_as_by_gptqmodel(monkeypatch):
    asked = []

    def find(processor: Any, x: Any, *given: Any) -> tuple[Any, float]:
        asked.append(x)
        if x == "large":
            raise torch.OutOfMemoryError
        return "found", 0.1

    monkeypatch.setattr(module, "find_scales", find)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with mended_awq("cuda:0"):
        assert AWQProcessor()._compute_best_scale("small", 1) == ("found", 0.1)
        assert AWQProcessor()._compute_best_scale("large", 1) == ("large", 0.5)
    with mended_awq("cpu"):
        assert AWQProcessor()._compute_best_scale("small", 1) == ("small", 0.5)
    assert asked == ["small", "large"]


def test_weights_are_as_before_when_memory_runs_out():
    block = Gated()
    before = block.gate.weight.clone()

    def fail(source: Tensor, target: Tensor) -> None:
        target.zero_()
        raise torch.OutOfMemoryError

    processor = Searcher(None)
    processor._pseudo_quantize_tensor_into = fail
    x = torch.randn(2, 3, 96)
    with pytest.raises(torch.OutOfMemoryError):
        find_scales(
            processor, x, torch.ones(96), torch.ones(96), block, [block.gate], [block(x)], {}
        )
    assert torch.equal(block.gate.weight, before)


class OneKind(torch.nn.Module):
    """Turns all layers alike."""

    def forward(self, x: str, position_ids: list[int]) -> str:
        return x


class TwoKinds(torch.nn.Module):
    """As that of Gemma 3."""

    def forward(self, x: str, position_ids: list[int], layer_type: str) -> str:
        return f"{x} {layer_type}"


@pytest.mark.usefixtures("gptqmodel")
@pytest.mark.parametrize(
    ("rotary", "expected"), [(OneKind(), "x"), (TwoKinds(), "x sliding_attention")]
)
def test_queries_are_turned_as_the_kind_of_their_layer_says(rotary, expected):
    attention = SimpleNamespace(layer_type="sliding_attention")
    with mended_awq("cpu"):
        found = AWQProcessor(rotary)._iter_module_forward_outputs("x", attention, {})
        assert list(found) == [expected]


class Packed(torch.nn.Module):
    """Stands in for a layer of gptqmodel's."""

    bits, group_size, in_features = 4, GROUP, 96

    def pack(self, linear: Any, scales: Tensor, zeros: Tensor) -> None:
        """Round as `AwqTorchLinear.pack` of gptqmodel 7.6 does, and keep the words unpacked."""
        steps, whole = scales.t().contiguous(), zeros.t().contiguous()
        moved = whole * steps
        columns = [
            torch.round((linear.weight.data[:, at] + moved[at // self.group_size])
                        / steps[at // self.group_size])
            for at in range(self.in_features)
        ]  # fmt: skip
        self.register_buffer("scales", steps)
        if linear.bias is not None:
            self.register_buffer("bias", linear.bias.clone())
        else:
            self.bias = None
        self.register_buffer("qweight", torch.stack(columns).int())
        self.register_buffer("qzeros", whole.int())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_groups_packed_one_by_one_are_the_whole(has_bias, dtype, device):
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(seed(5))
    linear = torch.nn.Linear(96, 4000, bias=has_bias, dtype=dtype)
    scales = (torch.rand(4000, 3) * 0.01 + 0.001).half()
    zeros = torch.randint(0, 15, (4000, 3)).half()
    whole, divided = Packed(), Packed()
    whole.pack(linear, scales, zeros)
    pack_by_groups(keep_codes, divided, linear, scales, zeros, device)
    assert divided.state_dict().keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(divided.state_dict()[name], value), name
    assert len(whole.state_dict()["qweight"].unique()) > 10
    assert (divided.bias is None) == (not has_bias)
