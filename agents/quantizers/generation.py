"""Continue a chat with a loaded model, in Transformers or llama.cpp, streaming the answer.

Both use the model's own chat template and read the whole conversation again for each answer, so
that a stopped answer leaves no state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from agents.contract.requests.chats import ChatAnswer, ChatJob, ChatTurn
from agents.errors import ExpectedError
from agents.quantizers.inference.models import LIKELIEST, load_model, name_transformers
from agents.quantizers.merge import copy_values, fit_rows, has_adapter
from agents.trainer.checkpoint.folder import read_checkpoint
from agents.trainer.checkpoint.state import read_resume_point
from agents.trainer.data.hub import find_model
from agents.trainer.data.stops import find_stops
from agents.trainer.data.templates import render_question
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokenizer_bounds import BoundedDecoder, bounded_tokenizer, decode

CONTEXT_TOKENS = 8192
"""Context of llama.cpp, in tokens; less for models with a smaller one."""

# Below it the likeliest word is practically certain, and dividing logits by it overflows.
_LEAST_TEMPERATURE = 1e-5
Say = Callable[[str], None]


class Stoppable(Protocol):
    """Object that can request the end of an answer."""

    @property
    def stopped(self) -> Event: ...


class Speaker(Protocol):
    """Loaded model."""

    load_s: float
    runtime: str

    def answer(self, turn: ChatTurn, say: Say, wish: Stoppable) -> ChatAnswer:
        """Return the model's next message, passing it to `say` piece by piece.

        Raises:
            ExpectedError: the conversation is too long, or the model's template refuses it.
        """
        ...


def load_speaker(job: ChatJob, device: str) -> Speaker:
    """Load a model.

    Args:
        job: job with absolute paths, or a hub id as its model.
        device: device to load it on: `cpu` or a GPU.

    Raises:
        ExpectedError: the model cannot be loaded, or memory ran out.
    """
    try:
        if Path(job.model).is_file():
            return _LlamaCppSpeaker(Path(job.model), device)
        return _ModelSpeaker(job, find_model(job.model), device)
    except MemoryError as error:
        raise ExpectedError(
            "The PC ran out of memory.", "Ask a smaller artifact, or another node"
        ) from error


class _Clock:
    """Times the pieces of an answer."""

    def __init__(self) -> None:
        self._started_s = self._last_s = time.perf_counter()
        self._first_s: float | None = None

    def tick(self) -> None:
        """Record the arrival of a piece."""
        self._last_s = time.perf_counter()
        self._first_s = self._first_s or self._last_s

    def report(
        self, text: str, num_tokens: int, runtime: str, *, cut: bool, stopped: bool
    ) -> ChatAnswer:
        """Return the answer with its times."""
        first_s = self._first_s or time.perf_counter()
        # The first piece ends the waiting time, so only the others count for the speed.
        seconds = self._last_s - first_s
        return ChatAnswer(
            text=text,
            num_tokens=num_tokens,
            first_token_s=first_s - self._started_s,
            tokens_per_s=(num_tokens - 1) / seconds if num_tokens > 1 and seconds > 0 else None,
            runtime=runtime,
            cut=cut and not stopped,
            stopped=stopped,
        )


def _too_long(num_tokens: int, most: int) -> ExpectedError:
    return ExpectedError(
        f"The conversation has {num_tokens:,} tokens; the model holds {most:,} with its answer.",
        "Begin a new conversation",
    )


class _ModelSpeaker:
    def __init__(self, job: ChatJob, folder: Path, device: str) -> None:
        started = time.perf_counter()
        data = None
        if job.checkpoint is not None:
            data = read_resume_point(read_checkpoint(Path(job.checkpoint))).spec.data
        self._tokenizer, _ = load_tokenizer(folder, data=data)
        self._model = _load(job, folder, device)
        # The config of a base model lacks the token that ends answers in its chat template.
        self._stops = find_stops(folder, self._tokenizer)
        self.load_s = time.perf_counter() - started
        self.runtime = name_transformers()
        # Models without a maximum position, such as those with ALiBi, lack the field.
        self._most = int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 30)

    def answer(self, turn: ChatTurn, say: Say, wish: Stoppable) -> ChatAnswer:
        import torch
        from transformers import StoppingCriteriaList

        ids_BT = self._encode(turn).to(next(self._model.parameters()).device)
        num_asked = int(ids_BT.shape[1])
        if num_asked >= self._most:
            raise _too_long(num_asked, self._most)
        clock = _Clock()
        how = LIKELIEST
        if turn.temperature >= _LEAST_TEMPERATURE:
            how = {"do_sample": True, "temperature": turn.temperature, "top_p": turn.top_p}

        # `generate` calls this after each token, and expects a value per row of the batch.
        def is_stopped(ids: Any, scores: Any, **more: Any) -> Any:
            return torch.full((ids.shape[0],), wish.stopped.is_set(), device=ids.device)

        try:
            with torch.inference_mode():
                out_BT = self._model.generate(
                    ids_BT,
                    attention_mask=torch.ones_like(ids_BT),
                    max_new_tokens=min(turn.max_tokens, self._most - num_asked),
                    # One row needs no padding; this only avoids a warning of Transformers.
                    pad_token_id=self._tokenizer.pad_token_id or 0,
                    eos_token_id=list(self._stops),
                    stopping_criteria=StoppingCriteriaList([is_stopped]),
                    streamer=_make_streamer(self._tokenizer, clock, say),
                    **how,
                )
        except torch.OutOfMemoryError as error:
            raise ExpectedError(
                "The GPU ran out of memory.", "Ask a smaller artifact, or for fewer tokens"
            ) from error
        new = out_BT[0, num_asked:].tolist()
        whole = new[-1] in self._stops
        text = decode(self._tokenizer, new, skip_special_tokens=True)
        # A stop together with the last token changes nothing, since the answer is complete.
        stopped = wish.stopped.is_set() and not whole
        return clock.report(text, len(new), self.runtime, cut=not whole, stopped=stopped)

    def _encode(self, turn: ChatTurn) -> Any:
        said = [{"role": m.role, "content": m.content} for m in turn.messages]
        text = render_question(self._tokenizer, said)
        with bounded_tokenizer(len(text)):
            found = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return found["input_ids"]


def _make_streamer(tokenizer: Any, clock: _Clock, say: Say) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """Streamer that ignores the question, which `generate` passes on first."""

        was_asked = False

        def put(self, value: Any) -> None:
            if self.was_asked:
                clock.tick()
            self.was_asked = True
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                say(text)

    return Streamer(BoundedDecoder(tokenizer), skip_prompt=True, skip_special_tokens=True)


def _load(job: ChatJob, folder: Path, device: str) -> Any:
    import torch

    from agents.quantizers.formats.by_gptqmodel import let_few_cores_work
    from agents.quantizers.formats.nf4 import load_quantized

    # These packages may include gptqmodel, whose import fails on few cores.
    if job.packages:
        let_few_cores_work()
    load = load_quantized if job.in_4_bits else load_model
    model = load(folder, device).eval()
    if job.checkpoint is None:
        return model
    checkpoint = read_checkpoint(Path(job.checkpoint))
    fit_rows(model, checkpoint)
    if has_adapter(checkpoint):
        from agents.quantizers.merging.updates import load_adapter

        return load_adapter(model, checkpoint.path).eval()
    with torch.no_grad():
        copy_values(model, checkpoint)
    return model


class _LlamaCppSpeaker:
    def __init__(self, file: Path, device: str) -> None:
        from agents.quantizers.inference.gguf_template import GgufTemplate
        from agents.quantizers.inference.llama_cpp import name_runtime, open_server

        started = time.perf_counter()
        self._template = GgufTemplate(file)
        self._server = open_server(
            file, CONTEXT_TOKENS, on_gpu=device != "cpu", template=self._template
        )
        self.load_s = time.perf_counter() - started
        self.runtime = name_runtime()

    def answer(self, turn: ChatTurn, say: Say, wish: Stoppable) -> ChatAnswer:
        said = [{"role": m.role, "content": m.content} for m in turn.messages]
        # llama.cpp renders the template without bounds.
        self._template.refuse_endless(said)
        clock, pieces, ends, problems = _Clock(), list[str](), list[str](), list[Any]()

        def hear(message: Any) -> bool:
            """Record a message of llama.cpp; return whether to stop."""
            # llama.cpp sends single chunks or lists of chunks, and errors in the same way.
            for chunk in message if isinstance(message, list) else [message]:
                if "choices" not in chunk:
                    problems.append(chunk.get("error", chunk))
                    continue
                for choice in chunk["choices"]:
                    if choice.get("finish_reason"):
                        ends.append(choice["finish_reason"])
                    piece = choice.get("delta", {}).get("content")
                    if piece:
                        clock.tick()
                        pieces.append(piece)
                        say(piece)
            return wish.stopped.is_set()

        asked = {
            "messages": said,
            "max_tokens": turn.max_tokens,
            "temperature": turn.temperature,
            "top_p": turn.top_p,
            "stream": True,
            # Thoughts are part of the text, as in Transformers; else they would be left out.
            "reasoning_format": "none",
        }
        self._server.handle_chat_completions(asked, hear)
        if problems:
            raise _explain(problems[0])
        # As above: with a finish reason, the answer ended before the stop was read.
        stopped = wish.stopped.is_set() and not ends
        return clock.report(
            "".join(pieces), len(pieces), self.runtime, cut="length" in ends, stopped=stopped
        )


def _explain(problem: Mapping[str, Any]) -> ExpectedError:
    if problem.get("type") == "exceed_context_size_error":
        return _too_long(int(problem["n_prompt_tokens"]), int(problem["n_ctx"]))
    words = problem.get("message") or json.dumps(problem)[:300]
    return ExpectedError(f"llama.cpp refuses this: {words}.", "Begin a new conversation")
