"""Distances between models: zero to itself, larger for more damage, and blind to no direction."""

import math

import pytest
import torch

from agents.errors import ExpectedError
from agents.quantizers.inference.models import continue_prompts, find_device
from agents.quantizers.proof.compare import ModelPredictor, measure, remember
from agents.quantizers.proof.reference_model import round_to_nearest, round_weights
from agents.quantizers.proof.verdict import Proof
from tests.agents.small_disk import small_disk
from tests.agents.trainer.ranks import DEMO
from tests.draws import seed

ROWS = [(1, 4, 9, 33, 2), (1, 7), (5,)]


class Table:
    """Predicts the same words whatever came before."""

    def __init__(self, *shares):
        self.logs_V = torch.tensor(shares).log()

    def predict(self, row):
        return self.logs_V.expand(len(row) - 1, -1)


def test_the_distance_is_that_of_the_formula(tmp_path):
    rows = [(0, 1, 2, 1), (2, 0)]
    reference = remember(Table(0.5, 0.25, 0.25), rows, tmp_path / "logits")
    assert reference.num_tokens == 4
    assert (tmp_path / "logits").stat().st_size == 4 * 3 * 2
    found = measure(Table(0.25, 0.25, 0.5), rows, reference)
    assert found.kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), rel=1e-3)
    assert found.top1 == 0
    assert found.perplexity == pytest.approx(math.exp((math.log(4) * 3 + math.log(2)) / 4))
    same = measure(Table(0.5, 0.25, 0.25), rows, reference)
    assert same.kl < 1e-6
    assert (same.top1, same.perplexity) == (1, pytest.approx(reference.perplexity))


def test_words_that_a_format_adds_do_not_count(tmp_path):
    rows = [(0, 1, 1)]
    reference = remember(Table(0.5, 0.5), rows, tmp_path / "logits")
    assert measure(Table(0.5, 0.5, 1e-9), rows, reference).kl < 1e-6


def test_nothing_to_predict_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no row of two tokens"):
        remember(Table(1.0), [(1,), ()], tmp_path / "logits")


def test_numbers_that_are_not_finite_are_no_prediction(tmp_path):
    rows, broken = [(0, 1, 1)], Table(math.nan, 0.5)
    with pytest.raises(ExpectedError, match="to be quantized predicts numbers that are not finite"):
        remember(broken, rows, tmp_path / "broken")
    reference = remember(Table(0.5, 0.5), rows, tmp_path / "logits")
    with pytest.raises(ExpectedError, match="The quantized model predicts numbers that are not"):
        measure(broken, rows, reference)


@pytest.mark.parametrize("logit", [-math.inf, -1e4])
def test_what_holds_the_text_for_impossible_is_no_prediction(tmp_path, logit):
    rows, sure = [(0, 1, 1)], Table(1.0, 1.0)
    sure.logs_V = torch.tensor([0.0, logit])
    with pytest.raises(ExpectedError, match="to be quantized predicts numbers that are not finite"):
        remember(sure, rows, tmp_path / "sure")
    reference = remember(Table(0.5, 0.5), rows, tmp_path / "logits")
    with pytest.raises(ExpectedError, match="The quantized model predicts numbers that are not"):
        measure(sure, rows, reference)


def test_a_full_disk_is_told_and_does_not_end_the_process(tmp_path):
    words = Table(*[1e-6] * 1_000_000)
    with (
        small_disk(tmp_path / "disk", 1 << 20) as disk,
        pytest.raises(ExpectedError, match="disk is full"),
    ):
        remember(words, [(0, 1, 1)], disk / "logits")


def test_coarser_weights_are_further_away(tmp_path):
    from transformers import AutoModelForCausalLM

    def load():
        return AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)

    reference = remember(ModelPredictor(load()), ROWS, tmp_path / "logits")
    distances = [measure(ModelPredictor(load()), ROWS, reference).kl]
    for bits in (8, 4, 2):
        model = load()
        head = model.get_output_embeddings().weight.clone()
        assert round_weights(model, bits) == 28
        assert torch.equal(model.get_output_embeddings().weight, head)
        distances.append(measure(ModelPredictor(model), ROWS, reference).kl)
    assert distances == sorted(distances)
    assert distances[0] < 1e-6 < distances[1]


@pytest.mark.parametrize("resident_bytes", [2_500_000, 1_000_000], ids=["most come", "all come"])
def test_weights_that_come_for_each_pass_are_judged_and_rounded_alike(tmp_path, resident_bytes):
    """As `load_model` has them, but from a disk to a CPU."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    coming = AutoModelForCausalLM.from_pretrained(
        DEMO / "model",
        dtype=torch.float32,
        device_map="auto",
        max_memory={"cpu": resident_bytes},
        offload_folder=tmp_path,
    ).eval()
    assert any(value.is_meta for value in coming.parameters())
    assert find_device(coming) == torch.device("cpu")
    (row, *_) = ROWS
    whole = ModelPredictor(plain).predict(row)
    assert torch.equal(ModelPredictor(coming).predict(row), whole)
    assert continue_prompts(coming, [row]) == continue_prompts(plain, [row])
    assert round_weights(coming) == round_weights(plain) == 28
    rounded = ModelPredictor(plain).predict(row)
    assert not torch.equal(rounded, whole)
    for _ in range(2):
        assert torch.equal(ModelPredictor(coming).predict(row), rounded)


def test_groups_are_rounded_apart_and_zero_stays_zero():
    weight = torch.randn(5, 300, generator=torch.Generator().manual_seed(seed(1)))
    weight[:, 7] = 0
    rounded = round_to_nearest(weight)
    assert (rounded[:, 7] == 0).all()
    for first in (0, 128, 256):
        part, exact = rounded[:, first : first + 128], weight[:, first : first + 128]
        span = exact.amax(1).clamp(min=0) - exact.amin(1).clamp(max=0)
        assert ((part - exact).abs().amax(1) <= span / 15 * 0.51 + span / 15 * 0.5).all()
        assert all(len(row.unique()) <= 16 for row in part)
    assert torch.equal(round_to_nearest(torch.zeros(2, 3)), torch.zeros(2, 3))


def make_proof(tmp_path, other):
    rows = [(0, 1, 2, 1), (2, 0)]
    reference = remember(Table(0.5, 0.25, 0.25), rows, tmp_path / "logits")
    return Proof(
        name="nf4",
        distance=measure(other, rows, reference),
        original_perplexity=reference.perplexity,
        control=measure(Table(0.45, 0.3, 0.25), rows, reference),
        same_answers=1.0,
        size_bytes=1,
        original_bytes=2,
        tokens_per_s=1.0,
        first_token_s=1.0,
        runtime="none",
    )


def test_the_verdict_follows_from_the_figures(tmp_path):
    good = make_proof(tmp_path, Table(0.49, 0.26, 0.25))
    assert good.keep
    bad = make_proof(tmp_path, Table(0.7, 0.1, 0.2))
    assert not bad.keep
    assert "merely rounded" in bad.problems[0]
    assert "% above the original's" in bad.problems[1]
    assert make_proof(tmp_path, Table(0.25, 0.4, 0.35)).problems, (
        "a better perplexity hides nothing"
    )
