"""DPO as TRL does it, and as a plain loop over Transformers with PEFT.

Both pad the pairs of a micro-batch to its longest conversation, chosen and rejected in one pass,
and take the reference's log-probabilities in the same step from the model with its adapter disabled
(Rafailov et al. 2023, arXiv:2305.18290). Rates count real tokens of both conversations.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.engines.chat_rows import Pair, make_pairs, make_tokenizer, to_preference
from tests.bench.engines.engine_shapes import GIB, Size, list_values
from tests.bench.engines.fresh_process import Emit
from tests.bench.engines.peer_training import (
    PeerJob,
    describe_adapter,
    load_base,
    load_peft,
    set_recompute,
)

BETA = 0.1
_SKIPPED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class PreferenceJob:
    """What a peer trains, and how."""

    engine: str
    """`trl` or `peft`."""
    shape: str
    kind: str
    lengths: tuple[int, ...]
    """Tokens of each chosen conversation."""
    limit: int
    batch: int
    """Pairs of an optimizer step."""
    steps: int
    """Optimizer steps for each setting, the first two of which do not count."""
    layers: int | None = None
    size: Size = "full"
    recompute: tuple[str, ...] = ("all", "none")
    at_once: tuple[int, ...] = (1, 2, 4, 8)
    """Pairs in a micro-batch."""
    device: str = "cuda:0"

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device != "cpu"


def train_preference_peer(emit: Emit, job: PreferenceJob) -> None:
    """Report each setting's tokens per second and memory."""
    import torch

    if not job.on_gpu:
        torch.set_num_threads(1)
    pairs = make_pairs(job.lengths, _count_words(job))
    sft = PeerJob(
        engine="peft", shape=job.shape, kind=job.kind, lengths=(), limit=job.limit,
        step_tokens=0, layers=job.layers, size=job.size, device=job.device,
    )  # fmt: skip
    model = None if job.engine == "trl" else load_peft(sft, "sdpa")
    for recompute in job.recompute:
        for count in job.at_once:
            try:
                if model is None:
                    found = _time_trl(job, sft, pairs, count, recompute)
                else:
                    set_recompute(model, recompute)
                    found = _time_plain(job, model, pairs, count)
            except torch.OutOfMemoryError:
                break
            finally:
                gc.collect()
                if job.on_gpu:
                    torch.cuda.empty_cache()
            emit({"engine": job.engine, "at_once": count, "recompute": recompute, **found})


def _count_words(job: PreferenceJob) -> int:
    return int(list_values(job.shape, size=job.size)["vocab_size"])


class StepTimes:
    """Real tokens and times of optimizer steps."""

    def __init__(self, job: PreferenceJob) -> None:
        self._on_gpu = job.on_gpu
        self._tokens: list[Any] = []
        self._ends: list[tuple[float, int]] = []

    def add(self, mask: Any) -> None:
        """Count the tokens of a micro-batch, without waiting for the device."""
        self._tokens.append(mask.sum())

    def end_step(self) -> None:
        """Note the end of a step; the peak of memory begins with the first that counts."""
        import torch

        if self._on_gpu:
            torch.cuda.synchronize()
            if len(self._ends) + 1 == _SKIPPED_STEPS:
                torch.cuda.reset_peak_memory_stats()
        self._ends.append((time.perf_counter(), len(self._tokens)))

    def read(self) -> dict[str, float]:
        """Return tokens per second and the peak of memory."""
        import torch

        first, last = self._ends[min(_SKIPPED_STEPS, len(self._ends) - 1) - 1], self._ends[-1]
        tokens = sum(int(count) for count in self._tokens[first[1] : last[1]])
        peak = torch.cuda.max_memory_allocated() / GIB if self._on_gpu else 0.0
        return {"tokens_per_s": tokens / (last[0] - first[0]), "memory_gib": peak}


def _time_trl(
    job: PreferenceJob, sft: PeerJob, pairs: Sequence[Pair], count: int, recompute: str
) -> dict[str, float]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    times = StepTimes(job)

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.end_step()

    settings = DPOConfig(
        output_dir="trl", per_device_train_batch_size=count, beta=BETA, max_length=job.limit,
        gradient_accumulation_steps=max(1, job.batch // count), max_steps=job.steps,
        gradient_checkpointing=recompute == "all", bf16=job.on_gpu, use_cpu=not job.on_gpu,
        gradient_checkpointing_kwargs={"use_reentrant": False}, learning_rate=1e-5,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        optim="adamw_torch_fused" if job.on_gpu else "adamw_torch",
    )  # fmt: skip
    trainer = DPOTrainer(
        model=load_base(sft, "sdpa"),  # TRL adds the adapters itself
        peft_config=describe_adapter(sft),
        args=settings,
        train_dataset=Dataset.from_list([to_preference(pair) for pair in pairs]),
        processing_class=make_tokenizer(_count_words(job)),
        callbacks=[Clock()],
    )
    do_step = trainer.training_step

    def counted(model: Any, inputs: dict[str, Any], *more: Any, **named: Any) -> Any:
        times.add(inputs["attention_mask"])
        return do_step(model, inputs, *more, **named)

    trainer.training_step = counted
    trainer.train()
    return times.read()


def _time_plain(
    job: PreferenceJob, model: Any, pairs: Sequence[Pair], count: int
) -> dict[str, float]:
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    times = StepTimes(job)
    at_once = min(count, job.batch)
    for step in range(job.steps):
        first = step * job.batch
        chosen = [pairs[(first + i) % len(pairs)] for i in range(job.batch)]
        for start in range(0, job.batch, at_once):
            micro = chosen[start : start + at_once]
            inputs = pad_pairs(micro, job.device)
            times.add(inputs["mask"])
            loss = preference_loss(model, inputs) * len(micro) / job.batch
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.end_step()
    return times.read()


def pad_pairs(pairs: Sequence[Pair], device: str) -> dict[str, Any]:
    """Return ids, mask and targets (2N, T): the chosen conversations, then the rejected ones."""
    import torch

    rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    width = max(len(row.ids) for row in rows)
    rest = [width - len(row.ids) for row in rows]
    named = {
        "ids": [row.ids + [0] * n for row, n in zip(rows, rest, strict=True)],
        "mask": [[1] * len(row.ids) + [0] * n for row, n in zip(rows, rest, strict=True)],
        "target": [row.is_target + [False] * n for row, n in zip(rows, rest, strict=True)],
    }
    return {key: torch.tensor(value).to(device) for key, value in named.items()}


def preference_loss(model: Any, inputs: dict[str, Any]) -> Any:
    """Return the mean DPO loss over the pairs."""
    import torch
    import torch.nn.functional as F  # noqa: N812 - everybody's name for it

    def sum_answers() -> Any:
        logits = model(input_ids=inputs["ids"], attention_mask=inputs["mask"]).logits[:, :-1]
        labels = inputs["ids"][:, 1:]
        losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        chosen, rejected = (-losses * inputs["target"][:, 1:]).sum(1).chunk(2)
        return chosen - rejected

    with torch.no_grad(), model.disable_adapter():
        reference = sum_answers()
    return -F.logsigmoid(BETA * (sum_answers() - reference)).mean()
