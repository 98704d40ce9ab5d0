"""Transformers with PEFT, and Unsloth, as they are used at their best: packed rows, bf16 adapters.

Rows are packed to the sequence limit, several packs make a micro-batch, and attention keeps rows
apart: with FlashAttention over their bounds where torch's supports the class, else with the mask
that the class itself makes of the positions. A class that lets packed rows see each other gets
padded rows of similar length. The base model is in bf16 or NF4 and the adapters are in bf16, as TRL
has them, without the cost of autocast. Memory is what their tensors really took, without the
fragments that a cap would have to hold: that is kinder to them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.engines.chat_rows import ChatRow, make_rows
from tests.bench.engines.engine_shapes import (
    GIB,
    SHAPES,
    Size,
    list_values,
    make_config,
    make_model,
    quantize_linears,
    save_model,
)
from tests.bench.engines.fresh_process import Emit

VARLEN = "bench_varlen"
_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class PeerJob:
    """What a peer trains, and how."""

    engine: str
    """`peft` or `unsloth`."""
    shape: str
    kind: str
    """`lora` or `qlora`."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    limit: int
    """Most tokens of a sequence, to which rows are packed."""
    step_tokens: int
    """Tokens of an optimizer step."""
    layers: int | None = None
    size: Size = "full"
    dora: bool = False
    experts: bool = False
    """Whether experts get adapters, too."""
    rank: int = 16
    recompute: tuple[str, ...] = ("all", "none")
    at_once: tuple[int, ...] = (1, 2, 4, 8)
    """Sequences in a micro-batch; tried in order until memory runs out."""
    most_gib: float = 1e9
    """Larger settings are not tried."""
    seconds: float = 2.5
    """For each setting."""
    device: str = "cuda:0"
    folder: str = ""
    """Saved model, which Unsloth loads, and which the process of PEFT saves; empty: it does not."""
    attention: str = ""
    """Attention of PEFT's model; empty: see `choose_attention`."""

    @property
    def warm(self) -> tuple[str, ...]:
        """Modules that its process can import before it begins."""
        return ("unsloth",) if self.engine == "unsloth" else ("peft", "bitsandbytes.nn")


@dataclass(frozen=True, kw_only=True)
class PeerBatch:
    """One micro-batch."""

    inputs: dict[str, Any]
    """Arguments of the model."""
    lengths: list[int]
    """Tokens of each row."""


class Bounds:
    """Bounds of the rows in the current micro-batch, for attention."""

    def __init__(self) -> None:
        self.bounds_S: Any = None
        self.longest = 0

    def register(self) -> None:
        """Register `attend` with Transformers as `VARLEN`."""
        from transformers import AttentionInterface

        AttentionInterface.register(VARLEN, self.attend)

    def set(self, lengths: Sequence[int], device: Any) -> None:
        """Lay out rows of these lengths."""
        import torch

        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.bounds_S = torch.from_numpy(bounds).to(device)
        self.longest = max(lengths)

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, *,
        scaling: float | None = None, sliding_window: int | None = None, **_: Any,
    ) -> tuple[Any, None]:  # fmt: skip
        """Attend causally within each row, by torch's own FlashAttention."""
        import torch

        narrow = [x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value)]
        window = sliding_window if sliding_window and sliding_window < self.longest else 0
        more = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        out, *_ = torch.ops.aten._flash_attention_forward(
            *narrow, self.bounds_S, self.bounds_S, self.longest, self.longest, 0.0, not window,
            False, scale=scaling, **more,
        )  # fmt: skip
        return out.unsqueeze(0), None


def choose_attention(job: PeerJob) -> str:
    """Return the fastest exact attention that a class can have here."""
    shape = SHAPES[job.shape]
    if job.attention:
        return job.attention
    if shape.caps_scores:
        return "eager"
    if shape.sees_past_rows or job.device == "cpu":
        return "sdpa"
    return VARLEN


def load_base(job: PeerJob, attention: str) -> Any:
    """Return the base model, in 4 bits for `qlora`."""
    config = make_config(job.shape, layers=job.layers, size=job.size)
    base = make_model(config, job.device, attention)
    base.config.use_cache = False
    return quantize_linears(base) if job.kind == "qlora" else base


def describe_adapter(job: PeerJob) -> Any:
    """Return PEFT's description of the adapters."""
    from peft import LoraConfig

    return LoraConfig(
        r=job.rank, lora_alpha=2 * job.rank, lora_dropout=0.0, use_dora=job.dora,
        target_modules=list(SHAPES[job.shape].targets), task_type="CAUSAL_LM",
        target_parameters=list_experts(job),
    )  # fmt: skip


def list_experts(job: PeerJob) -> list[str] | None:
    """Return the packed matrices of experts that get adapters; None: there are none."""
    found = SHAPES[job.shape].experts if job.experts else ()
    return [f"experts.{name}" for name in found] or None


def load_peft(job: PeerJob, attention: str) -> Any:
    """Return the model with its adapters."""
    from peft import get_peft_model

    base = load_base(job, attention)
    return get_peft_model(base, describe_adapter(job), autocast_adapter_dtype=False).train()


def set_recompute(model: Any, recompute: str) -> None:
    """Let every decoder layer recompute its activations, or none."""
    if recompute == "all":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def load_unsloth(job: PeerJob, recompute: str) -> Any:
    """Return the model as the documents of Unsloth make it, ready for packed rows."""
    from unsloth import FastLanguageModel
    from unsloth.utils.packing import _enable_hf_packed_attention, mark_allow_overlength

    model, _ = FastLanguageModel.from_pretrained(
        job.folder, max_seq_length=job.limit, load_in_4bit=job.kind == "qlora",
        local_files_only=True,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=job.rank, lora_alpha=2 * job.rank, lora_dropout=0, use_dora=job.dora,
        target_modules=list(SHAPES[job.shape].targets), target_parameters=list_experts(job),
        use_gradient_checkpointing="unsloth" if recompute == "all" else False,
    )  # fmt: skip
    mark_allow_overlength(model)
    _enable_hf_packed_attention()
    return model.train()


def make_batches(
    job: PeerJob, rows: Sequence[ChatRow], count: int, attention: str, bounds: Bounds
) -> Iterator[tuple[PeerBatch, Callable[[], None]]]:
    """Yield micro-batches of `count` sequences for ever, each with what it has to set first."""
    padded = SHAPES[job.shape].sees_past_rows and job.engine == "peft"
    groups = _group_alike(job, rows, count) if padded else _group_packs(job, rows, count)
    flat = attention == VARLEN or job.engine == "unsloth"
    made = []
    for group in groups:
        if flat:
            lengths = [len(row.ids) for pack in group for row in pack]
            made.append((_lay_flat(job, [row for pack in group for row in pack]), lengths))
        else:
            made.append((_lay_in_rows(job, group), []))
    while True:
        for batch, lengths in made:
            yield batch, (lambda lengths=lengths: bounds.set(lengths, job.device) if lengths else 0)


def _group_packs(job: PeerJob, rows: Sequence[ChatRow], count: int) -> list[list[list[ChatRow]]]:
    from agents.trainer.data.packing import pack

    lengths = np.array([len(row.ids) for row in rows], dtype=np.int32)
    order, first = pack(lengths, job.limit)
    packs = [[rows[i] for i in order[first[p] : first[p + 1]]] for p in range(len(first) - 1)]
    # The last packs are the emptiest; a full micro-batch of each size shows the peer at its best.
    return [packs[i : i + count] for i in range(0, max(1, len(packs) - count + 1), count)]


def _group_alike(job: PeerJob, rows: Sequence[ChatRow], count: int) -> list[list[list[ChatRow]]]:
    """Return groups of rows of similar length, each of about `count` times the limit of tokens."""
    groups: list[list[list[ChatRow]]] = [[]]
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        longest = len(groups[-1][0][0].ids) if groups[-1] else 0
        if longest * (len(groups[-1]) + 1) > count * job.limit:
            groups.append([])
        groups[-1].append([row])
    return groups


def _label(row: ChatRow) -> list[int]:
    return [i if t else _IGNORED for i, t in zip(row.ids, row.is_target, strict=True)]


def _lay_flat(job: PeerJob, rows: Sequence[ChatRow]) -> PeerBatch:
    import torch

    def put(values: list[int]) -> Any:
        return torch.tensor([values], dtype=torch.int64).to(job.device)

    lengths = [len(row.ids) for row in rows]
    inputs = {
        "input_ids": put([i for row in rows for i in row.ids]),
        "labels": put([label for row in rows for label in _label(row)]),
        "position_ids": put([place for length in lengths for place in range(length)]),
    }
    if job.engine == "unsloth":
        inputs["packed_seq_lengths"] = torch.tensor(lengths, dtype=torch.int32)
    return PeerBatch(inputs=inputs, lengths=lengths)


def _lay_in_rows(job: PeerJob, group: Sequence[Sequence[ChatRow]]) -> PeerBatch:
    """Lay each pack out as a sequence of the batch, padded to the longest one."""
    import torch

    lengths = [[len(row.ids) for row in pack] for pack in group]
    width = max(map(sum, lengths))
    ids, labels, places, mask = [], [], [], []
    for pack, sizes in zip(group, lengths, strict=True):
        rest = width - sum(sizes)
        ids.append([i for row in pack for i in row.ids] + [0] * rest)
        labels.append([one for row in pack for one in _label(row)] + [_IGNORED] * rest)
        places.append([i for size in sizes for i in range(size)] + [*range(rest)])
        mask.append([1] * (width - rest) + [0] * rest)
    inputs = {"input_ids": ids, "labels": labels, "position_ids": places}
    if SHAPES[job.shape].sees_past_rows:
        inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    tensors = {key: torch.tensor(one).to(job.device) for key, one in inputs.items()}
    return PeerBatch(inputs=tensors, lengths=[size for sizes in lengths for size in sizes])


class StepClock:
    """Times steps of a model over micro-batches."""

    def __init__(self, model: Any, device: str, *, autocast: bool = False) -> None:
        import torch

        trained = [p for p in model.parameters() if p.requires_grad]
        self._model = model
        self._autocast = autocast
        self._on_gpu = device != "cpu"
        self._micro_batches = 0
        self._is_warm = False
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def run(self, batches: Iterator[Any], step_tokens: int, seconds: float) -> dict[str, float]:
        """Return real tokens per second and the peak of memory, of whole optimizer steps."""
        import torch

        for _ in range(2):
            self._step(batches, 1)
        if not self._is_warm:  # rows of other lengths may be compiled for
            self._step(batches, step_tokens)
            self._is_warm = True
        self._wait()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._micro_batches, tokens, started = 0, 0, time.perf_counter()
        while not tokens or time.perf_counter() - started < seconds:
            tokens += self._step(batches, step_tokens)
            self._wait()  # as one that logs the loss of each step
        took_s = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() / GIB if self._on_gpu else 0.0
        return {
            "tokens_per_s": tokens / took_s,
            "micro_batch_s": took_s / self._micro_batches,
            "memory_gib": peak,
        }

    def _step(self, batches: Iterator[Any], step_tokens: int) -> int:
        import torch

        tokens = 0
        while tokens < step_tokens:
            batch, prepare = next(batches)
            prepare()
            with torch.autocast("cuda", torch.bfloat16, enabled=self._autocast):
                loss = self._model(**batch.inputs).loss
            loss.backward()
            tokens += sum(batch.lengths)
            self._micro_batches += 1
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return tokens

    def _wait(self) -> None:
        import torch

        if self._on_gpu:
            torch.cuda.synchronize()


def train_peer(emit: Emit, job: PeerJob) -> None:
    """Report each setting's tokens per second and memory."""
    if job.engine == "unsloth":
        import unsloth  # noqa: F401 - before Transformers, whose classes it patches
    import torch

    if job.device == "cpu":
        torch.set_num_threads(1)
    bounds = Bounds()
    if job.engine == "peft":
        bounds.register()
        if job.folder:
            folder = Path(job.folder)
            save_model(folder, job.shape, layers=job.layers, size=job.size, device=job.device)
    attention = choose_attention(job)
    rows = make_rows(job.lengths, list_values(job.shape, size=job.size)["vocab_size"])
    model = None
    for recompute in job.recompute:
        if job.engine == "unsloth":
            model = load_unsloth(job, recompute)
        elif model is None:
            model = load_peft(job, attention)
        if job.engine == "peft":
            set_recompute(model, recompute)
        clock = StepClock(model, job.device, autocast=job.engine == "unsloth")
        for count in job.at_once:
            row = {"engine": job.engine, "at_once": count, "recompute": recompute}
            batches = make_batches(job, rows, count, attention, bounds)
            try:
                found = clock.run(batches, job.step_tokens, job.seconds)
            except torch.OutOfMemoryError:
                break
            finally:
                gc.collect()
                if job.device != "cpu":
                    torch.cuda.empty_cache()
            emit({**row, "attention": attention, **found})
            if found["memory_gib"] > job.most_gib:
                break
