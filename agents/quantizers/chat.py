"""Ask a model one question: `python -m agents.quantizers.chat JOB.json REPORT.json`.

The answer goes out piece by piece as JSON lines of kind `progress` while it is made, and whole into
the report. The model's own chat template is used.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.artifacts import ChatAnswer, ChatJob
from agents.errors import UserError
from agents.quantizers.merge import copy_values, has_adapter
from agents.quantizers.models import load_model, name_transformers
from agents.quantizers.work import Progress, locate, read_plain, run_job
from agents.state import write_json
from agents.trainer.checkpoint import read_checkpoint
from agents.trainer.data.hub import find_model
from agents.trainer.data.tokenizer import load_tokenizer
from agents.wire import WireError, from_wire, to_wire

_CONTEXT_TOKENS = 4096
Say = Callable[[str], None]


def answer(job: ChatJob, say: Say) -> ChatAnswer:
    """Return what the model answers; `say` hears it piece by piece.

    Args:
        job: with absolute paths, or a hub id as its model.

    Raises:
        UserError: the model cannot be loaded, or memory ran out.
    """
    try:
        if Path(job.model).is_file():
            return _ask_llama_cpp(job, say)
        return _ask_model(replace(job, model=str(find_model(job.model))), say)
    except MemoryError as error:
        raise UserError(
            "The PC ran out of memory.", "Ask a smaller artifact, or another node"
        ) from error


def _messages(job: ChatJob) -> list[dict[str, str]]:
    system = [{"role": "system", "content": job.system}] if job.system else []
    return [*system, {"role": "user", "content": job.prompt}]


class _Clock:
    """Times the pieces of an answer."""

    def __init__(self) -> None:
        self._started_s = self._last_s = time.perf_counter()
        self._first_s: float | None = None

    def tick(self) -> None:
        """Note that a piece has come."""
        self._last_s = time.perf_counter()
        self._first_s = self._first_s or self._last_s

    def report(
        self, text: str, num_tokens: int, load_s: float, runtime: str, cut: bool
    ) -> ChatAnswer:
        """Return the answer with its times."""
        first_s = self._first_s or time.perf_counter()
        seconds = self._last_s - first_s
        return ChatAnswer(
            text=text,
            num_tokens=num_tokens,
            first_token_s=first_s - self._started_s,
            tokens_per_s=(num_tokens - 1) / seconds if num_tokens > 1 and seconds > 0 else None,
            load_s=load_s,
            runtime=runtime,
            cut=cut,
        )


def _ask_model(job: ChatJob, say: Say) -> ChatAnswer:
    import torch
    from transformers import TextStreamer

    started = time.perf_counter()
    tokenizer, _ = load_tokenizer(Path(job.model))
    model = _load(job)
    load_s = time.perf_counter() - started
    ids_BT = tokenizer.apply_chat_template(
        _messages(job), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"].to(next(model.parameters()).device)
    clock = _Clock()

    class Speaker(TextStreamer):
        def put(self, value: Any) -> None:
            clock.tick()
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                say(text)

    drawn = {"temperature": job.temperature} if job.temperature else {}
    with torch.inference_mode():
        out_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=job.max_tokens,
            do_sample=job.temperature > 0,
            pad_token_id=tokenizer.pad_token_id or 0,
            streamer=Speaker(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **drawn,
        )
    new = out_BT[0, ids_BT.shape[1] :].tolist()
    ends = model.generation_config.eos_token_id
    stops = ends if isinstance(ends, list) else [ends]
    return clock.report(
        tokenizer.decode(new, skip_special_tokens=True),
        len(new),
        load_s,
        name_transformers(),
        new[-1] not in stops,
    )


def _load(job: ChatJob) -> Any:
    import torch

    from agents.quantizers.calibrated import let_few_cores_work
    from agents.quantizers.nf4 import load_quantized

    if job.packages:
        let_few_cores_work()
    if job.in_4_bits:
        model = load_quantized(Path(job.model), job.device).eval()
    else:
        model = load_model(Path(job.model), job.device)
    if job.checkpoint is None:
        return model
    checkpoint = read_checkpoint(Path(job.checkpoint))
    if has_adapter(checkpoint):
        from peft import PeftModel

        return PeftModel.from_pretrained(model, checkpoint.path).eval()
    with torch.no_grad():
        copy_values(model, checkpoint)
    return model


def _ask_llama_cpp(job: ChatJob, say: Say) -> ChatAnswer:
    from agents.quantizers.llama_cpp import name_runtime, open_server

    started = time.perf_counter()
    context_tokens = _CONTEXT_TOKENS + job.max_tokens
    server = open_server(Path(job.model), context_tokens, on_gpu=job.device != "cpu")
    load_s = time.perf_counter() - started
    clock, pieces, ends = _Clock(), list[str](), list[str]()

    def hear(told: Any) -> None:
        for one in told if isinstance(told, list) else [told]:
            (choice,) = one["choices"]
            piece = choice.get("delta", {}).get("content")
            if choice.get("finish_reason"):
                ends.append(choice["finish_reason"])
            if piece:
                clock.tick()
                pieces.append(piece)
                say(piece)

    asked = {"messages": _messages(job), "max_tokens": job.max_tokens, "stream": True}
    server.handle_chat_completions({**asked, "temperature": job.temperature}, hear)
    return clock.report("".join(pieces), len(pieces), load_s, name_runtime(), "length" in ends)


def read_job(path: Path) -> ChatJob:
    """Read the job file; its paths become absolute.

    Raises:
        UserError: it is not one.
    """
    plain, home = read_plain(path, "chat")
    try:
        job = from_wire(ChatJob, plain, "job")
    except (WireError, ValueError) as error:
        raise UserError(f"{path} is no chat job: {error}.", "Ask again") from error
    checkpoint = str(home / job.checkpoint) if job.checkpoint else None
    return replace(job, model=locate(home, job.model), checkpoint=checkpoint)


def main(argv: list[str]) -> int:
    """Answer one job and return the exit code."""

    def work(path: Path, progress: Progress) -> None:
        found = answer(read_job(path), lambda piece: progress.tell(piece))
        write_json(Path(argv[1]), to_wire(found))

    usage = "python -m agents.quantizers.chat JOB.json REPORT.json"
    return run_job(argv[:1] if len(argv) == 2 else [], usage, work)


if __name__ == "__main__":
    sys.stdout.flush()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # llama.cpp's threads do not always end
