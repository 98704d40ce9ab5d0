"""Columns are rounded as GPTQ has it: each error is made good by the columns that follow."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from agents.quantizers.formats.column_rounding import round_columns, round_plainly
from agents.quantizers.formats.hessian import add_squares, factor_inverse, reorder
from app.artifacts.estimates.rates import GPTQ_INPUT_BYTES, GPTQ_WEIGHT_BYTES
from tests.agents.quantizers.formats.test_hessian import factor_usually, make_hessian
from tests.draws import seed


class Scales:
    """Symmetric scales of 4 bits, as gptqmodel finds them."""

    def __init__(self) -> None:
        self.maxq = torch.tensor(15)
        self.scale = self.zero = torch.zeros(1)

    def find_params(self, x: Tensor, weight: bool = False) -> None:
        assert weight
        self.scale = 2 * x.abs().amax(1, keepdim=True).clamp(min=1e-6) / self.maxq
        self.zero = torch.full_like(self.scale, 8.0)


TIE = 1e-4
"""Distance from the middle between two codes within which float32 may choose either, in codes."""


def round_literally(weight: Tensor, factor: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return what Algorithm 1 of arXiv:2210.17323 gives in float64, with blocks of 128 columns.

    Scales are of the weights as they are when their block begins. The second tensor says of each
    row whether it has a tie, which changes all columns that follow it.
    """
    weight = weight.double()
    rounded = torch.zeros_like(weight)
    has_tie = torch.zeros(len(weight), dtype=torch.bool)

    def code(values: Tensor) -> Tensor:
        return torch.clamp(torch.round(values) + 8, 0, 15)

    for column in range(weight.shape[1]):
        if column % 128 == 0:
            at_begin = weight.clone()
        if column % group == 0:
            scale = 2 * at_begin[:, column : column + group].abs().amax(1) / 15
        wanted = weight[:, column] / scale
        has_tie |= code(wanted - TIE) != code(wanted + TIE)
        rounded[:, column] = scale * (code(wanted) - 8)
        error = (weight[:, column] - rounded[:, column]) / factor[column, column]
        weight[:, column:] -= torch.outer(error, factor[column, column:])
    return rounded, has_tie


@pytest.mark.parametrize(("num_inputs", "group"), [(384, 128), (320, 64), (512, 256)])
def test_weights_are_those_of_the_algorithm(num_inputs, group):
    made = make_hessian(num_inputs)
    draw = torch.Generator().manual_seed(seed(1))
    weight = torch.randn(40, num_inputs, generator=draw)
    wanted, has_tie = round_literally(weight, factor_usually(made, 0.05), group)
    before = weight.clone()
    sizes = []

    def round_block(*given):
        sizes.append(given[0].shape[1])
        return round_plainly(*given)

    squares = made.clone()
    factor_inverse(made, 0.05, 0.01)
    done = round_columns(weight, made, group, Scales(), torch.float32, round_block)
    assert has_tie.double().mean() < 0.4
    assert (done.weight - wanted)[~has_tie].abs().max() < 1e-5
    assert set(sizes) == {128}
    assert len(sizes) == num_inputs // 128
    assert len(done.scales) == len(done.zeros) == -(-num_inputs // group)

    def miss(rounded: Tensor) -> float:
        off = rounded - before
        return float((off @ squares * off).sum())

    plain = torch.cat([_round_alone(part) for part in before.split(group, dim=1)], dim=1)
    assert miss(done.weight) < 0.85 * miss(plain)
    assert done.loss > 0


def _round_alone(part: Tensor) -> Tensor:
    scales = Scales()
    scales.find_params(part, weight=True)
    codes = torch.clamp(torch.round(part / scales.scale) + scales.zero, 0, 15)
    return scales.scale * (codes - scales.zero)


@pytest.mark.gpu
def test_a_layer_of_a_70b_fits_a_card_of_12_gb():
    """The widest layer, 28,672 inputs and 8,192 outputs, beside a whole decoder layer and rows."""
    device, num_inputs, num_outputs = torch.device("cuda:0"), 28672, 8192
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(11 * 2**30 / total, device)
    try:
        print(_play_widest_layer(device, num_inputs, num_outputs))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()


def _play_widest_layer(device: torch.device, num_inputs: int, num_outputs: int) -> str:
    torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(seed(1))
    beside = torch.empty(1_711_276_032 // 2, dtype=torch.bfloat16, device=device)
    started = time.monotonic()
    sums = torch.zeros(num_inputs, num_inputs, device=device)
    for _ in range(128):
        rows = torch.randn(512, num_inputs, device=device, dtype=torch.bfloat16)
        add_squares(sums, rows)
    sums.mul_(2 / (128 * 512))
    seconds = [time.monotonic() - started]
    order = torch.randperm(num_inputs, device=device)
    reorder(sums, order)
    assert factor_inverse(sums, 0.05, 0.01) == 0.05
    torch.cuda.synchronize()
    seconds.append(time.monotonic() - started)
    weight = torch.randn(num_outputs, num_inputs, device=device, dtype=torch.bfloat16)
    wide = weight.float()[:, order]
    with torch.inference_mode():
        done = round_columns(wide, sums, 128, Scales(), torch.bfloat16)
    rounded = done.weight[:, order.argsort()]
    peak = torch.cuda.max_memory_allocated(device) - beside.nbytes - weight.nbytes
    off = (rounded - weight).float().norm() / weight.float().norm()
    assert off < 0.2
    forecast = 4 * num_inputs**2
    forecast += GPTQ_WEIGHT_BYTES * weight.numel() + GPTQ_INPUT_BYTES * num_inputs
    assert peak <= forecast
    seconds.append(time.monotonic() - started)
    return f"peak {peak:,} of {forecast:,} bytes, seconds {[round(one, 1) for one in seconds]}"
