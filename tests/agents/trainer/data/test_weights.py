"""Weights of messages and of their parts become weights of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.contract.spec import DataSpec
from agents.shared.data.findings import refusals
from agents.trainer.data import preview
from agents.trainer.data.conversations import read_row
from agents.trainer.data.joined import JoinedExamples
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.agents.trainer.data.test_preview import make_job
from tests.agents.trainer.data.test_store import load
from tests.fakes.site import DEMO


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO / "model")[0]


def ask(*answers: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation with these answers; a question has a weight, which says nothing."""
    asked = {"role": "user", "content": "q", "weight": 0.7}
    return {
        "messages": [
            message for one in answers for message in (asked, {"role": "assistant", **one})
        ]
    }


def parts_of(*parts: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "weight": weight} for text, weight in parts]


def weights_of(tokenizer: Any, row: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the learned text, cut where the weight changes."""
    read = read_row(1, row, "chat")
    assert not isinstance(read, str)
    (found,) = tokenize_rows(tokenizer, [read], 512)
    assert not isinstance(found, Skipped), found
    (segment,) = found.segments
    weights = np.ones(len(segment.ids)) if segment.weights is None else segment.weights
    runs: list[tuple[str, float]] = []
    for place in np.flatnonzero(segment.is_target):
        text, weight = tokenizer.decode(segment.ids[[place]]), float(weights[place])
        if runs and runs[-1][1] == weight:
            text = runs.pop()[0] + text
        runs.append((text, weight))
    assert segment.weight == sum(weights[segment.is_target].tolist())
    return runs


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([{"content": "a", "weight": 0.5}], [("a<|end|>", 0.5)]),
        ([{"content": "a", "loss_weight": "0.25"}], [("a<|end|>", 0.25)]),
        ([{"content": "a", "mask": 0.25}], [("a<|end|>", 0.75)]),
        ([{"content": "a", "weight": 100}], [("a<|end|>", 100)]),
        ([{"content": "a", "weight": 2, "train": True}], [("a<|end|>", 2)]),
        ([{"content": "a", "weight": 2, "loss_weight": 0.5}], [("a<|end|>", 0.5)]),
        ([{"content": "a", "weight": 0.5}, {"content": "b"}], [("a<|end|>", 0.5), ("b<|end|>", 1)]),
        (
            [{"content": parts_of(("one", 0.5), (" two", 1), (" three", 4))}],
            [("one", 0.5), (" two", 1), (" three<|end|>", 4)],
        ),
        (
            [{"content": parts_of(("one", 0.5), (" two", 0), (" three", 1)), "weight": 0.5}],
            [("one", 0.25), (" three<|end|>", 0.5)],
        ),
        (
            [
                {
                    "content": "one two",
                    "train_detail": [{"begin_offset": 3, "end_offset": 6, "weight": 0.125}],
                }
            ],
            [("one", 1), (" two<|end|>", 0.125)],
        ),
    ],
)
def test_a_weight_is_that_of_its_tokens(
    tokenizer: Any, answers: list[dict[str, Any]], wanted: list[tuple[str, float]]
) -> None:
    assert weights_of(tokenizer, ask(*answers)) == wanted


@pytest.mark.parametrize("weights", [(0.5, 4), (4, 0.5), (4, 1), (1, 4)])
def test_a_token_of_two_parts_has_the_smaller_weight(
    tokenizer: Any, weights: tuple[float, float]
) -> None:
    assert len(tokenizer(" river", add_special_tokens=False)["input_ids"]) == 1
    cut = parts_of(("the ri", weights[0]), ("ver runs", weights[1]))
    (first, one), (last, other) = weights_of(tokenizer, ask({"content": cut}))
    assert (one, other) == weights
    assert first + last == "the river runs<|end|>"
    assert (" river" in first) == (weights[0] < weights[1])


@given(
    st.lists(
        st.tuples(st.sampled_from(["aa ", "bb ", " cc", "d"]), st.sampled_from([0.0, 0.3, 1, 7])),
        min_size=1,
    ),
    st.sampled_from([0.5, 1, 3]),
)
def test_every_token_has_the_smallest_weight_of_its_characters(
    parts: list[tuple[str, float]], whole: float
) -> None:
    tokenizer = load_tokenizer(DEMO / "model")[0]
    row = read_row(1, ask({"content": parts_of(*parts), "weight": whole}), "chat")
    if isinstance(row, str):
        return
    (found,) = tokenize_rows(tokenizer, [row], 512)
    if isinstance(found, Skipped):
        return
    (segment,) = found.segments
    said = "".join(text for text, _ in parts)
    by_char = [weight * whole for text, weight in parts for _ in text]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}], tokenize=False
    )
    begin = text.rindex("<|assistant|>") + len("<|assistant|>")
    shown = said if text[begin:].startswith(said) else said.strip()
    by_char = by_char[said.index(shown) :]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for place, (start, stop) in enumerate(offsets["offset_mapping"]):
        own = by_char[max(0, start - begin) : max(0, min(stop - begin, len(shown)))]
        if not own or start < begin:
            continue
        assert segment.is_target[place] == (min(own) > 0)
        if segment.is_target[place]:
            weight = 1 if segment.weights is None else segment.weights[place]
            assert weight == pytest.approx(min(own), rel=1e-6)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_without_weights_nothing_else_is_stored(tmp_path: Path, tokenizer: Any) -> None:
    plain = [ask({"content": f"a {number}"}) for number in range(5)]
    ones = [ask({"content": f"a {number}", "weight": 1, "train": True}) for number in range(5)]
    folders = []
    for name, rows in (("plain", plain), ("ones", ones)):
        found = load(write(tmp_path / f"{name}.jsonl", rows), tokenizer, tmp_path / name)
        assert found.weights is found.num_targets
        assert found[0].segments[0].weights is None
        folders.append({file.name: file.read_bytes() for file in found.folder.iterdir()})
    for files in folders:
        assert not [name for name in files if "weights" in name]
        del files["about.json"]
    assert folders[0] == folders[1]


@pytest.mark.parametrize("packing", [False, True])
def test_stored_weights_come_back(tmp_path: Path, tokenizer: Any, packing: bool) -> None:
    rows = [ask({"content": "word " * (1 + number % 9)}) for number in range(30)]
    for number in range(11, 30, 3):  # the first one has none
        rows[number]["messages"][1]["weight"] = 0.1 * number
    path = write(tmp_path / "a.jsonl", rows)
    found = load(path, tokenizer, tmp_path / "c", packing=packing)
    assert len(found) < 30 if packing else len(found) == 30
    for example, total in zip(found, found.weights, strict=True):
        assert total == sum(segment.weight for segment in example.segments)
        for segment in example.segments:
            own = rows[segment.row - 1]["messages"][1].get("weight", 1)
            assert segment.weights is not None
            assert segment.weights[segment.is_target] == pytest.approx(own, rel=1e-6)
    assert found.weights.sum() == pytest.approx(
        sum(segment.num_targets * rows[segment.row - 1]["messages"][1].get("weight", 1)
            for example in found for segment in example.segments)
    )  # fmt: skip
    plain = load(write(tmp_path / "b.jsonl", rows[:3]), tokenizer, tmp_path / "d", sha256="1")
    joined = JoinedExamples([("plain", plain), ("weighted", found)])
    assert joined.weights.tolist() == [*plain.weights.tolist(), *found.weights.tolist()]
    assert joined[1].segments[0].weights is None
    assert joined[3].segments[0].weights is not None


def test_weights_in_any_order_add_up_to_the_same(tokenizer: Any) -> None:
    answers = [{"content": "word " * 30, "weight": number / 997} for number in range(1, 900, 7)]
    rows = [read_row(1, ask(answer), "chat") for answer in answers]
    (*found,) = tokenize_rows(tokenizer, [row for row in rows if not isinstance(row, str)], 512)
    sums = [row.segments[0].weight for row in found if not isinstance(row, Skipped)]
    assert len(sums) == len(answers)
    assert sum(sums) == sum(sums[::-1]) == sum(sums[::2]) + sum(sums[1::2])


@pytest.mark.parametrize("folds", [False, True])
def test_weights_of_all_roles_count_if_everything_is_learned(folds: bool) -> None:
    tokenizer = load_tokenizer(DEMO / "model")[0]
    if folds:
        refused = "{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        begin = "{% for message in messages %}"
        tokenizer.chat_template = begin + refused + (
            "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
        )  # fmt: skip
    asked = [("system", "Be", 0.25), ("user", "What", 0.5), ("assistant", "That", 2)]
    names = ("role", "content", "weight")
    row = {"messages": [dict(zip(names, one, strict=True)) for one in asked]}
    read = read_row(1, row, "chat")
    assert not isinstance(read, str)
    (found,) = tokenize_rows(tokenizer, [read], 512, learn="everything")
    assert not isinstance(found, Skipped)
    (segment,) = found.segments
    assert segment.weights is not None
    offset = 0
    text = tokenizer.decode(segment.ids)
    for _, said, weight in asked:
        place = text.index(said, offset)
        offset = place + len(said)
        first, last = (
            len(tokenizer(text[:end], add_special_tokens=False)["input_ids"])
            for end in (place, offset)
        )
        assert set(segment.weights[first:last].tolist()) == {weight}


def test_forms_that_are_known_already_keep_their_weights(tokenizer: Any) -> None:
    rows = []
    for number in range(9):
        row = ask({"content": f"a {number}", "weight": 0.5 if number == 8 else 1})
        row["messages"][0] = {"role": "user", "content": "q"}
        rows.append(read_row(number, row, "chat"))
    *_, last = tokenize_rows(tokenizer, [row for row in rows if not isinstance(row, str)], 512)
    assert not isinstance(last, Skipped)
    assert last.segments[0].weight == last.segments[0].num_targets / 2


def test_pairs_with_weights_are_refused_by_name(tmp_path: Path) -> None:
    chosen = [{"role": "assistant", "content": "a", "weight": 0.5}]
    pair = {"prompt": "q", "chosen": chosen, "rejected": [{"role": "assistant", "content": "b"}]}
    tally = Tally(name="a")
    files = find_files(write(tmp_path / "a.jsonl", [pair]))
    reader = RowReader(files, DataSpec(train="-"), "dpo", tally)
    assert not list(reader)
    assert tally.named[0].reason == "a message of 'chosen' has a weight, but pairs have none"
    assert [one.column for one in refusals(reader.findings)] == ["messages[].weight"]


def test_a_preview_shows_weighted_parts_as_learned(tmp_path: Path) -> None:
    row = ask({"content": parts_of(("one", 0.5), (" two", 0), (" three", 2))})
    path = write(tmp_path / "a.jsonl", [row])
    found = preview.preview(make_job(path), tmp_path)
    ((conversation,),) = [row.conversations for row in found.rows]
    learned = [part.text for part in conversation.parts if part.learned]
    assert learned == ["one", " three<|end|>"]
    kinds = {(one.kind, one.consequence) for one in found.findings}
    assert {("weighted", "note"), ("masked", "note")} <= kinds
