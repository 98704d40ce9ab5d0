"""The same data, seed and settings in TRL's own trainers: the same losses, step by step.

TRL (https://github.com/huggingface/trl) makes the masks, the batches' losses and the optimizer
steps in its own way, from the same conversations; only the order of the rows and the first values
of the adapter are given to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import AdapterSpec, CheckpointSpec
from tests.agents.trainer.ranks import Run, make_spec
from tests.agents.trainer.test_matrix import make_pairs

pytestmark = pytest.mark.slow
NUM_STEPS = 20
TOLERANCE = 1e-4
BATCH = 6
RATE = 3e-3


def comparable_spec(**changes):
    return make_spec(
        precision="fp32",
        adapter=AdapterSpec(rank=4, alpha=8, dropout=0.0),
        sequence_tokens=256,
        batch_sequences=BATCH,
        max_steps=NUM_STEPS,
        learning_rate=RATE,
        schedule="constant",
        warmup_share=0.0,
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=None),
        **changes,
    )


def in_order(rows: list[dict[str, Any]], seed: int) -> Any:
    """The rows of every step, one after the other."""
    from datasets import Dataset

    from agents.trainer.data.order import DataOrder

    chosen = []
    for step in range(1, NUM_STEPS + 1):
        chosen += DataOrder(seed, (len(rows),), (len(rows),)).choose(step=step, batch=BATCH)
    return Dataset.from_list([rows[place] for place in chosen])


def same_start(spec, model_path: Path) -> Any:
    """A plain PEFT model with the first values that ours has."""
    import torch
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    from agents.trainer.model.model import build_trained_model, load_model, load_tokenizer

    device = torch.device("cpu")
    tokenizer, plain = load_tokenizer(model_path)
    ours = build_trained_model(
        spec, load_model(spec, model_path, device), tokenizer, plain_template=plain, device=device
    )
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    set_peft_model_state_dict(model, {k: v.detach() for k, v in ours.named_parameters()})
    return model, tokenizer


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": NUM_STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": 256,
        "train_sampling_strategy": "sequential",
    }


def test_supervised_losses_are_those_of_trl(tmp_path, tiny_model):
    spec = comparable_spec()
    run = Run(tmp_path / "run", tiny_model, spec)
    run.train_to_end()
    from trl import SFTConfig, SFTTrainer

    rows = []
    for line in run.train.read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        rows.append({"prompt": [question], "completion": [answer]})
    model, tokenizer = same_start(spec, tiny_model)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings(tmp_path / "trl"), shuffle_dataset=False),
        train_dataset=in_order(rows, spec.seed),
        processing_class=tokenizer,
    )
    trainer.train()
    expected = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    found = [line["loss"] for line in run.steps().values()]
    assert len(expected) == len(found) == NUM_STEPS
    assert found[-1] < found[0] - 0.3
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= TOLERANCE


def test_preference_losses_are_those_of_trl(tmp_path, tiny_model):
    spec = comparable_spec(objective="dpo", dpo_beta=0.2)
    run = Run(tmp_path / "run", tiny_model, spec)
    rows = make_pairs(run.train)
    run.train_to_end()
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = same_start(spec, tiny_model)
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(**settings(tmp_path / "trl"), beta=0.2),
        train_dataset=in_order(rows, spec.seed),
        processing_class=tokenizer,
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    found = list(run.steps().values())
    assert len(lines) == len(found) == NUM_STEPS
    assert found[-1]["loss"] < 0.5 * found[0]["loss"]
    for ours, theirs in zip(found, lines, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)
        assert ours["reward_margin"] == pytest.approx(theirs["rewards/margins"], abs=10 * TOLERANCE)
        assert ours["reward_accuracy"] == pytest.approx(theirs["rewards/accuracies"])
