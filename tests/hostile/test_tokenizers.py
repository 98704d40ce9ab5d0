"""A stranger's tokenizer.json ends in a clear error in every program that reads it.

Its rules can make a million tokens of a letter, search for hours in one regular expression, or nest
deeper than a reader can follow. They are tried where a tokenizer is read, in the preview of data
and in a rank.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.program import command
from agents.shared.files.bounded_work import KILLS, TOKENIZER_MESSAGE
from agents.supervisor.verdict import SIGNAL_CAUSES
from app.core.core import Core
from app.core.library import PreviewData, ReadRunFile
from app.errors import UserError
from tests.agents.trainer.conftest import fork_server
from tests.agents.trainer.ranks import Run, finish, make_spec
from tests.hostile.planted import copy_model, write_run_file
from tests.hostile.test_chat_templates import run_limited

__all__ = ["fork_server"]
Rules = dict[str, Any]


def grow(times: int, count: int, letter: str = "e") -> Rules:
    rule = {"type": "Replace", "pattern": {"String": letter}, "content": letter * times}
    return {"type": "Sequence", "normalizers": [rule] * count}


def nest(kind: str, key: str, inner: Rules, depth: int) -> Rules:
    for _ in range(depth):
        inner = {"type": kind, key: [inner]}
    return inner


def split(pattern: str) -> Rules:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


SLOW = r"(.*)(.*)(.*)(?=\b)(?=\B)"
"""Searches for seconds in each row, and each time gives up before the library's own limit."""
BOMBS: dict[str, tuple[str, Rules]] = {
    "a letter of a million tokens": ("normalizer", grow(10, 6)),
    "a rule that fits everywhere": (
        "normalizer",
        {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"Regex": ""}, "content": "y" * 40}] * 5,
        },
    ),
    "an expression that backtracks": (
        "normalizer",
        {"type": "Replace", "pattern": {"Regex": r"(\w|\s|.)+?\b\B"}, "content": "b"},
    ),
    "nested normalizers": ("normalizer", nest("Sequence", "normalizers", {"type": "NFC"}, 400)),
    "nested pre-tokenizers": (
        "pre_tokenizer",
        nest("Sequence", "pretokenizers", {"type": "Whitespace"}, 400),
    ),
    "a decoder that grows": (
        "decoder",
        {"type": "Sequence", "decoders": grow(40, 6)["normalizers"]},
    ),
    "a rule of an unknown kind": ("normalizer", {"type": "Shell", "command": "id"}),
    "a charsmap that is none": (
        "normalizer",
        {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA//8="},
    ),
}
TRY_ALL = """
import json, sys
def main(arguments):
    from pathlib import Path
    from agents.errors import ExpectedError
    from agents.trainer.data import tokenizer_bounds
    from agents.trainer.data.tokenizer import load_tokenizer
    for folder in map(Path, arguments):
        try:
            tokenizer, _ = load_tokenizer(folder)
            with tokenizer_bounds.bounded_tokenizer(20):
                ids = tokenizer("hello there, my friend.")["input_ids"]
            said = tokenizer_bounds.decode(tokenizer, ids)
        except ExpectedError as error:
            said = error.message
        print("SAID", json.dumps([folder.name, said]), flush=True)
    return 0
"""


def make_bomb(folder: Path, key: str, rules: Any) -> Path:
    model = copy_model(folder)
    about = json.loads((model / "tokenizer.json").read_bytes())
    about[key] = rules
    (model / "tokenizer.json").write_text(json.dumps(about))
    return model


def test_every_bomb_is_named_where_a_tokenizer_is_read(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    folders = [str(make_bomb(tmp_path / name, *bomb)) for name, bomb in BOMBS.items()]
    about = json.loads((copy_model(tmp_path / "harmless") / "tokenizer.json").read_bytes())
    blank = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    more = [{"id": 9999 + n, "content": f"<{n}>", "special": False, **blank} for n in range(10**4)]
    harmless = make_bomb(
        tmp_path / "many added tokens", "added_tokens", about["added_tokens"] + more
    )
    (tmp_path / "try_all.py").write_text(TRY_ALL)
    argv = command(sys.executable, "try_all", *folders, str(harmless))
    done = run_limited(argv, str(tmp_path))
    lines = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line[:4] == "SAID"]
    said = dict(json.loads(line) for line in lines)
    for name, text in said.items():
        attack(given=f"a tokenizer with {name}", tried="to read and use it", happened=text)
    assert set(said) == {*BOMBS, harmless.name}, done.stderr[-2000:]
    assert said.pop(harmless.name) == "hello there, my friend."
    for name, text in said.items():
        assert "tokenizer" in text, (name, text)


def write_slow_run(folder: Path) -> Path:
    """Return a run file whose rows take a tokenizer with slow expressions hours."""
    rules = {"type": "Sequence", "pretokenizers": [split(SLOW), split(SLOW + "a")]}
    make_bomb(folder / "model", "pre_tokenizer", rules)
    run_file = write_run_file(folder)
    turns = [{"role": "user", "content": "tulip " * 40}, {"role": "assistant", "content": "rose"}]
    (folder / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 60)
    return run_file


@pytest.mark.slow
def test_a_preview_names_a_tokenizer_that_does_not_end(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    run_file = write_slow_run(tmp_path / "run")

    async def preview() -> None:
        async with Core.open(tmp_path / "master") as core:
            spec = await core.do(ReadRunFile(path=run_file))
            await core.do(PreviewData(spec=spec, whole=True))

    with pytest.raises(UserError) as refused:
        asyncio.run(preview())
    said = refused.value.message
    attack(given="a tokenizer that searches for hours", tried="rackless preview", happened=said)
    assert TOKENIZER_MESSAGE in said
    assert refused.value.hint


@pytest.mark.campaign
def test_a_rank_whose_tokenizer_does_not_end_is_killed_and_named(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    folder = write_slow_run(tmp_path / "run").parent
    run = Run(tmp_path / "attempt", folder / "model", make_spec())
    run.train = folder / "train.jsonl"
    (code,) = finish(run.start())
    said = SIGNAL_CAUSES[signal.Signals(-code)]
    attack(given="a tokenizer that searches for hours", tried="to hold up a node", happened=said)
    assert said == TOKENIZER_MESSAGE


def test_a_program_that_its_tokenizer_ended_says_so(tmp_path: Path) -> None:
    code = (
        "from agents.shared.files.bounded_work import limited_library\n"
        "with limited_library(0.2, 1 << 30):\n    while True: pass\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False
    ).returncode
    assert KILLS[-ended][0] == TOKENIZER_MESSAGE
    code = code.replace("while True: pass", "x = b'a' * (3 << 30); __import__('time').sleep(9)")
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False
    ).returncode
    assert KILLS[-ended][0] == TOKENIZER_MESSAGE
