"""Run files with settings or data that cannot be meant: what `rackless plan` says, and its code."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import run
from tests.fakes.models import write_model

CLUSTER = "nodes:\n  - {name: alpha, gpus: [RTX 3090], ram_gib: 64}\n"


class Asked:
    """A run file in a folder of its own, with a whole model and data beside it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        write_model(folder / "model", max_position_embeddings=2048)
        (folder / "chats.jsonl").write_text('{"text": "hello"}\n' * 40)
        (folder / "pcs.yaml").write_text(CLUSTER)

    def plan(self, text: str = "", data: str = "chats.jsonl", *more: str) -> tuple[int, str]:
        """Return the exit code of a plan and all that it said."""
        file = self.folder / "run.yaml"
        file.write_text(f"model: model\ndata: {{train: {data}}}\n{text}\n")
        arguments = ["plan", str(file), "--cluster", str(self.folder / "pcs.yaml"), *more]
        code = run(arguments)
        said = self._capsys.readouterr()
        return code, said.out + said.err


@pytest.fixture
def asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Asked:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    return Asked(tmp_path, capsys)


REFUSED = {
    "learning_rate: 50": "learning_rate is 50.0; it must be at most 1",
    "learning_rate: 1.5": "learning_rate is 1.5",
    "learning_rate: .nan": "learning_rate is nan; it must be a finite number",
    "learning_rate: -.inf": "learning_rate is -inf; it must be a finite number",
    "batch_sequences: 1000000000000": "batch_sequences is 1000000000000; it must be at most",
    "batch_sequences: 1e12": "batch_sequences",
    "sequence_tokens: 100000000000": "sequence_tokens is 100000000000; it must be at most",
    f"sequence_tokens: {'9' * 4000}": "sequence_tokens",
    "epochs: 1e300": "epochs is 1e+300; it must be at most",
    "epochs: .inf": "epochs is inf; it must be a finite number",
    "weight_decay: 1e9": "weight_decay is 1000000000.0; it must be at most",
    "max_gradient_norm: .nan": "max_gradient_norm is nan",
    "warmup_share: .nan": "warmup_share is nan",
    "dpo_beta: .inf": "dpo_beta is inf",
    "memory_gib: .nan": "memory_gib is nan",
    "shares: [1, .nan]": "shares is nan",
    "adapter: {rank: 1000000000}": "adapter.rank is 1000000000; it must be at most",
    "adapter: {alpha: 1e30}": "adapter.alpha is 1e+30; it must be at most",
    "adapter: {alpha: .nan}": "adapter.alpha is nan",
    "adapter: {dropout: 1}": "adapter.dropout is 1.0",
    "adapter: {dropout: .nan}": "adapter.dropout is nan",
    "adapter: {targets: [q_proj, q_proj]}": "adapter.targets has 'q_proj' twice",
    "adapter: {targets: ['']}": "adapter.targets has an empty name",
    "adapter: {targets: '(.*)*x'}": "must not repeat a group",
    "adapter: {targets: '(a|a)+$'}": "must not repeat a group",
    "adapter: {targets: '.*.*.*.*.*.*x'}": "may repeat at most",
    "adapter: {targets: '(q_proj'}": "not a regular expression",
    "checkpoint: {every_minutes: .nan}": "checkpoint.every_minutes is nan",
    "checkpoint: {every_steps: 0}": "checkpoint.every_steps is 0",
    "checkpoint: {keep: 0}": "checkpoint.keep is 0",
    "nodes: [alpha, alpha]": "nodes has 'alpha' twice",
    "nodes: []": "nodes is empty",
    "nodes: ['']": "nodes has an empty name",
    "evaluate_every_steps: 0": "evaluate_every_steps is 0",
    "seed: 99999999999999999999999": "seed is 99999999999999999999999",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_setting_that_cannot_be_meant_is_refused_with_its_line_and_limit(
    text: str, asked: Asked, attack: Callable[..., None]
) -> None:
    began = time.monotonic()
    code, said = asked.plan(text)
    attack(given=f"run file: {text[:60]}", tried="rackless plan", happened=said)
    assert code == 2
    assert REFUSED[text] in said
    assert "line 3" in said
    assert time.monotonic() - began < 5.0


WARNED = {
    "learning_rate: 0.5": "learning_rate: Unusually high",
    "learning_rate: 1e-12": "learning_rate: 1e-12 is so low",
    "evaluate_every_steps: 10": "evaluate_every_steps: Without effect: there is no evaluation data",
    "sequence_tokens: 4096": "sequence_tokens: Is 4,096, and the model was made for 2,048 tokens",
    "batch_sequences: 5000": "batch_sequences: The data has",
    "epochs: 5000": "epochs: Reads all data 5,000 times",
    "warmup_share: 0.9": "warmup_share: The learning rate rises during 90%",
    "weight_decay: 5": "weight_decay: 5 pulls weights",
    "max_gradient_norm: 1e-9": "max_gradient_norm: 1e-09 scales",
    "adapter: {rank: 512}": "adapter.rank: Is 512, and the model's layers are 128 wide",
    "adapter: {alpha: 100000}": "adapter.alpha: Scales the adapter by",
    "adapter: {dropout: 0.9}": "adapter.dropout: Keeps only 10%",
    "checkpoint: {every_minutes: null}": "checkpoint.every_minutes: Without periodic checkpoints",
    "data.format": "model: Has no chat template",
}


@pytest.mark.parametrize("text", WARNED)
def test_a_setting_that_is_probably_not_intended_is_named_in_the_plan(
    text: str, asked: Asked
) -> None:
    chat = text == "data.format"
    if chat:
        row = {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        }
        (asked.folder / "chats.jsonl").write_text((json.dumps(row) + "\n") * 40)
    data = "chats.jsonl, format: chat" if chat else "chats.jsonl"
    code, said = asked.plan("" if chat else text, data)
    assert code in (0, 1)
    assert WARNED[text] in said, said
    key = WARNED[text].split(":")[0]
    _, said = asked.plan("" if chat else text, data, "--json")
    document = json.loads(said[said.index("{") :])
    assert key in {one["key"] for one in document["warnings"]}


def test_a_usual_run_is_planned_without_a_warning(asked: Asked) -> None:
    code, said = asked.plan()
    assert (code, "Check first" in said) == (0, False), said


def make_link(folder: Path) -> str:
    (folder / "gone.jsonl").symlink_to(folder / "nowhere.jsonl")
    return "gone.jsonl"


def make_empty(folder: Path) -> str:
    (folder / "none.jsonl").write_text("")
    return "none.jsonl"


def make_blank(folder: Path) -> str:
    (folder / "blank.jsonl").write_text("\n \n\n")
    return "blank.jsonl"


def make_empty_folder(folder: Path) -> str:
    (folder / "rows").mkdir()
    return "rows"


def make_folder_without_data(folder: Path) -> str:
    (folder / "rows").mkdir()
    (folder / "rows" / "README.md").write_text("nothing here")
    return "rows"


def make_other_kind(folder: Path) -> str:
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n")
    return "picture.png"


def make_broken(folder: Path) -> str:
    (folder / "broken.jsonl").write_text("{nope\n" * 50)
    return "broken.jsonl"


def make_cut_parquet(folder: Path) -> str:
    (folder / "rows.parquet").write_bytes(b"PAR1" + bytes(100))
    return "rows.parquet"


def make_pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.jsonl")
    return "pipe.jsonl"


DATA: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing file": (lambda folder: "absent.jsonl", "absent.jsonl (data.train) does not exist"),
    "missing folder": (lambda folder: "./absent", "./absent (data.train) does not exist"),
    "link to nothing": (make_link, "gone.jsonl (data.train) does not"),
    "empty file": (make_empty, "none.jsonl is empty"),
    "blank lines": (make_blank, "blank.jsonl is empty"),
    "empty folder": (make_empty_folder, "holds no data file"),
    "folder with a note alone": (make_folder_without_data, "holds no data file"),
    "wrong suffix": (make_other_kind, "'.png' is not a kind of data file"),
    "broken rows": (make_broken, "line 1: not valid JSON"),
    "cut Parquet": (make_cut_parquet, "not a complete Parquet file"),
    "pipe": (make_pipe, "pipe.jsonl"),
}


@pytest.mark.parametrize("part", ["train", "eval"])
@pytest.mark.parametrize("name", DATA)
def test_data_that_no_run_can_read_ends_a_plan_with_1_and_its_name(
    name: str, part: str, asked: Asked, attack: Callable[..., None]
) -> None:
    make, words = DATA[name]
    data: Any = make(asked.folder)
    words = words.replace("data.train", f"data.{part}")
    code, said = asked.plan("", data if part == "train" else f"chats.jsonl, eval: {data}")
    attack(given=f"data: {name}", tried="rackless plan", happened=said)
    assert code == 1
    assert words in said, said
