"""GGUF models in llama.cpp, inside this process: predictions and answers.

xllamacpp contains llama.cpp ready-built; its server is called as a function or, for some requests,
by the port that it opens on 127.0.0.1. It reports only the likeliest words, so a comparison treats
all others as one: the measured distance omits differences among words beyond the first thousand.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agents.errors import ExpectedError
from agents.limits import count_cpus
from agents.quantizers.inference.gguf_template import GgufTemplate

NUM_WORDS = 1000
_SPARE_TOKENS = 64
_ALL_LAYERS = 999

# Added to the logit of a token to force its choice.
_ALWAYS = 1e6


def open_server(
    path: Path,
    context_tokens: int,
    *,
    on_gpu: bool = False,
    num_threads: int | None = None,
    template: GgufTemplate | None = None,
) -> Any:
    """Load a GGUF file; its layers go to the GPU if xllamacpp was built for one.

    Args:
        path: path of the file.
        context_tokens: maximum length of a text, in tokens.
        on_gpu: True to put the layers on the GPU.
        num_threads: number of computing threads; None: one per core.
        template: template of the file, if it was tried before.

    Raises:
        ExpectedError: llama.cpp cannot load it, or its chat template does not end.
    """
    import xllamacpp

    if template is None:
        GgufTemplate(path)

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = context_tokens
    params.n_gpu_layers = _ALL_LAYERS if on_gpu else 0
    params.warmup = False
    if num_threads is not None:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        reason = _find_reason(_hear(lambda: xllamacpp.Server(params)))
        raise ExpectedError(
            f"{name_runtime()} cannot load {path.name}{reason}.",
            "It may not know this kind of model, or the memory was not enough: choose another "
            "format or node",
        ) from error


def _hear(load: Callable[[], Any]) -> str:
    """Return the output of llama.cpp while it fails once more, since its error has no reason."""
    sys.stderr.flush()
    # llama.cpp prints from C++, so the descriptor is redirected, not sys.stderr.
    kept = os.dup(2)
    with tempfile.TemporaryFile() as heard:
        os.dup2(heard.fileno(), 2)
        try:
            with contextlib.suppress(RuntimeError):
                load()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        heard.seek(0)
        return heard.read().decode("utf-8", "replace")


def _find_reason(said: str) -> str:
    """Return why a file was not loaded, to follow a sentence; empty: not known.

    >>> _find_reason("0.01 E load: error loading model: unknown architecture\\n0.02 E x")
    ': unknown architecture'
    >>> _find_reason("0.01 I srv: loading")
    ''
    """
    _, _, reason = said.partition("error loading model: ")
    line = reason.strip().partition("\n")[0].strip()[:300]
    return f": {line}" if line else ""


def name_runtime() -> str:
    """Return the name of the program for GGUF files, with its version."""
    return f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})"


class LlamaCpp:
    """Loaded GGUF file.

    Args:
        path: path of the file.
        num_words: size of the model's vocabulary.
        context_tokens: maximum length of a text with its answer, in tokens.
        on_gpu: True to put the layers on the GPU.
    """

    def __init__(
        self, path: Path, *, num_words: int, context_tokens: int, on_gpu: bool = False
    ) -> None:
        # Its threads spin while they wait for each other: if one shares its core with another
        # program, a token takes a hundred times as long.
        spare = max(1, count_cpus() - 1)
        self._server = open_server(
            path, context_tokens + _SPARE_TOKENS, on_gpu=on_gpu, num_threads=spare
        )
        self._num_words = num_words
        self._whole_word = self._find_whole_word()

    def _find_whole_word(self) -> int:
        """Return a token that is complete UTF-8.

        llama.cpp omits the probabilities for partial characters, which many tokens of most
        languages are. The probabilities do not depend on the chosen token, so this one is always
        forced when they are needed.
        """
        for token in range(self._num_words):
            answer = self._complete([0], 1, n_probs=1, logit_bias={str(token): _ALWAYS})
            if answer["choices"][0]["logprobs"]:
                return token
        raise RuntimeError("llama.cpp returns no token probabilities")

    def predict(self, row: Sequence[int]) -> Tensor:
        """Return log-probabilities (T - 1, V); words beyond the likeliest share the remainder."""
        logs_TV = torch.empty(len(row) - 1, self._num_words)
        asked = {
            "n_probs": min(NUM_WORDS, self._num_words),
            "logit_bias": {str(self._whole_word): _ALWAYS},
        }
        for place in range(1, len(row)):
            answer = self._complete(row[:place], 1, **asked)
            (first, *_) = answer["choices"][0]["logprobs"]["content"]
            found = {int(w["id"]): _read_number(w["logprob"]) for w in first["top_logprobs"]}
            # Rounding can bring the sum above 1, but the logarithm needs a positive number.
            left = max(1e-12, 1.0 - sum(map(math.exp, found.values())))
            others = max(1, self._num_words - len(found))
            logs_V = logs_TV[place - 1].fill_(math.log(left / others))
            logs_V[list(found)] = torch.tensor(list(found.values()))
        return logs_TV.log_softmax(-1)

    def answer(self, row: Sequence[int], num_tokens: int) -> list[int]:
        """Return the likeliest next tokens up to the end of the answer."""
        answer = self._complete(row, num_tokens, return_tokens=True, verbose=True)
        return [int(token) for token in answer["__verbose"]["tokens"]]

    def split(self, text: str) -> list[int]:
        """Return llama.cpp's tokens of a text."""
        asked = {"content": text, "add_special": False, "parse_special": True}
        # xllamacpp has no function for tokenizing.
        place = urlsplit(self._server.listening_address)
        connection = http.client.HTTPConnection(str(place.hostname), place.port)
        with contextlib.closing(connection):
            connection.request("POST", "/tokenize", json.dumps(asked))
            answer = json.loads(connection.getresponse().read())
        return [int(token) for token in answer["tokens"]]

    def time(self, row: Sequence[int], num_tokens: int) -> tuple[float, float]:
        """Return seconds to the first token, and tokens per second after it."""
        # A cached prompt would make the first token free; an early end would give no speed.
        asked = {"cache_prompt": False, "ignore_eos": True}
        timings = self._complete(row, num_tokens, **asked)["timings"]
        return timings["prompt_ms"] / 1e3, timings["predicted_per_second"]

    def _complete(self, row: Sequence[int], num_tokens: int, **more: Any) -> dict[str, Any]:
        asked = {
            "prompt": list(map(int, row)),
            "n_predict": num_tokens,
            "temperature": 0.0,
            "cache_prompt": True,
            **more,
        }
        answer = self._server.handle_completions(asked)
        if not isinstance(answer, dict) or "choices" not in answer:
            raise RuntimeError(f"llama.cpp answered {str(answer)[:300]}")
        return answer


def _read_number(value: float | None) -> float:
    """Return a number that is null in JSON, which has no NaN, for a broken model."""
    return math.nan if value is None else float(value)
