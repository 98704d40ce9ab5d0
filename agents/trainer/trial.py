"""Try a training environment: `agents.program agents.trainer.trial JOB.json REPORT.json`.

Imports the packages of training, and does one step of a tiny model with a LoRA adapter on each
device. A library that is missing on this PC, or a build of torch that its driver or card cannot
run, shows within seconds instead of in the first run.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.environments import DeviceTrial, EnvironmentTrial, TrialJob
from agents.contract.wire import from_wire, to_wire

_SEQUENCES, _TOKENS, _WORDS = 2, 32, 64


def run_trial(job: TrialJob) -> EnvironmentTrial:
    """Return the result of the imports and of one step on each device.

    Raises:
        ImportError: a package cannot be imported.
        OSError: a library of a package cannot be loaded.
    """
    began_s = time.perf_counter()
    # Here, so that their time is measured and their failure explained.
    import peft
    import torch
    import transformers

    import_s = time.perf_counter() - began_s
    _say(f"imported torch {torch.__version__}, Transformers {transformers.__version__} and PEFT")
    model = make_model(transformers, peft)
    return EnvironmentTrial(
        import_s=import_s,
        torch=str(torch.__version__),
        devices=tuple(d if d.problem else try_device(model, d) for d in job.devices),
    )


def make_model(transformers: Any, peft: Any) -> Any:
    """Return the smallest Llama, with an adapter."""
    config = transformers.LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_TOKENS,
    )
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter)


def try_device(model: Any, trial: DeviceTrial) -> DeviceTrial:
    """Do one step on a device; return its duration, or why it failed."""
    import torch

    began_s = time.perf_counter()
    try:
        model = model.to(trial.device)
        ids = torch.arange(_SEQUENCES * _TOKENS, device=trial.device) % _WORDS
        ids_BT = ids.view(_SEQUENCES, _TOKENS)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RuntimeError(f"the loss is {value}")
    except (RuntimeError, AssertionError) as error:  # of CUDA, or a build without it
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return replace(trial, problem=reason[0][:500], is_failed=True)
    seconds = time.perf_counter() - began_s
    _say(f"{trial.name}: one training step in {seconds:.1f} s")
    return replace(trial, seconds=seconds)


def main(argv: list[str]) -> int:
    """Try the environment, and write the report; return the exit code."""
    job_path, report_path = argv
    job = from_wire(TrialJob, json.loads(Path(job_path).read_bytes()), "job")
    try:
        found = run_trial(job)
    except (ImportError, OSError) as error:
        message = f"The training environment is built, but cannot be imported: {error}."
        hint = "Report this message with the output of `rackless nodes show`"
        print(json.dumps({"kind": "failed", "message": message, "hint": hint}), flush=True)
        return 1
    Path(report_path).write_text(json.dumps(to_wire(found)), encoding="ascii")
    return 0


def _say(message: str) -> None:
    print(json.dumps({"kind": "progress", "message": message}), flush=True)
