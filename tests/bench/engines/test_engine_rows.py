"""Benchmarks of the engine: their rows are what they claim, and tiny runs print every line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.bench import bench_chat, bench_host, bench_preferences, bench_settings
from tests.bench.engines.chat_rows import draw_lengths, make_rows, save_tokenizer, write_rows
from tests.bench.engines.engine_shapes import GIB, SHAPES, make_config
from tests.bench.engines.fresh_process import Emit, run_fresh
from tests.bench.engines.offloaded_peer import train_offloaded
from tests.bench.engines.our_training import RunFailed, make_spec, run_trainer, summarize
from tests.bench.engines.peer_training import (
    Bounds,
    PeerJob,
    choose_attention,
    load_peft,
    make_batches,
)
from tests.bench.engines.random_model import save_outline

LENGTHS = [16, 90, 41, 500, 23, 64]
SHAPE = "llama-3.2-3b"


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """End the process that others are forked from, once all tests are done."""
    yield
    forkserver._forkserver._stop()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a benchmark with arguments and return what it prints."""

    def run(main: Callable[[], object], *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench", "--cpu", *arguments])
        main()
        said = capfd.readouterr().out
        assert "failed" not in said
        return said

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    scale = replace(bench_chat.TINY, layers=2)
    (saved,) = run_fresh(bench_chat.save_in_process, folder, SHAPE, scale)
    assert saved["seconds"] > 0
    return folder


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    lengths = draw_lengths(4000, mean=300, sigma=0.8, most=1 << 20)
    assert sum(lengths) / len(lengths) == pytest.approx(300, rel=0.05)
    assert max(draw_lengths(4000, mean=300, sigma=0.8, most=1024)) == 1024


def test_our_data_path_reads_the_tokens_that_peers_get(tmp_path: Path, model: Path) -> None:
    from agents.trainer.data.store import open_examples

    rows = make_rows(LENGTHS, 768)
    assert [len(row.ids) for row in rows] == LENGTHS
    spec = make_spec("lora", ("q_proj",), sequence_tokens=512, max_steps=1, batch_sequences=6)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    lines = run_trainer(tmp_path, "once", spec, model, path, "cpu")
    figures = summarize(lines)
    (folder,) = (p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir())
    examples = open_examples(folder)
    assert examples is not None
    for place, row in enumerate(rows):
        (segment,) = examples[place].segments
        assert segment.ids.tolist() == row.ids
        assert segment.is_target.tolist() == row.is_target
    assert figures["tokens_per_s"] == pytest.approx(sum(LENGTHS) / figures["step_s"])
    targets = sum(sum(row.is_target) for row in rows)
    assert 0.5 < targets / sum(LENGTHS) < 0.7
    (warm_s,) = (line["time_s"] for line in lines if line.get("phase") == "warmup")
    assert figures["tune_s"] == 0  # on a CPU
    for phase in ("tuning", "compiling"):
        begun = {"kind": "phase", "phase": phase, "time_s": warm_s - 3.0}
        assert summarize([*lines, begun])["tune_s"] == pytest.approx(3.0)


def read_tokens(emit: Emit, root: Path) -> None:
    """Report the families that take the tokenizer as it is."""
    for shape in SHAPES:
        make_config(shape, layers=4, size="tiny").save_pretrained(root / shape)
        save_tokenizer(root / shape, 768)
        emit({"shape": shape})


def test_every_family_reads_the_same_tokens(tmp_path: Path) -> None:
    assert [found.get("shape") for found in run_fresh(read_tokens, tmp_path)] == list(SHAPES)


def test_a_run_that_fails_says_why(tmp_path: Path, model: Path) -> None:
    spec = make_spec("lora", ("no_such_layer",), max_steps=1)
    path = write_rows(tmp_path / "rows.jsonl", make_rows(LENGTHS, 768))
    with pytest.raises(RunFailed, match="no_such_layer"):
        run_trainer(tmp_path, "once", spec, model, path, "cpu")


def compare_losses(emit: Emit, shape: str, device: str) -> None:
    """Report the mean loss of rows in one micro-batch, and of the same rows one by one."""
    import torch

    bounds = Bounds()
    bounds.register()
    rows = make_rows(LENGTHS[:3], 768)
    job = PeerJob(
        engine="peft", shape=shape, kind="lora", lengths=(), limit=512, step_tokens=1,
        layers=4, size="tiny", device=device,
    )  # fmt: skip
    model = load_peft(job, choose_attention(job))

    def mean_loss(*together) -> tuple[float, int]:
        batch, prepare = next(make_batches(job, together, 1, choose_attention(job), bounds))
        prepare()
        assert sorted(batch.lengths) == sorted(len(row.ids) for row in together)
        with torch.no_grad():
            loss = float(model(**batch.inputs).loss)
        return loss, sum(sum(row.is_target) for row in together)

    together, count = mean_loss(*rows)
    alone = sum(loss * size for loss, size in map(mean_loss, rows))
    emit({"together": together, "alone": alone / count})


@pytest.mark.parametrize("shape", [SHAPE, "gemma-2-2b", "qwen3.5-9b"])
def test_the_rows_of_a_peer_do_not_see_each_other(shape: str) -> None:
    (found,) = run_fresh(compare_losses, shape, "cpu")
    assert found["together"] == pytest.approx(found["alone"], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPE, "phi-3-mini", "gemma-2-2b"])
def test_the_rows_of_a_peer_do_not_see_each_other_on_a_gpu(shape: str) -> None:
    (found,) = run_fresh(compare_losses, shape, "cuda:0")
    assert found["together"] == pytest.approx(found["alone"], rel=2e-3)


def fail_late(emit: Emit) -> None:
    emit({"first": 1})
    raise ValueError("second")


def test_what_a_process_reports_before_it_fails_is_kept() -> None:
    first, second = run_fresh(fail_late)
    assert first == {"first": 1}
    assert second["error"] == "ValueError: second"


def crash(emit: Emit) -> None:
    os.write(2, b"stack smashed")
    os._exit(9)


def test_a_process_that_crashes_is_reported_with_its_last_words() -> None:
    (found,) = run_fresh(crash)
    assert found["error"] == "its process ended with exit code 9: stack smashed"


def test_chat_prints_its_ratios(bench: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    said = bench(bench_chat.main, "--only", "gemma-2-2b:qlora:8", "--out", str(out))
    assert "unsloth:" in said  # its error, on a PC without it
    (line,) = [one for one in said.splitlines() if one.startswith("= ")]
    ratios = [float(one) for one in re.findall(r"(?:of peft|packed|rows|d) (\d+\.\d+)", line)]
    assert len(ratios) == 5
    assert min(ratios) > 0
    assert out.read_text().count("\n") == 1


def test_host_prints_its_ratios(bench: Callable[..., str]) -> None:
    said = bench(bench_host.main, "--only", "phi-3-mini:lora")
    assert re.search(r"ours \d+\.\d+ ms; peft \d+\.\d+ ms; \d+\.\d+ of peft", said), said
    slow = bench(bench_host.main, "--slow", "--only", "qwen2.5-7b:lora", "--modes", "unpacked")
    (share,) = re.findall(r"unpacked: (\d\.\d+) of the ideal", slow)
    assert 0 < float(share) < 1


def test_preferences_print_their_ratios(bench: Callable[..., str]) -> None:
    said = bench(bench_preferences.main, "--engines", "trl,peft,ours")
    ratios = re.findall(r"= .* DPO: (\d+\.\d+) of (\w+)", said)
    assert [engine for _, engine in ratios] == ["trl", "peft"], said
    assert min(float(ratio) for ratio, _ in ratios) > 0


def test_settings_print_their_share_of_the_best(bench: Callable[..., str]) -> None:
    said = bench(bench_settings.main, "--only", "chat-3b-lora")
    assert said.count("micro-batch, recomputed, offloaded") == 2, said
    (share,) = re.findall(r"lowest (\d\.\d+) of the best", said)
    assert 0 < float(share) <= 1


def test_a_peer_trains_layers_that_wait_elsewhere(tmp_path: Path) -> None:
    """Without a GPU they wait on the disk, by the same hooks of accelerate."""
    save_outline(tmp_path, "llama-2-13b", layers=2, size="tiny")
    job = PeerJob(
        engine="peft", shape="llama-2-13b", kind="lora", limit=32, layers=2, size="tiny",
        lengths=(32,) * 4, step_tokens=64, at_once=(1, 2), seconds=0.01, device="cpu",
    )  # fmt: skip
    # No layer has room.
    reports = list(run_fresh(train_offloaded, job, str(tmp_path), 1024 / GIB))
    assert [(one["at_once"], one["layers_on_gpu"]) for one in reports] == [(1, 0), (2, 0)]
    assert all(one["tokens_per_s"] > 0 for one in reports)
