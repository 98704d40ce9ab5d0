"""Every method on one, two and three ranks: it learns, resumes to the bit, and loads elsewhere.

Nine of the 27 combinations have every pair of objective, method and number of ranks. The others are
a campaign: `.venv/bin/python -m pytest -m campaign tests/agents/trainer/test_matrix.py`.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from agents.contract.spec import AdapterSpec, CheckpointSpec, RunSpec
from agents.trainer.data.examples import Example, Segment
from agents.trainer.model.forward import Forward
from agents.trainer.model.head import Head
from agents.trainer.model.micro_batch import build_micro_batch
from agents.trainer.model.model import _keep_layout, build_trained_model, load_model, load_tokenizer
from tests.agents.trainer.model.test_forward import segment
from tests.agents.trainer.ranks import Run, make_pairs, make_spec

CPU = torch.device("cpu")
SHARES = {1: (1.0,), 2: (2.0, 1.0), 3: (3.0, 2.0, 1.0)}
RATES = {"lora": 2e-2, "qlora": 1e-2, "full": 1e-3}
NUM_STEPS = 8
CELLS = [("sft", False), ("sft", True), ("dpo", False)]


def make_run(home: Path, model: Path, kind: str, objective: str, num_ranks: int, packing: bool):
    spec = make_spec(
        objective=objective,
        packing=packing,
        adapter=AdapterSpec(kind=kind, rank=4, alpha=8, dropout=0.1),
        precision="fp32",
        batch_sequences=6,
        max_steps=NUM_STEPS,
        schedule="constant",
        warmup_share=0.0,
        learning_rate=RATES[kind],
        shares=SHARES[num_ranks],
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=NUM_STEPS // 2, keep=3),
    )
    run = Run(home, model, spec, num_ranks)
    if objective == "dpo":
        make_pairs(run.train)
    return run


def combinations():
    """Yield each objective, method and number of ranks; all but a Latin square as a campaign."""
    for row, (objective, packing) in enumerate(CELLS):
        for column, kind in enumerate(RATES):
            for num_ranks in SHARES:
                is_square = num_ranks == (row + column) % len(SHARES) + 1
                name = f"{objective}-{packing}-{kind}-{num_ranks}"
                marks = () if is_square else pytest.mark.campaign
                yield pytest.param(objective, packing, kind, num_ranks, marks=marks, id=name)


@pytest.fixture
def base_of(tiny_model, tiny_wide_model):
    return {"lora": tiny_model, "qlora": tiny_wide_model, "full": tiny_model}


@pytest.mark.parametrize(("objective", "packing", "kind", "num_ranks"), list(combinations()))
def test_it_learns_resumes_and_loads_elsewhere(
    tmp_path, base_of, objective, packing, kind, num_ranks
):
    run = make_run(tmp_path / "run", base_of[kind], kind, objective, num_ranks, packing)
    check(run, base_of[kind], tmp_path / "made")


@pytest.mark.parametrize(
    "adapter",
    [
        AdapterSpec(rank=4, dropout=0.1, dora=True),
        AdapterSpec(kind="qlora", rank=4, dropout=0.1, dora=True),
        AdapterSpec(rank=4, dropout=0.1, rslora=True, targets=("q_proj", "down_proj")),
    ],
    ids=["dora", "qlora-dora", "rslora-targets"],
)
def test_variants_of_adapters_do_so_too(tmp_path, base_of, adapter):
    base = base_of[adapter.kind]
    run = make_run(tmp_path / "run", base, adapter.kind, "sft", 2, packing=False)
    run.spec = replace(run.spec, adapter=adapter)
    check(run, base, tmp_path / "made")


def check(run: Run, base: Path, copied: Path) -> None:
    """Train, resume, and load what was made."""
    run.train_to_end()
    num_ranks, objective = run.num_ranks, run.spec.objective
    straight = [run.steps(rank) for rank in range(num_ranks)]
    losses = [line["loss"] for line in straight[0].values()]
    assert len(losses) == NUM_STEPS
    assert losses[-1] < losses[0]
    if objective == "dpo":
        assert straight[0][1]["reward_margin"] == pytest.approx(0, abs=0.2)
        assert straight[0][NUM_STEPS]["reward_margin"] > straight[0][1]["reward_margin"]

    made = hashes(run.checkpoint(NUM_STEPS))
    shutil.copytree(run.checkpoint(NUM_STEPS), copied)
    shutil.rmtree(run.checkpoint(NUM_STEPS))
    run.train_to_end(resume_step=NUM_STEPS // 2)
    for rank in range(num_ranks):
        for step, line in run.steps(rank).items():
            assert line["loss_hex"] == straight[rank][step]["loss_hex"]
            assert line["samples"] == straight[rank][step]["samples"]
    assert hashes(run.checkpoint(NUM_STEPS)) == made
    assert_the_same_elsewhere(run, base, copied)


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }


def assert_the_same_elsewhere(run: Run, base: Path, made: Path) -> None:
    """Load what was made in plain Transformers and PEFT; its logits have to be the trainer's."""
    part = segment(1, 12)
    ids = torch.from_numpy(part.ids.astype(np.int64))[None]
    with torch.no_grad():
        elsewhere = load_elsewhere(run.spec, base, made)(input_ids=ids).logits[0]
        tokenizer, plain = load_tokenizer(base)
        loaded = load_model(run.spec, base, CPU)
        model = build_trained_model(run.spec, loaded, tokenizer, plain_template=plain, device=CPU)
        forward = Forward(model, CPU)
        untrained = logits_of(forward, part)
        values = read_weights(made)
        for name, parameter in model.named_parameters():
            parameter.copy_(values.pop(name))
        assert not values
        found = logits_of(forward, part)
    places = np.flatnonzero(part.is_target) - 1
    torch.testing.assert_close(found, elsewhere[places].float(), rtol=1e-4, atol=1e-4)
    assert (found - untrained).abs().max() > 1e-3


def logits_of(forward: Forward, part: Segment) -> torch.Tensor:
    batch = build_micro_batch([Example((part,))], CPU)
    assert isinstance(forward.head, Head)
    return forward.head.logits(forward.features(batch))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = {}
    for path in folder.glob("*model*.safetensors"):
        values.update(load_file(path))
    return values


def load_elsewhere(spec: RunSpec, base: Path, made: Path) -> torch.nn.Module:
    settings: dict = {"dtype": torch.float32}
    if spec.adapter.kind == "qlora":
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(base, **settings)
    if spec.adapter.kind != "full":
        adapted = PeftModel.from_pretrained(model, made).eval()
        _keep_layout(adapted)
        return adapted
    result = model.load_state_dict(read_weights(made), strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}  # tied to the embeddings
    return model.eval()
