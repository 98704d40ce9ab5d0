"""Conversations of unlike length, as text for our data path and as tokens for our peers.

Lengths are log-normal, as those of public chat data are. Every word of the tokenizer is one token,
so a row has just the tokens that were drawn, in every engine. Words are added tokens, since some
families build the rest of a tokenizer by themselves, whatever its file says. Questions and answers
alternate; only the answers are learned, about 60 % of the tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = 1, 2
_SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_USER, _ASSISTANT = 4, 5
_MOST_WORDS = 512
_SHARE = 0.6
_SHORTEST = 16
_TURN_TOKENS = 400
"""A longer row has a second turn, and a third."""
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class ChatRow:
    """One conversation: as messages, and as tokens."""

    messages: list[dict[str, str]]
    ids: list[int]
    """Token ids (T,)."""
    is_target: list[bool]
    """Whether the prediction of each token counts (T,)."""


def draw_lengths(count: int, *, mean: float, sigma: float, most: int, seed: int = 11) -> list[int]:
    """Return numbers of tokens: log-normal with this mean before they are cut to `most`.

    >>> draw_lengths(3, mean=300, sigma=0.8, most=1024), draw_lengths(2, mean=50, sigma=0, most=99)
    ([82, 295, 483], [50, 50])
    """
    draw = random.Random(seed)
    middle = math.log(mean) - sigma**2 / 2
    lengths = (round(math.exp(draw.gauss(middle, sigma))) for _ in range(count))
    return [min(most, max(_SHORTEST, length)) for length in lengths]


def make_rows(lengths: Sequence[int], words: int, seed: int = 12) -> list[ChatRow]:
    """Return a row of each length, of random words.

    Args:
        lengths: Tokens of each row, 16 at least.
        words: Size of the model's vocabulary.
        seed: Of the words.
    """
    draw = random.Random(seed)
    return [_make_row(length, min(words, _MOST_WORDS), draw) for length in lengths]


def _make_row(length: int, words: int, draw: random.Random) -> ChatRow:
    turns = min(3, 1 + length // _TURN_TOKENS)
    # Each message has its role before it and an end behind it; the end of an answer is learned.
    spare = length - 1 - 4 * turns
    answers = min(spare - turns, max(turns, round(_SHARE * length) - turns))
    messages, ids, is_target = list[dict[str, str]](), [BEGIN], [False]
    for turn in range(turns):
        for role, share in ((_USER, spare - answers), (_ASSISTANT, answers)):
            count = share // turns + (turn < share % turns)
            said = [draw.randrange(len(_SPECIAL), words) for _ in range(count)]
            ids += [role, *said, END]
            is_target += [False, *[role == _ASSISTANT] * (count + 1)]
            name = _SPECIAL[role].strip("<|>")
            messages.append({"role": name, "content": _write(said)})
    return ChatRow(messages=messages, ids=ids, is_target=is_target)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A question with a chosen and a rejected answer."""

    chosen: ChatRow
    rejected: ChatRow


def make_pairs(lengths: Sequence[int], words: int, seed: int = 13) -> list[Pair]:
    """Return pairs whose chosen conversation has each length; the rejected answer is another one.

    Its length is that of the next pair's answer, so that both sides have the same mean.
    """
    draw = random.Random(seed)
    words = min(words, _MOST_WORDS)

    def say(count: int) -> list[int]:
        return [draw.randrange(len(_SPECIAL), words) for _ in range(count)]

    asked = [max(2, round((1 - _SHARE) * length) - 3) for length in lengths]
    answers = [say(max(1, length - one - 5)) for length, one in zip(lengths, asked, strict=True)]
    pairs = []
    for number, count in enumerate(asked):
        question = say(count)
        other = answers[(number + 1) % len(answers)]
        # No longer than the longest row, whatever is before it.
        most = max(lengths) - count - 5
        sides = (answers[number], [say(1)[0], *other[1:most]])
        chosen, rejected = (_join(question, answer) for answer in sides)
        pairs.append(Pair(chosen=chosen, rejected=rejected))
    return pairs


def _join(question: list[int], answer: list[int]) -> ChatRow:
    said = ((_USER, question), (_ASSISTANT, answer))
    ids = [BEGIN, *(token for role, text in said for token in (role, *text, END))]
    before = len(question) + 4
    return ChatRow(
        messages=[
            {"role": _SPECIAL[role].strip("<|>"), "content": _write(text)} for role, text in said
        ],
        ids=ids,
        is_target=[place >= before for place in range(len(ids))],
    )


def _write(tokens: Sequence[int]) -> str:
    return "".join(f"<w{token}>" for token in tokens)


def write_rows(path: Path, rows: Sequence[ChatRow]) -> Path:
    """Write rows as a file of our chat format."""
    lines = [json.dumps({"messages": row.messages}) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="ascii")
    return path


def to_preference(pair: Pair) -> dict[str, Any]:
    """Return a pair as a row of the preference format, ours and TRL's."""
    return {
        "prompt": pair.chosen.messages[:1],
        "chosen": pair.chosen.messages[1:],
        "rejected": pair.rejected.messages[1:],
    }


def write_pairs(path: Path, pairs: Sequence[Pair]) -> Path:
    """Write pairs as a file of our preference format."""
    lines = [json.dumps(to_preference(pair)) + "\n" for pair in pairs]
    path.write_text("".join(lines), encoding="ascii")
    return path


def make_tokenizer(words: int) -> Any:
    """Return a tokenizer whose word `<w17>` is the token 17."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    known = [f"<w{i}>" for i in range(len(_SPECIAL), min(words, _MOST_WORDS))]
    vocabulary = {word: place for place, word in enumerate([*_SPECIAL, *known])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in known])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=_TEMPLATE, pad_token=_SPECIAL[0],
        bos_token=_SPECIAL[1], eos_token=_SPECIAL[2],
        additional_special_tokens=list(_SPECIAL[3:]), model_max_length=1 << 20,
    )  # fmt: skip


def save_tokenizer(folder: Path, words: int) -> None:
    """Save the tokenizer beside a model.

    Raises:
        ValueError: the model's family reads it in another way.
    """
    from transformers import AutoTokenizer

    make_tokenizer(words).save_pretrained(folder)
    (row,) = make_rows([40], words)
    text = make_tokenizer(words).apply_chat_template(row.messages, tokenize=False)
    found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if found(text, add_special_tokens=False)["input_ids"] != row.ids:
        raise ValueError(f"{type(found).__name__} reads other tokens from {folder}")
