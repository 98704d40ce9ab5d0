"""The merged model is base plus adapter, loads in plain Transformers, and is whole or not there."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.program import command
from agents.quantizers.job.job import JobProgress
from agents.quantizers.merge import copy_values, merge, read_job
from agents.trainer.checkpoint.sharded_files import write_shards
from agents.trainer.checkpoint.state import FULL_STEM
from tests.agents.small_disk import fill, small_disk
from tests.agents.trainer.ranks import Run, make_spec, make_tiny_model

IDS_BT = torch.arange(6, 46)[None]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model) -> Run:
    run = Run(tmp_path_factory.mktemp("merge") / "home", tiny_model, make_spec(max_steps=4))
    run.train_to_end()
    return run


def job_file(run: Run, destination: Path, **changes) -> Path:
    job = {
        "run_id": "r1",
        "step": 4,
        "python": sys.executable,
        "model_path": str(run.model),
        "destination": str(destination),
        "agent_home": str(run.home),
        **changes,
    }
    path = run.home / "job.json"
    path.write_text(json.dumps(job))
    return path


def merge_to(run: Run, destination: Path, **changes) -> list[dict[str, object]]:
    out = io.StringIO()
    merge(read_job(job_file(run, destination, **changes)), JobProgress(out))
    return [json.loads(line) for line in out.getvalue().splitlines()]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS_BT).logits.double()


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory, tiny_model) -> Run:
    """Learns lengths as well, and scales by the root of the rank, on weights in 4 bits."""
    adapter = AdapterSpec(kind="qlora", rank=4, alpha=8, dropout=0.1, dora=True, rslora=True)
    spec = make_spec(max_steps=4, adapter=adapter)
    run = Run(tmp_path_factory.mktemp("odd") / "home", tiny_model, spec)
    run.train_to_end()
    return run


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")
def test_a_head_that_shares_its_weights_leaves_the_embeddings_alone(tmp_path):
    from peft import PeftModel

    model = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    adapter = AdapterSpec(rank=4, alpha=32, dropout=0.0, targets=("q_proj", "lm_head"))
    run = Run(tmp_path / "home", model, make_spec(max_steps=2, adapter=adapter))
    run.train_to_end()
    merge_to(run, tmp_path / "out", step=2)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(model)
    assert torch.equal(merged.get_input_embeddings().weight, base.get_input_embeddings().weight)
    both = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    assert torch.allclose(logits(merged), logits(both), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["run", "odd_run"])
def test_the_result_is_base_and_adapter_together(kind, request, tmp_path):
    from peft import PeftModel

    run, out = request.getfixturevalue(kind), tmp_path / "out"
    told = merge_to(run, out)
    merged = logits(AutoModelForCausalLM.from_pretrained(out))
    base = AutoModelForCausalLM.from_pretrained(run.model)
    plain = logits(base)
    both = logits(PeftModel.from_pretrained(base, out / "adapter"))
    assert torch.allclose(merged, both, rtol=1e-4, atol=1e-5)
    assert (merged - plain).abs().max() > 0.01
    assert told[-1]["path"] == str(out)
    assert [line["done"] for line in told if "done" in line] == list(range(1, 15))


def test_tokenizer_and_template_come_along(run, tmp_path):
    out = tmp_path / "out"
    merge_to(run, out)
    messages = [{"role": "user", "content": "Hi"}]
    texts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        for folder in (out, run.model)
    ]
    assert texts[0] == texts[1]
    names = ("tokenizer.json", "chat_template.jinja")
    assert all((out / n).read_bytes() == (run.model / n).read_bytes() for n in names)


def test_a_model_without_a_template_gets_the_one_it_was_trained_with(tmp_path, run):
    bare = tmp_path / "bare"
    shutil.copytree(run.model, bare)
    (bare / "chat_template.jinja").unlink()
    other = Run(tmp_path / "home", bare, make_spec(max_steps=1))
    other.train_to_end()
    merge_to(other, tmp_path / "out", step=1)
    template = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert "### Instruction:" in template


def test_another_base_model_is_refused(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run.model, other)
    path = other / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ExpectedError, match="is not the model that the checkpoint"):
        merge_to(run, tmp_path / "out", model_path=str(other))
    assert not (tmp_path / "out").exists()


def test_a_second_export_replaces_the_first_and_leaves_nothing_else(run, tmp_path):
    out = tmp_path / "exports" / "out"
    merge_to(run, out, step=2)
    first = (out / "model.safetensors").read_bytes()
    merge_to(run, out, step=4)
    assert (out / "model.safetensors").read_bytes() != first
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_damaged_or_missing_checkpoint_is_refused(run, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(run.checkpoint(4), damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ExpectedError, match=r"damaged: adapter_model.safetensors"):
        merge_to(run, tmp_path / "out", checkpoint=str(damaged))
    with pytest.raises(ExpectedError, match="not a complete checkpoint"):
        merge_to(run, tmp_path / "out", step=3)


def test_a_full_disk_leaves_no_half_model(run, tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        filler = fill(disk, leave_bytes=50_000)
        with pytest.raises(ExpectedError, match="disk is full"):
            merge_to(run, disk / "out")
        assert list(disk.iterdir()) == [filler]


def test_full_fine_tuning_is_exported_too(tmp_path, tiny_model):
    spec = make_spec(max_steps=1, adapter=AdapterSpec(kind="full"))
    run = Run(tmp_path / "home", tiny_model, spec)
    run.train_to_end()
    merge_to(run, tmp_path / "out", step=1)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")),
                           logits(base))  # fmt: skip
    assert not (tmp_path / "out" / "adapter").exists()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_full_weights_that_are_not_finite_are_refused(tmp_path, number):
    layer = torch.nn.Linear(2, 2)
    write_shards({"weight": torch.full((2, 2), number)}, tmp_path, FULL_STEM)
    with (
        torch.no_grad(),
        pytest.raises(ExpectedError, match="weight holds numbers that are not fin"),
    ):
        copy_values(layer, SimpleNamespace(path=tmp_path))


def test_the_command_prints_json_lines_and_says_what_went_wrong(run, tmp_path):
    path = job_file(run, tmp_path / "out", model_path=str(tmp_path / "none"))
    done = subprocess.run(
        command(sys.executable, "agents.quantizers.merge", path),
        capture_output=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 3
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["kind"] == "progress"
    assert lines[-1]["kind"] == "failed"
    assert "none does not exist" in lines[-1]["message"]
    assert lines[-1]["hint"]


def test_the_model_of_the_hub_that_a_run_trained_on_is_found_in_the_nodes_cache(
    run, tmp_path, monkeypatch
):
    """As `snapshot_download` gives it: a folder elsewhere, by its id."""
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options["allow_patterns"]))
        return str(run.model)

    def refuse(api, name, **options):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    merge_to(run, tmp_path / "out", model_path="org/tiny")
    assert (tmp_path / "out" / "config.json").exists()
    ((name, patterns),) = asked
    assert name == "org/tiny"
    assert "*.safetensors" in patterns
    monkeypatch.undo()
    with pytest.raises(ExpectedError, match="does not exist"):
        merge_to(run, tmp_path / "other", model_path="models/a/gone")
    assert not (tmp_path / "other").exists()
