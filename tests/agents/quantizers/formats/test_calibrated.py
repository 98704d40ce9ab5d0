"""AWQ and GPTQ of a model that has learned something, with the very packages that nodes get.

The packages are installed from the lock that ships, beside this environment. GPTQ is packed without
the kernel that gptqmodel compiles for it, which takes half a minute; with it:
`GPTQMODEL_DISABLE_PACK_EXT=0 python -m pytest tests/agents/quantizers/formats/test_calibrated.py`.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agents.children import Children
from agents.contract.requests.environment import PackagesBuild
from agents.contract.requests.exports import PROOF_FILE, MakeJob, Origin, TextSource
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.node import packages
from agents.program import command
from agents.quantizers.formats import autoawq, calibrated
from agents.quantizers.formats.by_gptqmodel import Gptqmodel
from agents.quantizers.formats.calibrated import choose_group
from agents.quantizers.formats.registry import WriteRequest
from agents.quantizers.job.job import JobProgress
from agents.quantizers.job.texts import read_texts, split_blocks
from agents.quantizers.proof.folder_proof import prove_unpacked
from agents.quantizers.proof.reference_model import Original, look_at_original
from agents.state import Home
from agents.trainer.data.tokenizer import load_tokenizer
from app.provisioning.environment import read_lock
from tests.agents.quantizers import both_gptq, watched_make
from tests.agents.trainer.ranks import DEMO, make_tiny_model
from tests.draws import seed

ROOT = Path(__file__).parents[4]
TRAIN = TextSource(path=str(DEMO / "train.jsonl"))
EVALUATION = TextSource(path=str(DEMO / "eval.jsonl"))
STEPS, ROWS_AT_ONCE = 60, 16
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """Train a model whose sizes both methods can divide, and save it in several files."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("learned") / "model"
    make_tiny_model(folder, 2, hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    rows = read_texts([TRAIN], EVALUATION, load_tokenizer(folder)[0]).calibration
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = np.random.default_rng(seed(1))
    for _ in range(STEPS):
        some = [torch.tensor(rows[place]) for place in draw.integers(0, len(rows), ROWS_AT_ONCE)]
        ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=-100)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        raise_channels(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        raise_channels(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="2MB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def raise_channels(norm: torch.nn.Module, *readers: torch.nn.Module) -> None:
    """Let one value in 16 stand out, as in large models, and change nothing that is computed.

    Without such values, whether AWQ is nearer than rounding depends on the seed of the model.
    """
    with torch.no_grad():
        norm.weight[::16] *= 8
        for reader in readers:
            reader.weight[:, ::16] /= 8


@pytest.fixture(scope="module")
def first(learned, tmp_path_factory) -> Original:
    """Measure that model, as each job does."""
    place = tmp_path_factory.mktemp("first") / "first"
    rows = read_texts([TRAIN], EVALUATION, load_tokenizer(learned)[0]).held_out
    return look_at_original(learned, "cpu", rows, place, JobProgress(io.StringIO()))


@pytest.fixture(scope="module")
def beside(tmp_path_factory) -> Path:
    """Install what both engines need, as a node does."""
    home = Home(tmp_path_factory.mktemp("beside"))
    lock = read_lock("autoawq")
    assert read_lock("gptqmodel").requirements.items() <= lock.requirements.items()
    job = PackagesBuild(
        python=sys.executable,
        lock_sha256=lock.sha256,
        lock_text=lock.text,
        requirements=lock.requirements,
    )
    report = packages.build(home, job, Children(), lambda line: None)
    assert report.path is not None
    return home.path / report.path


def start(
    job: MakeJob, home: Path, beside: Path, module: str = "agents.quantizers.make"
) -> subprocess.Popen[str]:
    path = home / "job.json"
    path.write_text(json.dumps({**to_wire(job), "agent_home": str(home)}))
    return subprocess.Popen(
        command(sys.executable, module, str(path)),
        env={
            "GPTQMODEL_DISABLE_PACK_EXT": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(beside))),
        },
        stdout=subprocess.PIPE,
        stderr=(home / "stderr").open("w"),
        text=True,
        cwd="/proc",  # as unwritable as /
        start_new_session=True,
    )


def run(
    job: MakeJob, home: Path, beside: Path, module: str = "agents.quantizers.make"
) -> subprocess.CompletedProcess[str]:
    with start(job, home, beside, module) as process:
        out, _ = process.communicate(timeout=400)
    said = (home / "stderr").read_text()
    return subprocess.CompletedProcess(process.args, process.returncode, out, said)


@pytest.fixture(scope="module")
def made(learned, beside, tmp_path_factory):
    """Return what makes each artifact once: the folder of a job that was done in one go."""

    @functools.cache
    def make(method: str, types: tuple[str, ...], engine: str) -> Path:
        folder = tmp_path_factory.mktemp("made")
        job = job_for(learned, method, *types, engine=engine)
        done = run(job, folder, beside, watched_make.__name__)
        assert done.returncode == 0, done.stdout[-600:] + done.stderr[-1500:]
        return folder

    # The cache would take a default for another call than the same value given.
    return lambda method, types, engine="gptqmodel": make(method, types, engine)


def job_for(model: Path, method: str, *types: str, engine: str = "gptqmodel") -> MakeJob:
    return MakeJob(
        python=sys.executable,
        model=str(model),
        method=method,
        destination=f"{method}",
        origin=Origin(base="b", data="d", run_id="r1", run_name="valley", step=1),
        train=TRAIN,
        evaluation=EVALUATION,
        types=types,
        engine=engine,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("method", "engine", "types", "share", "layout"),
    [
        ("awq", "gptqmodel", (), 1.0, AWQ),
        pytest.param("awq", "autoawq", (), 1.0, AWQ, marks=pytest.mark.campaign),
        ("gptq", "gptqmodel", ("4-bit",), 1.0, GPTQ),
        pytest.param(
            *("gptq", "gptqmodel", ("8-bit",), 0.1, {"quant_method": "gptq", "bits": 8}),
            marks=pytest.mark.campaign,  # the way of 4 bits, once more
        ),
    ],
    ids=["awq", "autoawq", "gptq-4", "gptq-8"],
)
def test_it_loads_and_is_nearer_than_rounding(learned, made, method, engine, types, share, layout):
    folder = made(method, types, engine)
    (proof,) = json.loads((folder / method / PROOF_FILE).read_bytes())["proofs"]
    assert proof["distance"]["kl"] < share * proof["control"]["kl"]
    assert proof["distance"]["top1"] > 0.97
    ratio = proof["distance"]["perplexity"] / proof["original_perplexity"]
    assert ratio == pytest.approx(1, abs=0.03)
    assert proof["keep"]
    config = json.loads((folder / method / "config.json").read_bytes())
    said = config["quantization_config"]
    assert {key: said[key] for key in layout} == layout
    assert (folder / method / "tokenizer.json").exists()
    assert not (folder / method / ".scratch").exists()
    print(
        f"\n{proof['name']}: KL {proof['distance']['kl']:.2e}, rounded {proof['control']['kl']:.2e}"
    )

    if (method, engine) == ("awq", "gptqmodel"):
        lines = (folder / watched_make.SEARCHED_FILE).read_text().splitlines()
        texts = read_texts([TRAIN], EVALUATION, load_tokenizer(learned)[0]).calibration
        blocks = split_blocks(texts)
        assert {tuple(json.loads(line)[:2]) for line in lines} == {(len(blocks), len(blocks[0]))}


@pytest.mark.parametrize(
    ("method", "types"),
    [
        ("awq", ()),
        pytest.param("gptq", ("4-bit",), marks=pytest.mark.campaign),
        pytest.param("gptq", ("8-bit",), marks=pytest.mark.campaign),
    ],
    ids=["awq", "gptq-4", "gptq-8"],
)
def test_unpacked_weights_have_the_figures_of_the_packed_ones(
    learned, first, made, tmp_path, method, types
):
    """Unpacked and measured here, where gptqmodel is not."""
    folder, job = made(method, types) / method, job_for(learned, method, *types)
    (packed,) = json.loads((folder / PROOF_FILE).read_bytes())["proofs"]
    result = tmp_path / method
    shutil.copytree(folder, result)
    proof = prove_unpacked(job, result, first, JobProgress(io.StringIO()))
    # Both compute in float32, one of them with weights rounded to bfloat16.
    assert proof.distance.kl == pytest.approx(packed["distance"]["kl"], rel=0.05, abs=1e-5)
    assert proof.distance.perplexity == pytest.approx(packed["distance"]["perplexity"], rel=1e-3)
    assert proof.same_answers == packed["same_answers"]
    assert (proof.size_bytes, proof.keep) == (packed["size_bytes"], packed["keep"])


@pytest.mark.parametrize(("method", "types"), [("awq", ()), ("gptq", ("4-bit",))])
def test_awq_gets_all_texts_in_blocks_of_one_length_and_gptq_the_rows(
    learned, tmp_path, monkeypatch, method, types
):
    rows = [[place % 7 + 1] * (60 + place) for place in range(20)]
    got = []
    monkeypatch.setattr(Gptqmodel, "do", lambda self: got.extend(self.rows))
    progress = JobProgress(io.StringIO(), time.monotonic)
    (tmp_path / "made").mkdir()
    request = WriteRequest(
        job=job_for(learned, method, *types),
        model=learned,
        folder=tmp_path / "made",
        calibration=rows,
        tokenizer=None,
        tools=tmp_path,
        progress=progress,
    )
    calibrated.write(request)
    if method == "gptq":
        assert got == rows
    else:
        assert [len(block) for block in got] == [512] * (sum(map(len, rows)) // 512)
        joined = [token for row in rows for token in row]
        assert [token for block in got for token in block] == joined[: 512 * len(got)]


def test_sizes_that_cannot_be_divided_are_named(learned, tmp_path):
    assert choose_group(learned, "awq") == 128
    assert choose_group(DEMO / "model", "gptq") == 64
    with pytest.raises(ExpectedError, match="has 96 outputs; awq needs multiples of 64"):
        choose_group(DEMO / "model", "awq")
    odd = tmp_path / "odd"
    shutil.copytree(DEMO / "model", odd)
    config = json.loads((odd / "config.json").read_bytes())
    (odd / "config.json").write_text(json.dumps({**config, "intermediate_size": 500}))
    with pytest.raises(ExpectedError, match=r"have 192, 500 inputs; gptq needs multiples of 32"):
        choose_group(odd, "gptq")


@pytest.mark.parametrize(
    ("more", "size"),
    [({"linear_num_value_heads": 3, "linear_value_head_dim": 20}, 60), ({"mamba_d_ssm": 100}, 100)],
)
def test_layers_that_carry_a_state_are_divided_too(more, size, tmp_path):
    config = json.loads((DEMO / "model" / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    with pytest.raises(ExpectedError, match=rf"have {size}, .*inputs; gptq needs multiples"):
        choose_group(tmp_path, "gptq")


def test_a_model_that_is_built_otherwise_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 256}))
    with pytest.raises(ExpectedError, match=r"awq does not support this kind of model \(gpt2\)"):
        choose_group(tmp_path, "awq")


def test_gptq_in_place_rounds_as_gptqmodel_does(beside, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", both_gptq.__name__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(beside)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    leader, follower = (
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"weight"')
    )
    for found in (leader, follower):
        assert found["weight"] > 0.99, "a value between two codes may fall to either side"
        assert found["scales"] > 0.99
        assert found["zeros"] == found["groups"] == 1.0
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-3)
        assert found["damping"] == [0.05, 0.05]


def search_like_autoawq(layer: torch.nn.Linear) -> None:
    """Try a scale, and go back to what was kept: on a CPU `.cpu()` keeps the weights themselves."""
    kept = {name: value.cpu() for name, value in layer.state_dict().items()}
    layer.weight.data.mul_(3.0)
    layer.load_state_dict(kept)


def test_a_search_for_scales_leaves_the_weights_as_they_were():
    layer = torch.nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    search_like_autoawq(layer)
    assert not torch.equal(layer.weight, before), "what is mended"
    layer.weight.data.copy_(before)
    with autoawq._copied_state(layer):
        search_like_autoawq(layer)
    assert torch.equal(layer.weight, before)
    assert "state_dict" not in vars(layer)
    with pytest.raises(ExpectedError, match="damaged weight"), autoawq._copied_state(layer):
        layer.weight.data.mul_(3.0)


def test_only_awq_has_a_second_engine():
    with pytest.raises(ValueError, match="does not make gptq"):
        job_for(Path("m"), "gptq", "4-bit", engine="autoawq")


@pytest.mark.parametrize(
    ("method", "types"), [("awq", ()), pytest.param("gptq", ("4-bit",), marks=pytest.mark.campaign)]
)
def test_a_killed_job_goes_on_behind_its_last_layer(learned, beside, made, tmp_path, method, types):
    """Of GPTQ by hand: pytest -m campaign tests/agents/quantizers/formats/test_calibrated.py."""
    model = tmp_path / "exports" / "merged-1"
    shutil.copytree(learned, model)
    (model / "rackless.json").write_text(json.dumps({"content": "ab" * 32}))
    job = replace(job_for(model, method, *types), destination=f"exports/{method}-1")
    with start(job, tmp_path, beside) as broken:
        assert broken.stdout is not None
        assert any("Quantized 2 of 2" in line for line in broken.stdout)
        os.killpg(broken.pid, signal.SIGKILL)
    assert list(model.parent.glob(".layers-merged-1-*"))
    assert not (model.parent / f"{method}-1").exists()
    told = run(job, tmp_path, beside).stdout
    assert "Continuing after" in told
    resumed = load_file(model.parent / f"{method}-1" / "model.safetensors")
    straight = load_file(made(method, types) / method / "model.safetensors")
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in resumed)
    if method == "awq":
        scales = [value for name, value in straight.items() if name.endswith(".scales")]
        assert {value.dtype for value in scales} == {torch.float16}, "the classic layout"
    assert not [path for path in model.parent.iterdir() if path.name.startswith((".l", ".p"))]
