"""Texts for calibrating and judging a quantized model, as token ids.

Held-out rows come from the run's evaluation data if it has some; else the last rows of each source
of its training data are held out, and calibration uses the others, or its own data file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from agents.contract.requests.exports import TextSource
from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.hub import find_data
from agents.trainer.data.rows import RowReader
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokens import tokenize_rows

CALIBRATION_ROWS = 128
"""Number of rows, as used for AWQ and GPTQ (Lin et al. 2023, arXiv:2306.00978; Frantar et al. 2022,
arXiv:2210.17323)."""
HELD_OUT_ROWS = 32
MOST_TOKENS = 512
"""Maximum length of a row; the rest is cut."""
LEAST_TOKENS = 64
"""Minimum number of tokens in all rows together for a meaningful calibration."""
_MOST_READ = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Token ids of rows."""

    calibration: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    held_out_from: Literal["evaluation", "training"]
    calibrated_with: str = "the run's training data"


def read_texts(
    train: Sequence[TextSource],
    evaluation: TextSource | None,
    tokenizer: Any,
    own: TextSource | None = None,
    most_tokens: int = MOST_TOKENS,
) -> Texts:
    """Return rows of both kinds, which have no row in common.

    Args:
        train: sources of the run's training data.
        evaluation: the run's evaluation data; None: not given.
        tokenizer: tokenizer of the model.
        own: data to calibrate with instead of the run's, of any format regardless of the run's
        objective; held-out rows still come from the run.
        most_tokens: maximum length of a row, for models with a shorter context.

    Raises:
        ExpectedError: the data cannot be read or is too short.
    """
    calibration, held_out = [], []
    for one in train:
        rows = _read(one, tokenizer, most_tokens)
        # Of short data, three quarters stay for calibration.
        apart = max(1, min(HELD_OUT_ROWS, len(rows) // 4)) if evaluation is None else 0
        calibration += rows[: len(rows) - apart]
        held_out += rows[len(rows) - apart :]
    if evaluation is not None:
        held_out = _read(evaluation, tokenizer, most_tokens, held_out_from=train[0].path)
    if own is not None:
        calibration = _read(own, tokenizer, most_tokens, of_any_objective=True)
    calibration, held_out = _spread(calibration, CALIBRATION_ROWS), _spread(held_out, HELD_OUT_ROWS)
    for kept, source in ((calibration, own), (held_out, evaluation)):
        if sum(map(len, kept)) < LEAST_TOKENS:
            names = [Path(one.path).name for one in ((source,) if source else train)]
            verb = "has" if len(names) == 1 else "have"
            raise ExpectedError(
                f"{' and '.join(names)} {verb} only {sum(map(len, kept))} tokens of use; "
                f"{LEAST_TOKENS} are the least that a model can be quantized and judged with.",
                "Name a data file with more text",
            )
    return Texts(
        calibration=tuple(calibration),
        held_out=tuple(held_out),
        held_out_from="evaluation" if evaluation is not None else "training",
        calibrated_with=f"`{Path(own.path).name}`" if own else "the run's training data",
    )


def split_blocks(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the rows joined and divided into blocks of one length, dropping the remainder.

    AutoAWQ joins its input. gptqmodel 7.6 searches AWQ's scales with all of its rows if they have
    one length and fit into one tensor, else with its last eight (`_layer_input_features`).

    >>> split_blocks([[1, 2], [3]])
    [[1, 2, 3]]
    >>> [len(block) for block in split_blocks([[7] * 400] * 3)]
    [512, 512]
    """
    joined = [token for row in rows for token in row]
    length = min(MOST_TOKENS, len(joined))
    return [joined[at : at + length] for at in range(0, len(joined) - length + 1, length)]


def _read(
    source: TextSource,
    tokenizer: Any,
    most_tokens: int,
    *,
    of_any_objective: bool = False,
    held_out_from: str | None = None,
) -> list[tuple[int, ...]]:
    files = find_data(source.path, held_out_from=held_out_from, split=source.split)
    tally = Tally(name=files.name)
    objective = "" if of_any_objective else source.objective  # empty: the reader accepts any format
    data = DataSpec(
        train=source.path,
        format=source.format,
        columns=source.columns,
        encoding=source.encoding,
        documents="line",
    )
    reader = RowReader(files, data, objective, tally)
    rows: list[tuple[int, ...]] = []
    for row in tokenize_rows(tokenizer, islice(reader, _MOST_READ), most_tokens):
        if isinstance(row, Skipped):
            reader.skip(row)
            continue
        rows.append(tuple(int(id) for id in row.segments[0].ids))
    tally.check_usable(len(rows))
    # A single token has no next token to predict.
    return [row for row in rows if len(row) > 1]


def _spread(rows: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Return `count` rows spread evenly over the data.

    >>> _spread([(1,), (2,), (3,), (4,), (5,)], 2)
    [(1,), (4,)]
    """
    if len(rows) <= count:
        return list(rows)
    return [rows[(2 * place * len(rows) // count + 1) // 2] for place in range(count)]
