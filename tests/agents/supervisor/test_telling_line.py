"""A log's line that says why a rank ended is quoted, a library's warning after it is not."""

from __future__ import annotations

import pytest

from agents.supervisor.ranks import find_telling_line

HARMLESS = [
    "/lib/torch/cuda.py:7: FutureWarning: this may fail in a later version",
    "warnings.warn(",
    "`torch_dtype` is deprecated! Use `dtype` instead!",
    "2026-11-28 19:00:01,123 - transformers - WARNING - weights not found, using defaults",
    "WARNING:root:could not open the cache",
    "[rank0]:[W1128 19:00:01.5 socket.cpp:755] [c10d] hostname cannot be retrieved",
    "W1128 19:00:01.500000 12 register.py:20] error of a plugin is ignored",
    "Loading weights:  40%|####      | 2/5 [00:01<00:02,  1.9it/s]",
    "2026-11-28 19:00:00 rank 0 of 2 of run r1, attempt 1, on cpu of a, process 7",
    "Some weights of the model were newly initialized",
]
TELLING = [
    "ValueError: no good",
    "torch.OutOfMemoryError: CUDA out of memory",
    "RuntimeError: WARNING was turned into an error",
    "Fatal Python error: Segmentation fault",
    "free(): invalid pointer",
    "terminate called after throwing an instance of 'c10::Error'",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_harmless_lines_are_not_quoted(line: str) -> None:
    assert find_telling_line([line]) == ""
    assert find_telling_line(["ValueError: no good", line]) == "ValueError: no good"


@pytest.mark.parametrize("line", TELLING)
def test_reasons_are_quoted_in_spite_of_what_follows(line: str) -> None:
    assert find_telling_line([*HARMLESS, line, *HARMLESS]) == line
