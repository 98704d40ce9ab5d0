"""A rank as torchrun's users write it: DDP, LoRA by PEFT, a checkpoint each so many steps.

It begins at the newest checkpoint, which lies where all nodes can read it, and writes the time of
every step. Model, adapter, data, batch and checkpoints are those of the campaign's own runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQUENCE_TOKENS = 64
BATCH_SEQUENCES = 12


def main(model_path: Path, data: Path, folder: Path, num_steps: int, every_steps: int) -> None:
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(42)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    loaded = AutoModelForCausalLM.from_pretrained(model_path)
    model = DistributedDataParallel(get_peft_model(loaded, adapter))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = read_rows(model_path, data)
    step = 0
    newest = folder / "checkpoint.pt"
    if newest.exists():
        saved = torch.load(newest, weights_only=True)
        model.module.load_state_dict(saved["model"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    with (folder / f"steps-{rank}-{os.getpid()}.jsonl").open("a", buffering=1) as journal:
        while step < num_steps:
            at = torch.arange(BATCH_SEQUENCES)[rank::world] + step * BATCH_SEQUENCES
            batch = rows[at % len(rows)]
            model(input_ids=batch, labels=batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            journal.write(json.dumps({"step": step, "time_s": time.time(), "rank": rank}) + "\n")
            if step % every_steps == 0 and rank == 0:
                trained = {k: v for k, v in model.module.state_dict().items() if "lora_" in k}
                saved = {"model": trained, "optimizer": optimizer.state_dict(), "step": step}
                torch.save(saved, folder / "checkpoint.new")
                (folder / "checkpoint.new").replace(newest)
    torch.distributed.destroy_process_group()


def read_rows(model_path: Path, data: Path) -> torch.Tensor:
    """Return all rows, cut or filled to one length."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    found = []
    for line in data.read_text(encoding="utf-8").splitlines():
        ids = tokenizer.encode(line)[:SEQUENCE_TOKENS]
        found.append(ids + [0] * (SEQUENCE_TOKENS - len(ids)))
    return torch.tensor(found)


if __name__ == "__main__":
    model, data, shared = (Path(argument) for argument in sys.argv[1:4])
    main(model, data, shared, *(int(argument) for argument in sys.argv[4:6]))
