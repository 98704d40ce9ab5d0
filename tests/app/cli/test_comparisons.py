"""`rackless plan` with purchases, fitting models and several clusters, and exported nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from app.cli.main import run
from app.cli.parts.comparisons import read_deadline

CLUSTERS = Path(__file__).parents[3] / "resources" / "clusters"
THREE, TWO = str(CLUSTERS / "three-mismatched.yaml"), str(CLUSTERS / "two-3090.yaml")
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a " * n}]}
        for n in range(200, 400)
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file = tmp_path / "run.yaml"
    file.write_text("model: Qwen/Qwen2.5-7B\ndata: {train: chats.jsonl}\nadapter: {kind: qlora}\n")
    return file


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def ask(*words: str | Path) -> tuple[int, str, str]:
        code = run([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return ask


def test_purchases_are_a_table_and_a_document(ask: Ask, run_file: Path) -> None:
    code, text, _ = ask("plan", run_file, "--cluster", THREE, "--upgrade")
    assert code == 0
    assert "GAIN PER 100" in text
    assert "prices are guesses, from the shipped price list of 2026-11-28" in text

    code, text, _ = ask("plan", run_file, "--cluster", THREE, "--upgrade", "--json")
    found = json.loads(text)
    assert (code, found["currency"]) == (0, "EUR")
    gains = [one["gain_per_100"] for one in found["upgrades"]]
    assert gains == sorted(gains, reverse=True)
    assert found["upgrades"][0]["caveats"]


def test_the_users_prices_count(ask: Ask, run_file: Path, tmp_path: Path) -> None:
    prices = tmp_path / "mine.csv"
    prices.write_text("kind,name,price,currency\ngpu,RTX 4090,10,CHF\n")
    code, text, _ = ask("plan", run_file, "--cluster", TWO, "--upgrade", "--prices", prices)
    assert code == 0
    assert "10.00 CHF" in text

    prices.write_text("kind,name,price\ngpu,RTX 9999,10\ngpu,RTX 4090,-1\n")
    code, _, error = ask("plan", run_file, "--cluster", TWO, "--upgrade", "--prices", prices)
    assert code == 2
    assert "line 2: the card RTX 9999 is not known" in error
    assert "line 3: the price of RTX 4090 is '-1'" in error


def test_models_that_fit_are_listed_with_time_and_cost(ask: Ask, run_file: Path) -> None:
    data = run_file.parent / "chats.jsonl"
    words = ("--cluster", TWO, "--by", "2090-01-01T07:00", "--price-per-kwh", "0.35")
    code, text, _ = ask("plan", "--best", "--data", data, *words)
    assert code == 0
    assert text.splitlines()[0].split() == [
        *("MODEL", "METHOD", "PCS", "SPEED", "TIME", "READY", "ENERGY", "COST")
    ]
    assert "Qwen/Qwen2.5-7B-Instruct" in text

    code, text, _ = ask("plan", run_file, "--best", *words, "--budget", "0.001", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["num_tried"] >= 20
    assert all(one["cost"] <= 0.001 for one in found["models"])


def test_clusters_stand_next_to_each_other(ask: Ask, run_file: Path) -> None:
    words = ("plan", run_file, "--cluster", THREE, "--cluster", TWO)
    code, text, _ = ask(*words)
    assert code == 0
    assert text.splitlines()[1].split() == ["three-mismatched", "two-3090"]
    assert "2 x RTX 3090" in text

    code, text, _ = ask(*words, "--json")
    first, second = json.loads(text)["clusters"]
    assert (first["cluster"], second["plan"]["fits"]) == (THREE, True)
    alone = json.loads(ask("plan", run_file, "--cluster", TWO, "--json")[1])
    assert second["plan"]["chosen"]["tokens_per_s"] == alone["chosen"]["tokens_per_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--best"], "the data is missing"),
        (["--upgrade"], "the run file is missing"),
        (["run.yaml", "--best", "--upgrade"], "different questions"),
        (
            ["run.yaml", "--best", "--budget", "3", "--cluster", TWO],
            "a budget needs the price of energy",
        ),
        (["run.yaml", "--best", "--budget", "0"], "'0' is not an amount above 0"),
        (["run.yaml", "--best", "--price-per-kwh", "-1"], "'-1' is not an amount above 0"),
        (["run.yaml", "--best", "--budget", "nan"], "'nan' is not an amount above 0"),
        (["run.yaml", "--best", "--by", "25:00"], "'25:00' is not a time"),
        (["run.yaml", "--best", "--by", "2020-01-01T07:00"], "is in the past"),
        (["run.yaml", "--by", "07:00"], "--by belongs to --best"),
        (["run.yaml", "--prices", "x.csv"], "--prices belongs to --upgrade"),
        (["run.yaml", "--upgrade", "--prices", "no.csv", "--cluster", TWO], "cannot be read"),
        (["run.yaml", "--upgrade", "--cluster", TWO, "--cluster", THREE], "several clusters"),
        (["--best", "--data", "no.jsonl", "--cluster", TWO], "does not exist"),
        (["run.yaml", "--upgrade"], "there are no nodes yet"),
        (["run.yaml", "--best"], "there are no nodes yet"),
    ],
)
def test_wrong_questions_are_refused(ask: Ask, run_file: Path, words: list[str], said: str) -> None:
    code, text, error = ask("plan", *words)
    assert (code in (1, 2), text) == (True, "")
    assert said in error


def test_nodes_are_exported_only_if_there_are_some(ask: Ask, tmp_path: Path) -> None:
    code, _, error = ask("nodes", "export-cluster", "pcs.yaml")
    assert code == 1
    assert "there are no nodes yet" in error
    assert not (tmp_path / "pcs.yaml").exists()


def test_a_time_of_day_is_the_next_one() -> None:
    evening = datetime(2026, 11, 28, 22, 30)
    assert datetime.fromtimestamp(read_deadline("7:05", evening)).day == 29
    assert datetime.fromtimestamp(read_deadline("23:00", evening)).day == 28
