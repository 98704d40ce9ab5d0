"""Models with streamed layers compute what whole ones do, wherever the layers are kept."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.trainer.model import fused_linear, layer_loading, layer_store
from agents.trainer.model.forward import Forward
from agents.trainer.model.layer_holdings import LayerHoldings
from agents.trainer.model.layer_loading import find_layers
from agents.trainer.model.layer_store import StreamedLayers
from agents.trainer.model.micro_batch import build_micro_batch
from agents.trainer.model.model import build_trained_model, load_model
from agents.trainer.streaming.host_memory import HostMemory
from agents.trainer.streaming.layer_files import StreamedLayerFiles
from agents.trainer.streaming.layer_stream import LayerStream
from tests.agents.trainer.execution.test_layers import make_part
from tests.agents.trainer.model.mixtures import save_mixture
from tests.agents.trainer.ranks import make_spec, make_tiny_model
from tests.draws import seed

CPU = torch.device("cpu")
IDS = (torch.arange(23) * 7 % 90 + 3)[None]
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


class PoisonedStream(LayerStream):
    """Whose slots are worth nothing as soon as a forward pass has left the layer."""

    def _end_forward(self, place, module, args, output):
        super()._end_forward(place, module, args, output)
        for layer in self._order:
            layer.slot.block.fill_(255)  # not-a-number in every type
            layer.slot.held = None


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Dense layers that are all alike, and a mixture whose first layer is dense."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"num_layers": 5, "hidden_size": 64, "intermediate_size": 128}
    return {
        "llama": make_tiny_model(folder / "llama", **sizes),
        "glm4_moe": save_mixture(folder / "glm4", "glm4_moe"),
    }


@pytest.fixture(scope="module")
def packed(models, tmp_path_factory):
    """Return a folder whose linear layers are in NF4 already, for another type than the run's."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float16,
    )
    path = tmp_path_factory.mktemp("packed")
    AutoModelForCausalLM.from_pretrained(
        models["llama"], quantization_config=settings, dtype=torch.float32
    ).save_pretrained(path)
    return path


def make_run(kind):
    return make_spec(adapter=AdapterSpec(kind=kind, rank=4, alpha=8), precision="fp32")


def compute(spec, base, stream=None):
    """Return loss and gradients of the adapters over some tokens."""
    model = build_trained_model(
        spec, base, None, plain_template=False, device=CPU, stream=stream
    ).module
    trained = [one for one in model.parameters() if one.requires_grad]
    with torch.no_grad():
        for number, one in enumerate(trained):
            draw = torch.Generator().manual_seed(seed(number))
            one.copy_(torch.randn(one.shape, generator=draw) * 0.1)
    found = []
    for _ in range(2):
        logits = model(input_ids=IDS, use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], IDS[0, 1:])
        found += [loss, *torch.autograd.grad(loss, trained, allow_unused=True)]
    return [one for one in found if one is not None]


def load_streamed(spec, path, folder, budget_bytes, messages, **settings):
    """Load a model with all layers streamed; return it, the stream and the host memory."""
    memory = HostMemory(CPU, budget_bytes, warn=lambda message, hint: messages.append(message))
    store = StreamedLayers(
        CPU,
        StreamedLayerFiles(folder, {}),
        memory,
        warn=lambda message, hint: messages.append(message),
        report=lambda done, total: None,
        **{"keeps_files": spec.adapter.kind == "qlora", **settings},
    )

    def choose(outline):
        return LayerHoldings(layers=("streamed",) * outline.num_layers)

    base = load_model(spec, path, CPU, choose_layers=choose, open_store=lambda: store)
    return base, store.finish(), memory


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "lora"),
        ("glm4_moe", "lora"),
        pytest.param("llama", "qlora", marks=needs_bitsandbytes),
        pytest.param("glm4_moe", "qlora", marks=needs_bitsandbytes),
    ],
)
def test_streamed_layers_compute_as_resident_ones(models, family, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_store, "LayerStream", PoisonedStream)
    spec, path = make_run(kind), models[family]
    expected = compute(spec, load_model(spec, path, CPU))
    read = []
    convert = layer_loading.convert_and_load_state_dict_in_model
    monkeypatch.setattr(
        layer_loading,
        "convert_and_load_state_dict_in_model",
        lambda *args: read.append(args) or convert(*args),
    )
    messages = []
    # First all layers in memory, then too little of it for any: the file of each is read.
    for budget_bytes, num_from_disk in ((1 << 30, 0), (0, None)):
        base, stream, _ = load_streamed(spec, path, tmp_path, budget_bytes, messages)
        num_layers = len(find_layers(base))
        expected_from_disk = num_layers if num_from_disk is None else num_from_disk
        assert (stream.num_layers, stream.num_from_disk) == (num_layers, expected_from_disk)
        found = compute(spec, base, stream)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        if stream.reader is not None:
            stream.reader.close()
    # Quantized layers were written the first time, and not made again.
    assert len(read) == (num_layers if kind == "qlora" else 2 * num_layers)
    assert messages == []


@needs_bitsandbytes
def test_damaged_files_are_made_again_and_a_full_disk_stops_no_run(models, tmp_path, monkeypatch):
    spec, path = make_run("qlora"), models["llama"]
    expected = compute(spec, load_model(spec, path, CPU))
    messages = []

    def check(budget_bytes):
        base, stream, memory = load_streamed(spec, path, tmp_path, budget_bytes, messages)
        found = compute(spec, base, stream)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        if stream.reader is not None:
            stream.reader.close()
        return memory

    write = StreamedLayerFiles.write

    def write_few(files, place, *layer):
        if place == 2:
            raise ExpectedError("The disk is full: writing a layer.", "Free some space")
        return write(files, place, *layer)

    with monkeypatch.context() as patched:
        patched.setattr(StreamedLayerFiles, "write", write_few)
        left_bytes = check(1 << 30).budget_bytes
    (message,) = messages
    assert "cannot be kept: The disk is full" in message
    (folder,) = tmp_path.iterdir()
    assert sorted(one.name[:10] for one in folder.glob("layer*")) == ["layer-0000", "layer-0001"]
    for budget_bytes in (1 << 30, 0):
        messages.clear()
        check(budget_bytes)
        assert messages == []
        whole = {one.name: one.read_bytes() for one in folder.iterdir()}
        for number in (1, 3):
            with (folder / f"layer-{number:04}.safetensors").open("r+b") as file:
                file.seek(20_000)
                file.write(b"damage")
        memory = check(budget_bytes)
        assert budget_bytes == 0 or memory.budget_bytes == left_bytes
        (message,) = messages
        assert "layer-0001.safetensors is not what was written there" in message
        assert "made again (and 1 more) from the model's files" in message
        assert {one.name: one.read_bytes() for one in folder.iterdir()} == whole


@needs_bitsandbytes
def test_weights_that_are_in_4_bits_already_are_trained_on_as_they_are(models, packed, tmp_path):
    spec = make_run("qlora")
    expected = compute(spec, load_model(spec, models["llama"], CPU))
    whole = load_model(spec, packed, CPU)
    state = whole.model.layers[0].mlp.up_proj.weight.quant_state
    assert (state.dtype, state.quant_type) == (torch.float32, "nf4")
    streamed, stream, _ = load_streamed(spec, packed, tmp_path, 1 << 30, [])
    for found in (compute(spec, whole), compute(spec, streamed, stream)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def compute_steps(spec, base, stream=None):
    """Return features and gradients of fused layers before and after a step of the adapters."""
    model = build_trained_model(spec, base, None, plain_template=False, device=CPU, stream=stream)
    draw = torch.Generator().manual_seed(seed(4))
    for _, parameter in model.named_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    forward = Forward(model, CPU)
    forward.fuse_linear()
    copies = fused_linear.collect_copies(model.module, stream)
    batch = build_micro_batch(make_part(20, 31).examples, CPU)
    found = []
    for _ in range(2):
        copies.refresh()
        model.clock.set([4, 5], batch.lengths, batch.num_tokens, CPU)
        # Two passes of one step: the second has the lengths of the first.
        passes = [forward.features(batch) for _ in range(2)]
        assert torch.equal(*passes)
        passes[1].square().sum().backward()
        model.clock.clear()
        for _, parameter in model.named_parameters():
            found.append(parameter.grad)
            parameter.data -= 0.01 * parameter.grad.sign()
            parameter.grad = None
        found.append(passes[1].detach())
    return found


def test_lengths_are_measured_while_the_weights_of_a_layer_are_there(models, tmp_path, monkeypatch):
    adapter = AdapterSpec(rank=4, alpha=8, dropout=0.1, dora=True)
    spec, path = make_spec(adapter=adapter, precision="bf16"), models["llama"]
    expected = compute_steps(spec, load_model(spec, path, CPU))
    monkeypatch.setattr(layer_store, "LayerStream", PoisonedStream)
    base, stream, _ = load_streamed(spec, path, tmp_path, 1 << 30, [])
    found = compute_steps(spec, base, stream)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
