"""Rows are chosen by their contents, before they are tokenized, the same ones on every node."""

from __future__ import annotations

import random

import numpy as np
import pytest

from agents.contract.data import SourceSpec, parse_held_out
from agents.errors import ExpectedError
from agents.trainer.data.conversations import ConversationRow, ConversationTurn
from agents.trainer.data.selection import SourceRows, choose_rows, digest_row
from tests.draws import seed


def source(texts, name="a", max_rows=None):
    rows = [ConversationRow(number=n, text=text) for n, text in enumerate(texts, 1)]
    return SourceRows(name=name, read=lambda: rows, max_rows=max_rows)


def words(count, start=0):
    return [f"row {number}" for number in range(start, start + count)]


def held_out_texts(texts, ask, **more):
    ((chosen,), choice) = choose_rows([source(texts)], held_out=parse_held_out(ask), **more)
    assert not set(chosen.train) & set(chosen.held_out)
    return sorted(texts[number - 1] for number in chosen.held_out), choice


@pytest.mark.parametrize(
    ("num_rows", "ask", "num_held_out"),
    [
        *((3, "auto", 0), (49, "auto", 0), (50, "auto", 1), (100, "auto", 2)),
        *((100_000, "auto", 200), (3, "0.05", 1), (1000, "0.05", 50), (1000, "200", 200)),
    ],
)
def test_the_held_out_part_has_exactly_so_many_rows(num_rows, ask, num_held_out):
    texts, choice = held_out_texts(words(num_rows), ask)
    assert len(texts) == choice.num_held_out == num_held_out
    assert choice.is_split


def test_held_out_rows_depend_neither_on_order_nor_on_the_other_sources():
    texts = words(200)
    before, _ = held_out_texts(texts, "20")
    shuffled = list(texts)
    random.Random(seed(3)).shuffle(shuffled)
    assert held_out_texts(shuffled, "20")[0] == before
    parts, _ = choose_rows(
        [source(texts[:90]), source(texts[90:], "b")], held_out=parse_held_out("20")
    )
    named = [texts[:90][n - 1] for n in parts[0].held_out]
    assert sorted(named + [texts[90:][n - 1] for n in parts[1].held_out]) == before


def test_no_copy_of_a_held_out_row_is_trained():
    texts = words(50) * 3
    ((chosen,), choice) = choose_rows([source(texts)], held_out=parse_held_out("30"))
    out = {texts[number - 1] for number in chosen.held_out}
    assert not out & {texts[number - 1] for number in chosen.train}
    assert len(chosen.held_out) == 30
    ((chosen,), choice) = choose_rows(
        [source(texts)], held_out=parse_held_out("5"), deduplicate="exact"
    )
    assert (len(chosen.train), len(chosen.held_out), choice.num_exact) == (45, 5, 100)


def test_of_evaluation_data_no_copy_is_trained():
    ((chosen,), choice) = choose_rows(
        [source(words(10))], deduplicate="exact", evaluated=source(words(3, 4), "eval")
    )
    assert chosen.train.tolist() == [1, 2, 3, 4, 8, 9, 10]
    assert (choice.num_exact, choice.num_usable) == (3, 10)


def test_copies_in_later_sources_are_left_out_before_rows_are_limited():
    parts, choice = choose_rows(
        [source(["x", "y", "x"]), source(["y", "z", "w", "v"], "b", max_rows=2)],
        deduplicate="exact",
        shuffles=False,
    )
    assert [part.train.tolist() for part in parts] == [[1, 2], [2, 3]]
    assert (choice.num_exact, choice.num_over, choice.num_usable) == (2, 1, 7)


def test_a_limit_takes_random_rows_unless_the_order_is_kept():
    texts = words(1000)
    ((first,), _) = choose_rows([source(texts, max_rows=10)], shuffles=False)
    assert first.train.tolist() == list(range(1, 11))
    ((drawn,), choice) = choose_rows([source(texts, max_rows=10)])
    assert len(drawn.train) == 10
    assert drawn.train.max() > 100
    assert (np.diff(drawn.train) > 0).all()
    assert choice.num_over == 990


@pytest.mark.parametrize(
    ("texts", "ask", "says"),
    [
        (words(10), "10", "data.eval asks for 10 rows, but the training data has only 10"),
        (words(10), "500", "data.eval asks for 500 rows"),
        (["same"] * 10, "3", "No row can be held out"),
    ],
)
def test_a_split_that_leaves_nothing_is_refused(texts, ask, says):
    with pytest.raises(ExpectedError, match=says):
        choose_rows([source(texts)], held_out=parse_held_out(ask))


def test_a_source_of_copies_alone_is_refused_by_name():
    with pytest.raises(ExpectedError, match=r"No row of b is left to train on: all of its 2"):
        choose_rows([source(words(9)), source(words(2), "b")], deduplicate="exact")


def test_contents_decide_about_copies_and_not_the_place_of_a_row():
    row = ConversationRow(number=1, text="caf\u00e9 \U0001fae8")
    assert digest_row(row) == digest_row(ConversationRow(number=7, text=row.text))
    assert digest_row(row) != digest_row(ConversationRow(number=1, text="cafe"))
    # Fixed: a resume with a later version must find the rows that were held out.
    turns = (
        ConversationTurn(role="user", content="Hi"),
        ConversationTurn(role="assistant", content="caf\u00e9"),
    )
    assert digest_row(ConversationRow(number=1, turns=turns)) == 11989340132787644575


def test_near_copies_are_found_and_sums_are_not():
    pytest.importorskip("rensa")
    story = " ".join(f"word{number}" for number in range(60))
    texts = [
        *(story, story.upper() + ".", story.replace("word30", "other"), "two and two are 4"),
        *("two and two are 5", "Two and two are 4!", "something else"),
    ]
    ((chosen,), choice) = choose_rows([source(texts)], deduplicate="near")
    assert chosen.train.tolist() == [1, 4, 5, 7]
    assert (choice.num_exact, choice.num_near) == (0, 3)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"weight": 0}, "weight is 0; it must be above 0"),
        ({"weight": -1}, "weight is -1; it must be above 0"),
        ({"weight": float("nan")}, "weight is nan; it must be above 0"),
        ({"max_rows": 0}, "max_rows is 0; it must be at least 1"),
        ({"split": "../x"}, "split is '../x'; it must be a name"),
        ({"path": " "}, "path is empty"),
        ({"columns": ("what=x",)}, "columns names 'what'"),
    ],
)
def test_a_source_says_what_is_wrong_with_it(values, says):
    with pytest.raises(ValueError, match=says):
        SourceSpec(**{"path": "a.jsonl", **values})


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "-0.1", "1e99"])
def test_a_share_has_to_be_one(text):
    with pytest.raises(ValueError, match=f"eval is {text}; it must be a share between 0 and 1"):
        parse_held_out(text)


def test_other_words_name_a_file():
    names = (None, "", "5.jsonl", "org/name", "automatic")
    assert not any(parse_held_out(name) for name in names)
