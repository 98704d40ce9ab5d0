"""On a GPU: compiled layers, offloading and dequantized weights change no number that matters.

The model is small and its sequences are long enough for several blocks of FlashAttention, whose
ordinary backward pass adds up in an order that changes from run to run.
"""

import numpy as np
import pytest
import torch

from agents.contract.layer_plan import LayerPlan
from agents.contract.spec import AdapterSpec
from agents.trainer.data.examples import BatchPart, Example, Segment
from agents.trainer.execution.activation_offload import Offloader
from agents.trainer.execution.cuda_graphs import CudaRecorder, GraphReplayer
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.execution.shapes import ShapeGrid
from agents.trainer.kernels import compiling, nf4
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import build_trained_model, load_model, load_tokenizer
from agents.trainer.objectives.sft import Supervised
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.rank.device import on_own_stream
from tests.agents.trainer.execution.all_examples import AllExamples
from tests.agents.trainer.ranks import make_spec, make_tiny_model
from tests.draws import seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # those of torch.compile about the card
]
NUM_LAYERS = 4
PLANS = {
    "keep": LayerPlan(),
    "recompute": LayerPlan(num_recomputed=NUM_LAYERS),
    "move": LayerPlan(num_moved=NUM_LAYERS),
    "mixed": LayerPlan(num_recomputed=2, num_moved=1),
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("wide"),
        NUM_LAYERS,
        hidden_size=512,
        intermediate_size=1408,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def make_part(*lengths):
    examples = []
    draw = np.random.default_rng(seed(5))
    for row, length in enumerate(lengths, 1):
        ids = draw.integers(6, 700, length).astype(np.int32)
        examples.append(Example((Segment(row, ids, np.arange(length) % 3 != 0),)))
    count = len(lengths)
    return BatchPart(examples=examples, places=[0] * count, positions=list(range(count)))


UNEQUAL, EQUAL = make_part(1500, 700, 90), make_part(1024, 1024)


@pytest.fixture
def make_executor(wide_model):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def make(kind, plan, *, compiled=True, fast=True, precision="bf16", dora=False):
        device = torch.device("cuda", 0)
        if kind == "qlora":
            pytest.importorskip("bitsandbytes")
        adapter = AdapterSpec(kind=kind, rank=8, dropout=0.1, dora=dora)
        spec = make_spec(precision=precision, adapter=adapter)
        tokenizer, plain = load_tokenizer(wide_model)
        base = load_model(spec, wide_model, device)
        model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=device)
        forward = Forward(model, device)
        if fast:
            count = nf4.register(model.module)
            assert count == (7 * NUM_LAYERS if kind == "qlora" else 0)
            forward.fuse_linear()
            assert sum(hasattr(m, "fused_set") for m in model.module.modules()) == 7 * NUM_LAYERS
        flat = FlatParameters(model.named_parameters(), device)
        draw = torch.Generator().manual_seed(seed(3))
        flat.values.add_(0.02 * torch.randn(len(flat.values), generator=draw).to(device))
        fixed = [*model.module.parameters(), *model.module.buffers()]
        layers = LayerStack(
            model, compiled=compiled, offloader=Offloader(device, fixed, capacity_bytes=2 << 30)
        )
        layers.set(plan)
        torch.use_deterministic_algorithms(True, warn_only=True)
        compiling.fix_settings()
        return Executor(
            model,
            flat,
            Supervised(forward),
            device,
            layers=layers,
            micro_tokens=1 << 20,
            warn=lambda message, hint: None,
            beat=lambda: None,
        )

    yield make
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


def gradients(executor, part):
    executor.add_gradients(part)
    return executor._flat.gradients.clone()


def read_asked_bytes():
    """Return what tensors asked for: the pieces that they got are up to a MiB larger each."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def difference(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("kind", "dora"), [("lora", False), ("qlora", False), ("lora", True), ("qlora", True)]
)
@pytest.mark.parametrize("part", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_compiled_gradients_are_as_near_to_exact_ones_as_plain_ones(
    make_executor, kind, dora, part
):
    uncompiled = {"compiled": False, "fast": False, "dora": dora}
    exact = gradients(make_executor(kind, LayerPlan(), precision="fp32", **uncompiled), part)
    plain = gradients(make_executor(kind, LayerPlan(), **uncompiled), part)
    error = difference(plain, exact)
    assert 0 < error < 0.1
    print(f"\n{kind}: plain bf16 {error:.2e} from fp32")
    for name, plan in PLANS.items():
        found = difference(gradients(make_executor(kind, plan, dora=dora), part), exact)
        print(f"  compiled, {name}: {found:.2e}")
        assert found < 1.5 * error


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_moved_activations_come_back_to_the_bit(make_executor, kind, compiled):
    kept = make_executor(kind, LayerPlan(), compiled=compiled)
    moved = make_executor(kind, PLANS["move"], compiled=compiled)
    for part in (UNEQUAL, EQUAL, UNEQUAL):
        assert torch.equal(gradients(moved, part), gradients(kept, part))
    offloader = moved.layers.offloader
    assert offloader.max_layer_bytes > 2000 * 512 * 2 * 5


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gradients_are_the_same_every_time(make_executor, plan):
    executor = make_executor("lora", plan)
    for part in (UNEQUAL, EQUAL):
        first = gradients(executor, part)
        assert all(torch.equal(gradients(executor, part), first) for _ in range(5))


def test_weights_are_dequantized_bit_equal(make_executor):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    executor = make_executor("qlora", LayerPlan())
    layers = [m for m in executor._model.module.modules() if hasattr(m, "nf4_packed")]
    for layer in layers[:7]:
        weight = bitsandbytes.functional.dequantize_4bit(
            layer.weight.data, layer.weight.quant_state
        )
        assert torch.equal(nf4.dequantize(layer), weight)


def test_weights_kept_dequantized_give_equal_bits(make_executor):
    executor = make_executor("qlora", PLANS["mixed"])
    expected = gradients(executor, EQUAL)
    layers = [m for m in executor._model.module.modules() if nf4.is_registered(m)]
    packed = [layer.nf4_packed.clone() for layer in layers]
    before, asked_before = torch.cuda.memory_allocated(), read_asked_bytes()
    for _ in range(2):
        executor.layers.dequantize(20 << 20)
        assert 0 < executor.layers.dequantized_bytes <= 20 << 20
        more = read_asked_bytes() - asked_before
        assert abs(more - executor.layers.dequantized_bytes) < 1 << 20
        assert not layers[0].nf4_packed.untyped_storage().nbytes()
        assert torch.equal(gradients(executor, EQUAL), expected)
        executor.layers.drop_dequantized()
        assert torch.cuda.memory_allocated() <= before
        assert torch.equal(gradients(executor, EQUAL), expected)
        assert all(torch.equal(m.nf4_packed, old) for m, old in zip(layers, packed, strict=True))


def test_packed_weights_of_decomposed_adapters_are_released_as_well(make_executor):
    executor = make_executor("qlora", LayerPlan(), dora=True)
    layers = [m for m in executor._model.module.modules() if nf4.is_registered(m)]
    expected = gradients(executor, EQUAL)
    executor.layers.dequantize(20 << 20)
    assert executor.layers.dequantized_bytes > 0
    assert not layers[0].nf4_packed.untyped_storage().nbytes()
    assert torch.equal(gradients(executor, EQUAL), expected)


def test_moving_leaves_less_on_the_card(make_executor):
    peaks = {}
    for name in ("keep", "move", "recompute"):
        executor = make_executor("lora", PLANS[name])
        gradients(executor, EQUAL)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(executor, EQUAL)
        peaks[name] = torch.cuda.max_memory_allocated() - before
        del executor
    print({name: f"{peak / 2**20:.0f} MiB" for name, peak in peaks.items()})
    assert peaks["move"] < 0.9 * peaks["keep"]
    assert peaks["recompute"] < peaks["keep"]


CHAT = [make_part(*lengths) for lengths in ((700, 90, 33, 310), (512, 401, 12), (64, 900, 120))]
DIFFERENT = make_part(1024, 1024, 700, 90, 33, 310, 128, 500)


DEVICE = torch.device("cuda", 0)


def let_repeat(executor, micro_tokens=1280, recorder=CudaRecorder):
    executor.micro_tokens = micro_tokens
    executor.grid = ShapeGrid(AllExamples(DIFFERENT.examples), 1024)
    executor.is_repeating = True
    executor.replayer = GraphReplayer(executor._model.clock, recorder(torch.device("cuda", 0)))


class Never(CudaRecorder):
    """Records nothing, so that every pass is launched."""

    def record(self, work):
        raise RuntimeError("it is not recorded")


@on_own_stream(DEVICE)
def compare_replayed(plain, replaying, exact):
    let_repeat(plain, recorder=Never)
    let_repeat(replaying)
    exact.micro_tokens = 1280
    for part in (*CHAT, UNEQUAL, *CHAT, EQUAL, *CHAT):
        found = gradients(replaying, part)
        assert torch.equal(found, gradients(plain, part))
        assert torch.equal(replaying.sums, plain.sums)
        assert difference(found, gradients(exact, part)) < 0.02
        assert replaying.sums[0].item() == pytest.approx(exact.sums[0].item(), rel=2e-3)
    assert replaying.replayer.num_replayed > 6 > replaying.replayer.num_graphs
    assert plain.replayer.num_graphs == 0
    assert replaying.held_bytes > 0
    replaying.evaluate(UNEQUAL)
    plain.evaluate(UNEQUAL)
    assert torch.equal(replaying.sums, plain.sums)
    assert torch.equal(gradients(replaying, CHAT[0]), gradients(plain, CHAT[0]))


@pytest.mark.parametrize("plan", PLANS)
def test_replayed_micro_batches_give_the_same_bits(make_executor, plan):
    # Made before the stream is another one: a model is loaded on the default stream.
    compare_replayed(*(make_executor("qlora", PLANS[plan]) for _ in range(3)))


@pytest.mark.parametrize("fault", ["waits", "memory"])
def test_a_recording_that_fails_gives_all_memory_back(make_executor, fault):
    let_recordings_fail(make_executor("lora", PLANS["keep"]), fault)


@on_own_stream(DEVICE)
def let_recordings_fail(executor, fault):
    let_repeat(executor)
    expected = gradients(executor, CHAT[0])  # launched
    executor.drop_graphs()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    compute, hoard = executor._objective.compute, []

    def fail(*args):
        loss, sums = compute(*args)
        if torch.cuda.is_current_stream_capturing():
            if fault == "waits":
                loss.item()
            while True:
                hoard.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
        return loss, sums

    executor._objective.compute = fail
    for _ in range(3):
        assert torch.equal(gradients(executor, CHAT[0]), expected)
    for part in (CHAT[1], CHAT[2]) * 2:  # further shapes are tried after the first has failed
        hoard.clear()
        gradients(executor, part)
    hoard.clear()
    assert executor.replayer.num_graphs == 0
    assert (executor.replayer.failure is not None) == (fault == "waits")
    executor._objective.compute = compute
    executor.drop_graphs()
    # Where memory ran out, workspaces of libraries were given back, too.
    assert torch.cuda.memory_allocated() <= allocated
    assert torch.cuda.memory_reserved() <= reserved
    for _ in range(3):
        assert torch.equal(gradients(executor, CHAT[0]), expected)
    assert executor.replayer.num_graphs == 1
