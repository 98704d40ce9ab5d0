"""Streamed layers compute what resident ones do, with few of them on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agents.errors import ExpectedError
from agents.trainer.streaming.disk_reader import DiskReader
from agents.trainer.streaming.host_memory import HostMemory
from agents.trainer.streaming.layer_files import StreamedLayerFiles
from agents.trainer.streaming.layer_stream import LayerStream
from agents.trainer.streaming.layout import fill_block, make_layout
from tests.draws import seed

CPU = torch.device("cpu")
NUM_LAYERS, WIDTH = 7, 8


class Layer(nn.Module):
    """A frozen product with a trained vector, as a layer with an adapter is."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.trained = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden * self.trained)))


@pytest.fixture
def layers():
    torch.manual_seed(seed(3))
    found = nn.ModuleList([Layer(12 if place % 3 else 16) for place in range(NUM_LAYERS)])
    for layer in found:
        layer.up.weight.requires_grad_(False)
        layer.down.weight.requires_grad_(False)
    return found


def stream_layers(layers, stream, files=None, in_files=(), first=0):
    count = len(layers)
    for place in (number % count for number in range(first, first + count)):
        layer = layers[place]
        linears = {"up": layer.up, "down": layer.down}
        tensors = {name: linear.weight.data.clone() for name, linear in linears.items()}
        layout = make_layout(tensors, {})
        block = torch.empty(layout.num_bytes, dtype=torch.uint8)
        fill_block(layout, tensors, block)
        source = files.write(place, layout, block) if place in in_files else block

        def bind(views, linears=linears):
            for name, linear in linears.items():
                linear.weight.data = views[name]

        stream.add(place, layout, source, bind)
    stream.attach(dict(enumerate(layers)))


def compute(layers):
    """Return outputs and gradients of two passes, and of one without gradients between them."""
    hidden = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
    found = []
    for grows in (True, False, True):
        with torch.set_grad_enabled(grows):
            out = hidden
            for layer in layers:
                out = layer(out)
        found.append(out.detach().clone())
        if grows:
            trained = [layer.trained for layer in layers]
            found += torch.autograd.grad(out.square().sum(), trained)
    return found


def assert_same(found, expected):
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("first", [0, 3])
def test_two_slots_of_each_kind_are_enough_and_are_reused(layers, first):
    expected = compute(layers)
    stream = LayerStream(CPU, num_slots=2)
    stream_layers(layers, stream, first=first)
    sizes = {layer.up.weight.numel() for layer in layers}
    assert len({layer.up.weight.data_ptr() for layer in layers}) == 2 * len(sizes)
    assert_same(compute(layers), expected)
    assert (stream.num_layers, stream.num_resident, stream.num_from_disk) == (NUM_LAYERS, 0, 0)
    before = stream.copied_bytes
    compute(layers)
    # Each pass copies every layer, and each turn spares those that are still there: two of the
    # last kind, or one of each.
    assert before < stream.copied_bytes <= before + 5 * stream.streamed_bytes


def test_layers_that_stay_are_spread_and_can_be_given_up(layers):
    expected = compute(layers)
    stream = LayerStream(CPU, num_slots=2)
    stream_layers(layers, stream)
    for num_resident in (3, NUM_LAYERS, 0):
        stream.keep_resident(4096 * num_resident)
        assert stream.num_resident == num_resident
        assert stream.resident_bytes == 4096 * num_resident
        assert stream.streamed_bytes == 4096 * (NUM_LAYERS - num_resident)
        assert_same(compute(layers), expected)
        if num_resident == NUM_LAYERS:
            before = stream.copied_bytes
            compute(layers)
            assert stream.copied_bytes == before


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_layers_in_files_are_read_ahead(layers, tmp_path, num_blocks):
    expected = compute(layers)
    memory = HostMemory(CPU, 1 << 20, warn=lambda message, hint: None)
    reader = DiskReader(memory, 4096, num_blocks)
    stream = LayerStream(CPU, num_slots=3, reader=reader)
    stream_layers(layers, stream, StreamedLayerFiles(tmp_path, {}), in_files={0, 2, 3, 6})
    assert (stream.num_from_disk, stream.file_bytes) == (4, 4 * 4096)
    for _ in range(3):
        assert_same(compute(layers), expected)
    assert reader.read_bytes % 4096 == 0
    assert reader.bytes_per_s > 0
    stream.keep_resident(2 * 4096)  # those of the disk first
    assert stream.num_from_disk == 2
    assert_same(compute(layers), expected)
    reader.close()


def test_a_file_that_cannot_be_read_is_named(layers, tmp_path):
    memory = HostMemory(CPU, 1 << 20, warn=lambda message, hint: None)
    reader = DiskReader(memory, 4096, 2)
    stream = LayerStream(CPU, num_slots=2, reader=reader)
    files = StreamedLayerFiles(tmp_path, {})
    stream_layers(layers, stream, files, in_files={4})
    expected = compute(layers)
    path = files.find(4).path
    whole = path.read_bytes()
    path.write_bytes(whole[:-4096])
    with pytest.raises(ExpectedError, match=r"layer-0004\.safetensors: the file became shorter"):
        compute(layers)
    path.write_bytes(whole)  # the next attempt finds it whole
    assert_same(compute(layers), expected)
    reader.close()
