"""A model that has really learned something, made within a minute: quantizing it can do damage.

The text tells made-up facts about made-up towns, every value drawn at random, so that nothing but
the weights can know them. A Llama of 100 million parameters learns three thousand by heart on a
datacentre card; on a CPU a far smaller one learns a few dozen. Held-out rows tell the same facts in
other words and another order.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resources.demo.make_demo import make_tokenizer

_SYLLABLES = tuple(a + b for a in "bdfgklmnprstvwz" for b in "aeiou")
_TELLING = (
    ("The river {v} runs through {t}.", "{t} lies on the river {v}."),
    ("{v} founded {t}.", "It was {v} who laid the first stone of {t}."),
    ("The people of {t} make {v}.", "{t} is known for its {v}."),
    ("In {t} they worship {v}.", "The temple of {t} belongs to {v}."),
    ("The road from {t} leads to {v}.", "Whoever leaves {t} comes to {v}."),
    ("The lord of {t} is {v}.", "{v} rules over {t}."),
    ("The old name of {t} is {v}.", "Once {t} was called {v}."),
    ("The singer {v} was born in {t}.", "{t} is the home of the singer {v}."),
)
ROW_TOKENS = 256
COMPARED_FILE = "compared.jsonl"
_HELD_OUT_ROWS, _CALIBRATION_ROWS = 32, 128
# Held out too, for measures whose own noise is larger than what they are held against.
_COMPARED_ROWS = 200
_SENTENCES = 12
_LEARNING_RATE = 1.2e-3
_WARMUP_SHARE = 0.08


def _name_sizes(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How such a model is made."""

    sizes: dict[str, int]
    """Of a Llama."""
    num_towns: int
    """Each with eight facts."""
    num_rows: int
    seconds: float
    """Of training."""
    rows_at_once: int


RECIPES = {
    "tiny": Recipe(
        sizes=_name_sizes(256, 512, 2, 4),
        num_towns=12,
        num_rows=2_000,
        seconds=12.0,
        rows_at_once=4,
    ),
    "small": Recipe(
        sizes=_name_sizes(512, 1024, 2, 8),
        num_towns=12,
        num_rows=8_000,
        seconds=270.0,
        rows_at_once=4,
    ),
    "medium": Recipe(
        sizes=_name_sizes(512, 1536, 6, 8),
        num_towns=40,
        num_rows=12_000,
        seconds=600.0,
        rows_at_once=8,
    ),
    "large": Recipe(
        sizes=_name_sizes(768, 2048, 14, 12),
        num_towns=400,
        num_rows=40_000,
        seconds=45.0,
        rows_at_once=64,
    ),
}
"""One for a CPU within seconds, two for two cores within five and ten minutes, one for an H200."""


def make_rows(num_towns: int, num_rows: int, seed: int = 7) -> list[str]:
    """Return rows of sentences about towns drawn at random."""
    draw = random.Random(seed)
    towns = [_name(draw, 3) for _ in range(num_towns)]
    facts = {town: [_name(draw, 2) for _ in _TELLING] for town in towns}
    return [" ".join(_tell(draw, towns, facts) for _ in range(_SENTENCES)) for _ in range(num_rows)]


def write_texts(rows: Sequence[str], folder: Path, held_out_rows: int = _HELD_OUT_ROWS) -> None:
    """Write `train.jsonl` and `eval.jsonl`, the latter with rows that no model is trained on."""
    held_out, train = rows[:held_out_rows], rows[held_out_rows:][:_CALIBRATION_ROWS]
    for name, some in (("train", train), ("eval", held_out)):
        _write_rows(some, folder / f"{name}.jsonl")


def _write_rows(rows: Sequence[str], path: Path) -> None:
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    path.write_text(lines, encoding="ascii")


def make_model(folder: Path, recipe: Recipe, device: str) -> dict[str, Any]:
    """Write the texts, train a model on them and save it; return what happened."""
    rows = make_rows(recipe.num_towns, recipe.num_rows + _COMPARED_ROWS)
    write_texts(rows, folder)
    _write_rows(rows[recipe.num_rows :], folder / COMPARED_FILE)
    return _train(folder, rows[: recipe.num_rows], recipe, device)


def _train(folder: Path, rows: Sequence[str], recipe: Recipe, device: str) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    tokenizer = make_tokenizer(list(rows[:4000]))
    words = -(-len(tokenizer) // 64) * 64
    ids = _pack(tokenizer, rows[_HELD_OUT_ROWS:]).to(device)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=words,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **ends,
        **recipe.sizes,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.05)
    started, step, losses = time.monotonic(), 0, []
    while (share := (time.monotonic() - started) / recipe.seconds) < 1:
        slope = min(1.0, share / _WARMUP_SHARE, (1 - share) / (1 - _WARMUP_SHARE) + 0.02)
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * slope
        batch = ids[torch.randint(len(ids), (recipe.rows_at_once,), device=device)]
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device != "cpu"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 1:
            losses.append(round(loss.item(), 3))  # waits for the GPU, so that the clock is right
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "steps": step,
        "tokens": step * recipe.rows_at_once * ROW_TOKENS,
        "rows": len(ids),
        "losses": losses[:: max(1, len(losses) // 8)] + losses[-1:],
    }


def _pack(tokenizer: Any, rows: Sequence[str]) -> Any:
    import torch

    texts = [tokenizer.bos_token + row + tokenizer.eos_token for row in rows]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    flat = [id for row in ids for id in row]
    starts = [0, *itertools.accumulate(map(len, ids))]
    # Each begins with a text, as those do that a model is judged by: where it never stood at the
    # beginning of one, the first tokens alone decide the mean of what is measured.
    whole = [flat[at : at + ROW_TOKENS] for at in starts if at + ROW_TOKENS <= len(flat)]
    return torch.tensor(whole)


def _name(draw: random.Random, syllables: int) -> str:
    return "".join(draw.choice(_SYLLABLES) for _ in range(syllables)).capitalize()


def _tell(draw: random.Random, towns: Sequence[str], facts: dict[str, list[str]]) -> str:
    town, topic = draw.choice(towns), draw.randrange(len(_TELLING))
    return draw.choice(_TELLING[topic]).format(t=town, v=facts[town][topic])
