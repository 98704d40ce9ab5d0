"""Speed of tokenizing with packing, compared with the tokenizers library alone.

`python -m tests.bench.bench_tokenize [--rows N] [--only KIND]`: chats of two and of ten turns, with
templates that write earlier answers alike and otherwise, and texts. Both see the same texts in the
same process: the library gets them rendered, in batches, on all cores; the trainer reads, renders,
tokenizes, marks, packs and writes. Rates are of the processor's time, so that other programs do not
count, and of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agents.contract.spec import DataSpec, RunSpec
from agents.trainer.data.cache import load_examples
from agents.trainer.data.rows import find_files
from tests.agents.trainer.data import published

_TEXT = (
    "the river of Kelmar runs by a mill and the market is on Monday when people of the valley come "
    "to trade wool and bread for lanterns; Oren Dale laid the first stone of the bridge there."
)
_WORDS = _TEXT.split()


def _say(row: int, words: int) -> str:
    return " ".join(_WORDS[(row * 7 + place) % len(_WORDS)] for place in range(words))


def _chat(row: int, turns: int) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[place % 2], "content": _say(row + place, 12 if place % 2 == 0 else 40)}
            for place in range(turns)
        ]
    }


KINDS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "short chats": ("qwen2_5", lambda row: _chat(row, 2)),
    "long chats": ("qwen2_5", lambda row: _chat(row, 10)),
    "short chats, thinking": ("qwen3", lambda row: _chat(row, 2)),
    "long chats, thinking": ("qwen3", lambda row: _chat(row, 10)),
    "texts": ("qwen2_5", lambda row: {"text": _say(row, 400)}),
}


@contextmanager
def _timed(into: dict[str, float]) -> Iterator[None]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield
    into |= {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}


def measure(kind: str, num_rows: int) -> dict[str, Any]:
    """Return the tokens per second of both."""
    name, make = KINDS[kind]
    template = published.read(name)
    tokenizer = published.make_tokenizer(f"{template}<think></think>", published.find_end(name))
    tokenizer.chat_template = template
    rows = [make(row) for row in range(num_rows)]
    texts = [
        row["text"]
        if "text" in row
        else str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
        for row in rows
    ]
    alone: dict[str, float] = {}
    backend = tokenizer.backend_tokenizer
    backend.encode_batch(texts[:100])
    with _timed(alone):
        num_tokens = sum(
            len(one.ids)
            for start in range(0, num_rows, 512)
            for one in backend.encode_batch(texts[start : start + 512], add_special_tokens=False)
        )
    ours: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = RunSpec(
            model="m", data=DataSpec(train=str(path)), sequence_tokens=2048, packing=True
        )
        with _timed(ours):
            found = load_examples(find_files(path), "0", spec, tokenizer, Path(folder, "cache"))
        trained = int(found.num_tokens.sum())
    shares = {key: trained / ours[key] / (num_tokens / alone[key]) for key in ("wall_s", "cpu_s")}
    return {
        "kind": kind,
        "tokens": trained,
        "tokens_per_cpu_s": round(trained / ours["cpu_s"]),
        "library_tokens_per_cpu_s": round(num_tokens / alone["cpu_s"]),
        "share_wall": round(shares["wall_s"], 2),
        "share_cpu": round(shares["cpu_s"], 2),
    }


def main() -> None:
    """Measure each kind and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--only", choices=KINDS, action="append")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    for kind in args.only or KINDS:
        print(json.dumps(measure(kind, args.rows)), flush=True)


if __name__ == "__main__":
    main()
