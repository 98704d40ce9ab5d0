"""Artifacts of the demo's model: each loads in its runtime, is proved, and whole or not there."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from agents.contract.requests.exports import PROOF_FILE, MakeJob, Origin, TextSource
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.node.files import remove_abandoned
from agents.program import command
from agents.quantizers.formats import gguf, nf4
from agents.quantizers.inference.models import load_model, widen
from agents.quantizers.job.job import JobProgress
from agents.quantizers.make import make, read_job
from tests.agents.quantizers import forked_converter
from tests.agents.trainer.ranks import DEMO

SHA = "ab" * 32
ORIGIN = Origin(base="demo", data="train.jsonl", run_id="r1", run_name="valley", step=8)


def job_for(tmp_path, method, *types, **changes) -> MakeJob:
    settings = {
        "python": sys.executable,
        "model": str(DEMO / "model"),
        "method": method,
        "destination": str(tmp_path / method),
        "origin": ORIGIN,
        "train": TextSource(path=str(DEMO / "train.jsonl")),
        "evaluation": TextSource(path=str(DEMO / "eval.jsonl")),
        "types": types,
        **changes,
    }
    return MakeJob(**settings)


def run(job: MakeJob, home) -> tuple[list[dict], dict]:
    out = io.StringIO()
    make(job, home, JobProgress(out))
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    return told, json.loads((home / job.destination / PROOF_FILE).read_bytes())


def test_nf4_is_a_quarter_of_the_size_and_loads_in_transformers(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    told, about = run(job_for(tmp_path, "nf4"), tmp_path)
    (proof,) = about["proofs"]
    folder = tmp_path / "nf4"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.is_loaded_in_4bit
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert proof["size_bytes"] < 0.4 * proof["original_bytes"]
    assert 0 < proof["distance"]["kl"] < proof["control"]["kl"]
    assert proof["keep"]
    assert told[-1]["path"] == str(folder)
    card = (folder / "README.md").read_text()
    assert "# valley, nf4" in card
    assert "the run's evaluation data" in card
    assert "- nf4: keep. Loaded and answered in Transformers" in card
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_nf4_is_judged_in_the_precision_of_the_original(tmp_path):
    pytest.importorskip("bitsandbytes")
    import torch
    from bitsandbytes.functional import dequantize_4bit

    nf4.load_quantized(DEMO / "model", "cpu").save_pretrained(tmp_path)
    rough, exact, plain = (load_model(path, "cpu") for path in (tmp_path, tmp_path, DEMO / "model"))
    for name, layer in rough.named_modules():
        if hasattr(getattr(layer, "weight", None), "quant_state"):
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            plain.get_submodule(name).weight.data = weight.float()
    widen(exact)
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        wanted, near, far = (model(ids).logits.float() for model in (plain, exact, rough))
    assert near.dtype == torch.float32
    assert (near - wanted).norm() < 0.5 * (far - wanted).norm(), "but for the rounding to bf16 here"


def test_gguf_answers_in_llama_cpp_as_the_original_does(tmp_path):
    pytest.importorskip("xllamacpp")
    _, about = run(job_for(tmp_path, "gguf", "F16", "Q8_0"), tmp_path)
    whole, small = about["proofs"]
    assert whole["distance"]["kl"] < 1e-5
    assert (whole["distance"]["top1"], whole["same_answers"]) == (1, 1)
    assert whole["distance"]["perplexity"] == pytest.approx(whole["original_perplexity"], rel=1e-3)
    assert 1e-6 < small["distance"]["kl"] < 0.1 * small["control"]["kl"]
    ratio = small["distance"]["perplexity"] / small["original_perplexity"]
    assert ratio == pytest.approx(1, abs=5e-3)
    assert small["size_bytes"] < 0.6 * whole["size_bytes"]
    names = {path.name for path in (tmp_path / "gguf").iterdir()}
    assert names == {"valley-F16.gguf", "valley-Q8_0.gguf", "README.md", PROOF_FILE}


def test_rows_are_no_longer_than_what_the_model_holds(tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(gguf, "convert", forked_converter.convert)
    model, data = tmp_path / "short", tmp_path / "long.jsonl"
    shutil.copytree(DEMO / "model", model)
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    row = json.dumps({"text": "Oren Dale founded Brenford and laid the first stone. " * 20})
    data.write_text("\n".join([row] * 8))
    job = job_for(tmp_path, "gguf", "Q8_0", model=str(model), evaluation=None)
    job = replace(job, train=TextSource(path=str(data), format="text"))
    _, about = run(job, tmp_path)
    (proof,) = about["proofs"]
    assert proof["distance"]["num_tokens"] == 2 * 63


@pytest.mark.campaign
@pytest.mark.timeout(1800)  # building the tool takes minutes
def test_k_types_are_made_by_the_tool_that_is_built_for_them(tmp_path):
    pytest.importorskip("xllamacpp")
    job = job_for(tmp_path, "gguf", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M")
    _, about = run(job, tmp_path)
    sizes = [proof["size_bytes"] for proof in about["proofs"]]
    distances = [proof["distance"]["kl"] for proof in about["proofs"]]
    assert sizes == sorted(sizes, reverse=True)
    assert distances == sorted(distances)
    assert about["proofs"][2]["keep"]
    assert (tmp_path / "tools" / gguf.QUANTIZER).exists()
    assert not list((tmp_path / "gguf").glob("*F16*"))


def test_without_evaluation_data_the_last_rows_judge(tmp_path):
    pytest.importorskip("bitsandbytes")
    run(job_for(tmp_path, "nf4", evaluation=None), tmp_path)
    card = (tmp_path / "nf4" / "README.md").read_text()
    assert "the last rows of the run's training data, which the run has seen" in card


def test_the_lineage_of_the_merge_goes_into_the_card(tmp_path):
    pytest.importorskip("bitsandbytes")
    merged = tmp_path / "merged"
    shutil.copytree(DEMO / "model", merged)
    (merged / "rackless.json").write_text(json.dumps({"base_sha256": SHA, "data_sha256": "c" * 64}))
    _, about = run(job_for(tmp_path, "nf4", model=str(merged)), tmp_path)
    assert about["origin"]["base_sha256"] == SHA
    assert SHA in (tmp_path / "nf4" / "README.md").read_text()
    assert not (tmp_path / "nf4" / "rackless.json").exists()


def test_too_little_text_is_named(tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "three small words"}\n')
    job = job_for(tmp_path, "nf4", train=TextSource(path=str(short)), evaluation=None)
    with pytest.raises(ExpectedError, match=r"short.jsonl has only \d+ tokens of use"):
        run(job, tmp_path)
    assert not (tmp_path / "nf4").exists()


def test_a_model_that_is_gone_is_named(tmp_path):
    with pytest.raises(ExpectedError, match="not a model of Transformers"):
        run(job_for(tmp_path, "nf4", model=str(tmp_path / "nothing")), tmp_path)


def test_an_architecture_that_llama_cpp_does_not_know_leaves_nothing(tmp_path):
    pytest.importorskip("xllamacpp")
    odd = tmp_path / "odd"
    shutil.copytree(DEMO / "model", odd)
    config = json.loads((odd / "config.json").read_bytes())
    (odd / "config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    with pytest.raises(ExpectedError, match="Converting to Q8_0 failed"):
        run(job_for(tmp_path, "gguf", "Q8_0", model=str(odd)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


def test_a_model_that_awq_is_not_made_of_is_told_before_it_is_measured(tmp_path):
    out = io.StringIO()
    with pytest.raises(ExpectedError, match="A layer of this model has 96 outputs; awq needs"):
        make(job_for(tmp_path, "awq"), tmp_path, JobProgress(out))
    assert "Measuring the original" not in out.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_the_job_file_is_read_back_and_started_as_a_program(tmp_path):
    job = replace(job_for(tmp_path, "nf4"), model="m", train=TextSource(path="t"), evaluation=None)
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**to_wire(job), "agent_home": str(tmp_path)}))
    (tmp_path / "t").touch()
    found, home = read_job(path)
    assert (home, found.train.path) == (tmp_path, str(tmp_path / "t"))
    (tmp_path / "t").unlink()
    assert read_job(path)[0].train.path == "t", "what is not there may be of the hub"
    done = subprocess.run(
        command(sys.executable, "agents.quantizers.make", str(path)),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3
    assert json.loads(done.stdout.splitlines()[-1])["kind"] == "failed"
    path.write_text("{}")
    with pytest.raises(ExpectedError, match="is not a quantizing job"):
        read_job(path)


def test_what_a_killed_job_left_goes_before_the_next(tmp_path):
    """Killed while it measures the original, with the folder begun."""
    pytest.importorskip("bitsandbytes")
    job = job_for(tmp_path, "nf4")
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**to_wire(job), "agent_home": str(tmp_path)}))
    argv = command(sys.executable, "agents.quantizers.make", str(path))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"Measuring the control" in line:
                process.kill()
                break
    left = [one.name for one in tmp_path.iterdir() if one.name.startswith(".partial-nf4-")]
    assert len(left) == 1
    living = tmp_path / f".partial-nf4-{os.getpid()}"
    living.mkdir()
    remove_abandoned(tmp_path / "nf4")
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"job.json", living.name}, "what a living process makes stays"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "zip"}, "method is zip"),
        ({"types": ("Q9",)}, "types has Q9"),
        ({"types": ()}, "gguf needs one"),
        ({"method": "nf4", "types": ("F16",)}, "types has F16; nf4 has none"),
        ({"method": "gptq", "types": ("4-bit", "8-bit")}, "types has 2"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        job_for(tmp_path, changes.pop("method", "gguf"), *changes.pop("types", ("F16",)))


def test_how_text_is_split_is_read_from_the_tokenizer(tmp_path):
    assert gguf.name_split(DEMO / "model") == "gpt-2"
    assert gguf.name_split(tmp_path) is None

    def write(rule, normalizer=None):
        content = {"pre_tokenizer": rule, "normalizer": normalizer}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return gguf.name_split(tmp_path)

    split = {"type": "Split", "pattern": {"Regex": next(iter(gguf._SPLITS))}}
    bytes_only = {"type": "ByteLevel", "use_regex": False}
    assert write({"type": "Sequence", "pretokenizers": [split, bytes_only]}) == "llama-bpe"
    assert write({"type": "Split", "pattern": {"Regex": "other"}}) is None
    digits = {"type": "Digits", "individual_digits": True}  # llama.cpp would leave that out
    assert write({"type": "Sequence", "pretokenizers": [digits, {"type": "ByteLevel"}]}) is None
    assert write({"type": "Sequence", "pretokenizers": [split, split, bytes_only]}) is None
    assert write({"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]}) is None
    assert write({"type": "ByteLevel"}, {"type": "NFC"}) == "gpt-2"
    assert write({"type": "ByteLevel"}, {"type": "Lowercase"}) is None
    assert write(bytes_only) is None
    assert write(None) is None


@pytest.mark.parametrize(
    "said",
    [
        "OSError: [Errno 28] No space left on device",
        "OSError: 262144 requested and 131072 written",
        "llama_model_quantize: failed to quantize: basic_ios::clear: iostream error",
    ],
)
def test_a_disk_that_is_full_while_a_file_is_made_is_told(said):
    argv = [sys.executable, "-c", f"print('INFO: begun'); print({said!r}); exit(1)"]
    with pytest.raises(ExpectedError, match="the disk is full") as caught:
        gguf._call(argv, "Converting to F16")
    assert "Free some space" in caught.value.hint
