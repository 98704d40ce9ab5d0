"""Make a pair of the best and the worst of several rated answers, as `data.columns` names them.

The answers are a list in one column (`candidates=completions`), or several columns
(`candidates=response_0, candidates=response_1`). One more entry says which is the best:
`score=` the highest, `rank=` the lowest, `best=` its place, from 0, or its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TEXT_KEYS = ("text", "response", "answer", "content", "completion", "output", "generation")
"""Names of the text of an answer in a list of objects, the likeliest first."""
SCORE_KEYS = ("overall_score", "score", "pm_score", "rating", "reward", "fine-grained_score")
RANK_KEYS = ("rank", "ranking")


def rank_answers(row: Mapping[Any, Any], columns: Mapping[str, str]) -> tuple[str, str]:
    """Return the best and the worst of the answers of a row.

    Args:
        row: columns of the row.
        columns: wanted name by the name in the data.

    Raises:
        ValueError: the row has no two answers, or does not say which is better.

    >>> row = {"n": [{"text": "a", "score": 1}, {"text": "b", "score": 3}]}
    >>> rank_answers(row, {"n": "candidates", "n.score": "score"})
    ('b', 'a')
    >>> row = {"r0": "a", "r1": "b", "better": 0}
    >>> rank_answers(row, {"r0": "candidates", "r1": "candidates", "better": "best"})
    ('a', 'b')
    """
    answers = [_text_of(one) for one in _gather(row, columns, "candidates")]
    if len(answers) < 2 or not all(answers):
        raise ValueError("the row has fewer than two candidates with a text")
    points = _rate(row, columns, len(answers))
    best, worst = max(points), min(points)
    if best == worst:
        raise ValueError("its candidates are rated alike")
    return answers[points.index(best)], answers[points.index(worst)]


def _rate(row: Mapping[Any, Any], columns: Mapping[str, str], count: int) -> list[float]:
    """Return the points of each answer, of which more are better."""
    for wanted, sign in (("score", 1), ("rank", -1)):
        if wanted in columns.values():
            values = _gather(row, columns, wanted)
            if len(values) != count:
                raise ValueError(f"the row has {count} candidates, but {len(values)} of '{wanted}'")
            return [sign * _number(value, wanted) for value in values]
    names = [name for name, wanted in columns.items() if wanted == "candidates"]
    (best,) = _gather(row, columns, "best") or (None,)
    place = names.index(best) if best in names else int(_number(best, "best"))
    if not 0 <= place < count:
        raise ValueError(f"'best' is {place}, but the row has {count} candidates")
    return [float(at == place) for at in range(count)]


def _number(value: Any, wanted: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"'{wanted}' is {value!r:.40}, not a number") from None


def _gather(row: Mapping[Any, Any], columns: Mapping[str, str], wanted: str) -> list[Any]:
    """Return the values of a wanted name: of one list, or of several columns."""
    found: list[Any] = []
    for name in (name for name, one in columns.items() if one == wanted):
        value = row.get(name)
        if value is None:  # a field of each answer: completions.score
            column, _, key = name.rpartition(".")
            inside = row.get(column)
            value = [_field(one, key) for one in inside] if isinstance(inside, list) else []
        found += value if isinstance(value, list) else [value]
    return found


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text_of(value: Any) -> str:
    if isinstance(value, dict):
        value = next((value[key] for key in TEXT_KEYS if isinstance(value.get(key), str)), "")
    return value if isinstance(value, str) and value.strip() else ""


def offer_ranking(row: Mapping[Any, Any]) -> list[str]:
    """Return the entries that make a pair of a row's rated answers; empty: they are not known.

    >>> offer_ranking({"answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 2}]})
    ['candidates=answers', 'rank=answers.rank']
    >>> offer_ranking({"response_0": "a", "response_1": "b", "better_response_id": 0})
    ['candidates=response_0', 'candidates=response_1', 'best=better_response_id']
    """
    for name, value in row.items():
        if not isinstance(value, list) or len(value) < 2:
            continue
        if all(isinstance(one, dict) and _text_of(one) for one in value):
            for wanted, keys in (("score", SCORE_KEYS), ("rank", RANK_KEYS)):
                key = next((key for key in keys if all(key in one for one in value)), "")
                if key:
                    return [f"candidates={name}", f"{wanted}={name}.{key}"]
        if all(isinstance(one, str) for one in value):
            rated = _find_rated(row, len(value))
            if rated:
                return [f"candidates={name}", rated]
    return _offer_sides(row)


def _find_rated(row: Mapping[Any, Any], count: int) -> str:
    for wanted, names in (
        ("score", ("scores", "ratings", "rewards", "score", "rating")),
        ("rank", ("ranks", "rank", "rankings", "ranking")),
    ):
        for name in names:
            value = row.get(name)
            points = value if isinstance(value, list) and len(value) == count else ["none"]
            if all(isinstance(one, (int, float)) for one in points):
                return f"{wanted}={name}"
    return ""


# Two columns of answers, and what says which is better: a place from 0, or points of each.
_SIDES: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    (("response_0", "response_1"), ("best=better_response_id",)),
    (("answer_0", "answer_1"), ("score=score_0", "score=score_1")),
    (("response_a", "response_b"), ("score=score_a", "score=score_b")),
    (("response_a", "response_b"), ("score=winner_model_a", "score=winner_model_b")),
    (("human_ref_A", "human_ref_B"), ("score=score_A", "score=score_B")),
    (("sol1", "sol2"), ("best=label",)),
)


def _offer_sides(row: Mapping[Any, Any]) -> list[str]:
    for sides, rated in _SIDES:
        if all(name in row for name in (*sides, *(one.partition("=")[2] for one in rated))):
            return [*(f"candidates={name}" for name in sides), *rated]
    return []
