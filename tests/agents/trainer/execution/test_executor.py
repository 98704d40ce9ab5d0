"""One rank's slice: exact in any grouping, smaller when memory runs out, recomputing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agents.contract.layer_plan import LayerPlan
from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.trainer.data.examples import BatchPart, Example, Segment
from agents.trainer.execution import executor as compute_module
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import build_trained_model, load_model, load_tokenizer
from agents.trainer.objectives.sft import Supervised
from agents.trainer.optim import flat_parameters
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.rank.device import explain_out_of_memory, is_out_of_memory
from tests.agents.trainer.ranks import make_spec

CPU = torch.device("cpu")


def sample(row, length):
    ids = np.arange(length, dtype=np.int32) * 7 % 700 + 6
    is_target = np.arange(length) % 3 != 0
    return Example((Segment(row, ids, is_target),))


SAMPLES = [sample(1, 30), sample(2, 5), sample(3, 17), sample(4, 9)]
POSITIONS = [11, 12, 13, 14]


@pytest.fixture
def make_executor(tiny_model):
    def make(micro_tokens=1000, num_recomputed=0, warnings=None, may_recompute=True, pressure=None):
        spec = make_spec(precision="fp64", adapter=AdapterSpec(rank=4, dropout=0.2))
        tokenizer, plain = load_tokenizer(tiny_model)
        base = load_model(spec, tiny_model, CPU)
        model = build_trained_model(spec, base, tokenizer, plain_template=plain, device=CPU)
        flat = FlatParameters(model.named_parameters(), CPU)
        flat.values.add_(0.01)
        layers = LayerStack(model)
        layers.set(LayerPlan(num_recomputed=num_recomputed))
        told = [] if warnings is None else warnings
        return Executor(
            model,
            flat,
            Supervised(Forward(model, CPU)),
            CPU,
            layers=layers,
            micro_tokens=micro_tokens,
            may_recompute=may_recompute,
            warn=lambda message, hint: told.append(message),
            beat=lambda: None,
            pressure=pressure,
        )

    return make


def part(samples, positions):
    return BatchPart(examples=samples, places=[0] * len(samples), positions=positions)


def gradients(executor, samples=SAMPLES, positions=POSITIONS):
    executor.add_gradients(part(samples, positions))
    return executor._flat.gradients.clone(), executor.loss_sum.item()


def assert_same(found, expected):
    error = (found[0] - expected[0]).abs().max() / expected[0].abs().max()
    assert error < 1e-12
    assert found[1] == pytest.approx(expected[1], rel=1e-12)


def test_what_stands_beside_a_row_counts_for_nothing(make_executor):
    executor = make_executor()
    together = gradients(executor)
    parts = [gradients(executor, [s], [p]) for s, p in zip(SAMPLES, POSITIONS, strict=True)]
    assert_same(together, (sum(part[0] for part in parts), sum(part[1] for part in parts)))


def test_the_loss_is_that_of_transformers(make_executor):
    executor = make_executor()
    executor.evaluate(part(SAMPLES, POSITIONS))
    expected = 0.0
    for one in SAMPLES:
        (segment,) = one.segments
        ids = torch.from_numpy(segment.ids.astype(np.int64))[None]
        labels = ids.masked_fill(~torch.from_numpy(segment.is_target)[None], -100)
        executor._model.module.get_base_model().set_attn_implementation("sdpa")
        with torch.no_grad():
            mean = executor._model.module(input_ids=ids, labels=labels).loss.item()
        expected += mean * one.num_targets
    # Transformers computes its loss in float32.
    assert executor.loss_sum.item() == pytest.approx(expected, rel=1e-6)


def test_recomputing_changes_nothing_with_dropout_on(make_executor):
    expected = gradients(make_executor())
    assert_same(gradients(make_executor(num_recomputed=1)), expected)
    assert_same(gradients(make_executor(num_recomputed=2)), expected)


def test_recomputing_is_really_on(make_executor):
    calls = []
    executor = make_executor(num_recomputed=1)
    assert (executor.layers.plan.num_recomputed, executor.recomputed_share) == (1, 0.5)
    for place, layer in enumerate(executor._model.module.get_base_model().model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, place=place: calls.append(place))
    gradients(executor)
    assert calls == [0, 1, 0], "only the first of two layers is recomputed"


def test_no_rows_give_no_gradient(make_executor):
    executor = make_executor()
    gradients(executor)
    found, loss = gradients(executor, [], [])
    assert not found.any()
    assert loss == 0.0


def test_gradients_added_at_the_end_of_a_pass_are_those_added_one_by_one(
    make_executor, monkeypatch
):
    together, loss = gradients(make_executor(micro_tokens=30))
    monkeypatch.setattr(flat_parameters, "_MAX_HELD_BYTES", 0)
    one_by_one, same_loss = gradients(make_executor(micro_tokens=30))
    assert together.any()
    assert torch.equal(together, one_by_one)
    assert loss == same_loss


def limit_memory(monkeypatch, fits):
    """Let a micro-batch run out of memory unless `fits` says otherwise."""
    add = compute_module.Executor._add

    def limited(self, batch, places, **more):
        if not fits(self, batch.lengths):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        add(self, batch, places, **more)

    monkeypatch.setattr(compute_module.Executor, "_add", limited)


def test_less_memory_means_smaller_pieces_of_the_same_batch(make_executor, monkeypatch):
    expected = gradients(make_executor())
    limit_memory(monkeypatch, lambda _, samples: len(samples) <= 2)
    warnings: list[str] = []
    executor = make_executor(warnings=warnings)
    assert_same(gradients(executor), expected)
    assert executor.micro_tokens == 30
    assert warnings == [
        "Memory ran out; training continues with at most 30 tokens at once. The batch stays the "
        "same."
    ]


def test_a_single_row_that_does_not_fit_is_recomputed_then_refused(make_executor, monkeypatch):
    expected = gradients(make_executor())
    limit_memory(
        monkeypatch,
        lambda executor, samples: executor.layers.plan.num_recomputed == 2 and len(samples) == 1,
    )
    warnings: list[str] = []
    executor = make_executor(warnings=warnings)
    assert_same(gradients(executor), expected)
    assert executor.layers.plan.num_recomputed == 2
    told = [w for w in warnings if "recomputed" in w]
    assert [w.partition(" layers")[0][-6:] for w in told] == ["1 of 2", "2 of 2"]

    limit_memory(monkeypatch, lambda executor, samples: False)
    with pytest.raises(ExpectedError, match="a single example of 30 tokens") as caught:
        gradients(make_executor())
    assert "sequence_tokens" in caught.value.hint
    with pytest.raises(ExpectedError) as caught:
        gradients(make_executor(may_recompute=False))
    assert "recompute: auto" in caught.value.hint.lower()


class Spare:
    """Layers with weights that are kept dequantized."""

    filled_bytes = 100
    stream = None

    def empty(self):
        self.filled_bytes = 0


def test_memory_to_spare_is_given_to_other_programs_once(make_executor):
    asked = iter((False, True))
    warnings: list[str] = []
    pressure = SimpleNamespace(is_high=lambda: next(asked))
    executor = make_executor(warnings=warnings, pressure=pressure)
    executor.release_memory_under_pressure()
    executor.layers = Spare()
    executor.release_memory_under_pressure()
    assert (executor.layers.filled_bytes, warnings) == (100, [])
    for _ in range(2):
        executor.release_memory_under_pressure()
    assert executor.layers.filled_bytes == 0
    (warning,) = warnings
    assert "Another program needs memory of this GPU" in warning


def test_a_model_that_does_not_fit_is_told_in_words():
    with pytest.raises(ExpectedError, match="does not fit") as caught, explain_out_of_memory(CPU):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "qlora" in caught.value.hint
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(CPU):
        raise RuntimeError("shapes do not fit")


def test_other_errors_are_not_taken_for_a_lack_of_memory(make_executor, monkeypatch):
    def broken(self, batch, places, **more):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(compute_module.Executor, "_add", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        gradients(make_executor())
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"))
