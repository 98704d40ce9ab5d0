"""A merged model and what is remembered of it are made once, and not taken for another's."""

from __future__ import annotations

import json
import shutil

import pytest

from agents.quantizers.job import reuse
from agents.quantizers.job.reuse import LINEAGE_FILE, make_room, using
from tests.agents.quantizers.test_make import job_for
from tests.agents.quantizers.test_make import run as make
from tests.agents.quantizers.test_merge import merge_to, run
from tests.agents.trainer.ranks import DEMO

__all__ = ["run"]
MERGED_BEFORE = "This checkpoint was merged here before, so that model is used"
MEASURING = "Measuring the original"


def messages(told: list[dict]) -> list[str]:
    return [one["message"] for one in told]


def test_a_second_format_does_not_merge_again(run, tmp_path):
    out = tmp_path / "merged-4"
    assert MERGED_BEFORE not in messages(merge_to(run, out))
    weights = out / "model.safetensors"
    first = weights.stat().st_mtime_ns
    told = merge_to(run, out)
    assert MERGED_BEFORE in messages(told)
    assert told[-1]["path"] == str(out)
    assert weights.stat().st_mtime_ns == first
    weights.write_bytes(weights.read_bytes()[:-1])
    assert MERGED_BEFORE not in messages(merge_to(run, out))


def test_another_checkpoint_is_never_taken_for_it(run, tmp_path):
    out = tmp_path / "merged-4"
    merge_to(run, out)
    assert MERGED_BEFORE not in messages(merge_to(run, out, step=2))


def test_what_was_merged_without_the_lengths_of_dora_is_merged_again(run, tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(reuse, "_WAY", 1)
        merge_to(run, tmp_path / "merged-4")
    assert MERGED_BEFORE not in messages(merge_to(run, tmp_path / "merged-4"))


def test_one_merged_model_of_a_run_is_kept_unless_a_job_works_with_it(tmp_path):
    old, new = tmp_path / "merged-4", tmp_path / "merged-8"
    reference = tmp_path / ".reference-merged-4-ab"
    for folder in (old, reference, tmp_path / "awq-4"):
        folder.mkdir()
    (old / LINEAGE_FILE).write_text("{}")
    with using(old):
        make_room(new)
        assert old.is_dir()
    make_room(new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["awq-4"]


@pytest.fixture
def known(tmp_path):
    """A merged model as a merge leaves it."""
    model = tmp_path / "merged-8"
    shutil.copytree(DEMO / "model", model)
    (model / LINEAGE_FILE).write_text(json.dumps({"content": "ab" * 32}))
    return model


def test_the_original_is_measured_once_for_all_formats(known, tmp_path):
    pytest.importorskip("bitsandbytes")
    told, about = make(job_for(tmp_path, "nf4", model=str(known)), tmp_path)
    assert MEASURING in messages(told)
    told, again = make(job_for(tmp_path, "nf4", model=str(known)), tmp_path)
    assert MEASURING not in messages(told)
    (first,), (second,) = about["proofs"], again["proofs"]
    for name in ("distance", "control", "original_perplexity", "same_answers", "original_bytes"):
        assert first[name] == second[name]
    phases = [phase["name"] for phase in again["measured"]["phases"]]
    assert phases == ["texts", "quantize", "proof"]
    (place,) = tmp_path.glob(".reference-*")
    (place / "logits").write_bytes(b"cut off")
    told, _ = make(job_for(tmp_path, "nf4", model=str(known)), tmp_path)
    assert MEASURING in messages(told)


def test_nothing_is_remembered_of_a_model_that_is_not_known(tmp_path):
    pytest.importorskip("bitsandbytes")
    make(job_for(tmp_path, "nf4"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nf4"]
    assert not [path for path in (tmp_path / "nf4").iterdir() if path.name.startswith(".")]
