"""Choose the rows of all sources that are trained and evaluated, before any is tokenized.

In this order: copies are left out (`data.deduplicate`), each source is cut to its `max_rows`, and
rows are held out for evaluation (`data.eval`). Each choice depends only on the rows' contents and
order: a row is drawn by a hash of its content, so that nodes, ranks, seeds and further rows do not
matter. Rows of equal content are always held out together, so none of them is trained.

In memory a row takes 17 bytes, and about 80 more while copies are found.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.contract.data import HeldOut, RowChoice
from agents.contract.spec import Deduplicate
from agents.errors import ExpectedError
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.near_copies import find_near_copies

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Numbers of the rows of one source that are used, in ascending order."""

    train: Numbers
    held_out: Numbers


def digest_row(row: ConversationRow) -> int:
    """Return a hash of a row's content, 64 bits."""
    # ASCII, since Python versions differ in the characters that `repr` escapes.
    text = ascii(_content_of(row))
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "big")


def _content_of(value: Any) -> Any:
    """Return the content of a row as plain values, without fields that have their default."""
    # A later version may add fields: resumed runs must find the rows that they held out.
    if isinstance(value, tuple):
        return [_content_of(item) for item in value]
    names = _defaults_of(type(value))  # type: ignore[arg-type]
    if names is None:
        return value
    given = ((name, default, getattr(value, name)) for name, default in names)
    return [(name, _content_of(found)) for name, default, found in given if found != default]


@functools.cache
def _defaults_of(kind: Any) -> tuple[tuple[str, Any], ...] | None:
    """Return the fields of a dataclass with their defaults, without the row's number."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(
        (one.name, one.default) for one in dataclasses.fields(kind) if one.name != "number"
    )


def list_texts(row: ConversationRow) -> str:
    """Return all texts of a row, to compare it with others."""
    turns = (*row.turns, *row.rejected)
    return "\n".join(filter(None, (*(turn.content for turn in turns), row.text, row.rejected_text)))


class RowDigests:
    """Numbers and hashes of the usable rows of one source."""

    def __init__(self) -> None:
        self._numbers, self._digests = array("q"), array("Q")

    def read(self, rows: Iterable[ConversationRow]) -> Iterator[str]:
        """Add rows; yield the text of each."""
        for row in rows:
            self._numbers.append(row.number)
            self._digests.append(digest_row(row))
            yield list_texts(row)

    @property
    def numbers(self) -> Numbers:
        return np.frombuffer(self._numbers, dtype=np.int64)

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._digests, dtype=np.uint64)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRows:
    """Usable rows of one source."""

    name: str
    read: Callable[[], Iterable[ConversationRow]]
    max_rows: int | None = None


def choose_rows(
    sources: Sequence[SourceRows],
    *,
    deduplicate: Deduplicate = "off",
    held_out: HeldOut | None = None,
    shuffles: bool = True,
    evaluated: SourceRows | None = None,
) -> tuple[list[Chosen], RowChoice]:
    """Return the rows of each source to use, and the counts of the others.

    Args:
        sources: rows of each source.
        deduplicate: copies to leave out.
        held_out: part to hold out.
        shuffles: False takes the first rows of a limited source instead of random ones.
        evaluated: other evaluation data, of which no copy is trained.

    Raises:
        ExpectedError: a source has no row left, or more rows are to be held out than there are.
    """
    # Evaluation data first: of two copies the earlier one is kept.
    read = [RowDigests() for _ in range(len(sources) + (evaluated is not None))]
    first = len(read) - len(sources)
    everything = [*([evaluated] if evaluated is not None else []), *sources]
    is_first, is_near = _find_copies(read, everything, deduplicate)
    num_other = sum(len(rows.numbers) for rows in read[:first])
    is_first, is_near = is_first[num_other:], is_near[num_other:]
    mine = read[first:]
    digests = np.concatenate([rows.digests for rows in mine])
    is_kept = is_first & ~is_near
    num_unique = int(is_kept.sum())
    bounds = np.cumsum([0, *(len(rows.numbers) for rows in mine)]).tolist()
    for source, start, stop in zip(sources, bounds, bounds[1:], strict=False):
        if source.max_rows is not None:
            is_kept[start:stop] = _limit(
                is_kept[start:stop], digests[start:stop], source.max_rows, shuffles
            )
    is_out = np.zeros(len(digests), dtype=np.bool_)
    if held_out is not None:
        is_out = _hold_out(digests, is_kept, held_out)
    is_trained = is_kept & ~is_out
    parts = []
    for source, rows, start, stop in zip(sources, mine, bounds, bounds[1:], strict=False):
        if not is_trained[start:stop].any():
            raise _nothing_left(source.name, stop - start)
        numbers = rows.numbers
        train, out = is_trained[start:stop], is_out[start:stop]
        parts.append(Chosen(train=numbers[train], held_out=numbers[out]))
    choice = RowChoice(
        num_usable=len(digests),
        num_exact=int((~is_first).sum()),
        num_near=int((is_first & is_near).sum()),
        num_over=num_unique - int(is_kept.sum()),
        num_held_out=int(is_out.sum()),
        is_split=held_out is not None,
    )
    return parts, choice


def _find_copies(
    read: Sequence[RowDigests], sources: Sequence[SourceRows], deduplicate: Deduplicate
) -> tuple[Mask, Mask]:
    """Read all rows; return which are the first of their content, and which are near copies."""
    texts = (
        text
        for rows, source in zip(read, sources, strict=True)
        for text in rows.read(source.read())
    )
    is_near = find_near_copies(texts) if deduplicate == "near" else None
    for _ in texts:  # else nothing has read them yet
        pass
    digests = np.concatenate([rows.digests for rows in read])
    is_first = np.ones(len(digests), dtype=np.bool_)
    if deduplicate != "off":
        is_first[:] = False
        is_first[np.unique(digests, return_index=True)[1]] = True
    return is_first, np.zeros_like(is_first) if is_near is None else is_near


def _nothing_left(name: str, num_rows: int) -> ExpectedError:
    return ExpectedError(
        f"No row of {name} is left to train on: all of its {num_rows:,} usable rows are copies of "
        "earlier rows, or held out for evaluation.",
        "Take it out of the sources, or hold out fewer rows",
    )


def _limit(is_kept: Mask, digests: npt.NDArray[Any], most: int, shuffles: bool) -> Mask:
    """Return the first rows, or those with the smallest hashes."""
    places = np.flatnonzero(is_kept)
    if shuffles:
        places = places[np.argsort(digests[places], kind="stable")]
    limited = np.zeros_like(is_kept)
    limited[places[:most]] = True
    return limited


def _hold_out(digests: npt.NDArray[Any], is_kept: Mask, held_out: HeldOut) -> Mask:
    """Return the rows to hold out: those with the smallest hashes, equal rows together.

    Raises:
        ExpectedError: more are to be held out than there are, or too many are equal.
    """
    values, counts = np.unique(digests[is_kept], return_counts=True)
    num_rows = int(counts.sum())
    wanted = held_out.count(num_rows)
    if wanted >= num_rows:
        raise ExpectedError(
            f"data.eval asks for {wanted:,} rows, but the training data has only {num_rows:,} "
            "usable rows.",
            "Hold out fewer rows, or give a file for evaluation",
        )
    out, left = [], wanted
    # Many equal rows may be more than what is left; then later ones are taken.
    for value, count in zip(values, counts, strict=True):
        if not left:
            break
        if count <= left:
            out.append(value)
            left -= int(count)
    if wanted and not out and not held_out.is_auto:
        raise ExpectedError(
            f"No row can be held out for evaluation: each of the {num_rows:,} usable rows has "
            f"more than {wanted:,} copies.",
            "Set deduplicate: exact, or give a file for evaluation",
        )
    return np.isin(digests, np.array(out, dtype=np.uint64)) & is_kept
