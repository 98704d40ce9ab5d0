"""What exports made is kept with its lineage; the same files are the same artifact anywhere."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.requests.exports import Origin
from app.artifacts.record import (
    add_folder,
    find_artifact,
    list_artifacts,
    look_at_folders,
    record_export,
)
from app.errors import UserError
from app.presentation.result_text import describe_lineage
from app.runs.services import Services
from tests.fakes.artifacts import make_folder
from tests.fakes.cluster import FakeCluster, make_services

ORIGIN = Origin(base="org/base", data="chats.jsonl", run_id="r-1", run_name="poems", step=40)


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return make_services(tmp_path / "home", FakeCluster("alpha"))


def test_an_export_is_kept_with_all_that_its_proof_says(services: Services, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out", ORIGIN, "gguf", "Q8_0", "Q4_K_M")
    made = record_export(services, folder, "gguf", ("Q8_0", "Q4_K_M"), ORIGIN)

    assert (made.label, made.format, made.types) == ("poems-gguf:1", "gguf", ("Q8_0", "Q4_K_M"))
    assert made.origin == ORIGIN
    assert made.checkpoint == "runs/r-1/checkpoints/step-00000040"
    assert made.size_bytes == sum(f.stat().st_size for f in folder.iterdir())
    assert [(v.name, v.keep) for v in made.verdicts] == [("Q8_0", True), ("Q4_K_M", True)]
    assert made.runtimes == ("llama.cpp b1",)
    assert made.measured == {"peak_memory_bytes": 7}
    assert [(c.kind, c.place, c.state) for c in made.copies] == [("folder", str(folder), "whole")]
    assert find_artifact(services, "poems-gguf") == made
    assert list_artifacts(services, "poems") == list_artifacts(services, "r-") == (made,)


def test_what_making_took_is_told(services: Services, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out", ORIGIN, "nf4")
    phase = {"name": "merge", "seconds": 61.0, "ram_bytes": 2**30, "vram_bytes": None}
    on_gpu = {"name": "nf4", "seconds": 9.0, "ram_bytes": 2**20, "vram_bytes": 2**31}
    measured = {"node": "beta", "phases": [phase, on_gpu]}
    about = json.loads((folder / "proof.json").read_bytes())
    (folder / "proof.json").write_text(json.dumps({**about, "measured": measured}))
    told = dict(describe_lineage(record_export(services, folder, "nf4", (), ORIGIN)))
    assert told["made in"] == ("1 min 10 s on beta, up to 1.0 GiB of memory, 2.0 GiB of GPU memory")
    assert told["data"] == "chats.jsonl"


def test_merged_models_take_their_hashes_from_beside_them(
    services: Services, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "out", ORIGIN, "merged")
    (folder / "rackless.json").write_text(json.dumps({"base_sha256": "b", "data_sha256": "d"}))
    origin = record_export(services, folder, "merged", (), ORIGIN).origin
    assert origin is not None
    assert (origin.base_sha256, origin.data_sha256) == ("b", "d")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nbase_model: org/base\n")
    assert "- Base: `org/base`, sha256 `b`" in card


def test_the_next_export_is_the_next_version(services: Services, tmp_path: Path) -> None:
    for number in (1, 2):
        folder = make_folder(tmp_path / str(number), ORIGIN, "awq")
        (folder / "model.safetensors").write_bytes(bytes([number]))
        record_export(services, folder, "awq", (), ORIGIN)
    assert find_artifact(services, "poems-awq").label == "poems-awq:2"
    assert find_artifact(services, "poems-awq:1").version == 1
    with pytest.raises(UserError, match="there is no artifact poems-awq:3"):
        find_artifact(services, "poems-awq:3")


def test_the_name_tells_the_format_whatever_the_run_is_called(
    services: Services, tmp_path: Path
) -> None:
    names = []
    for number, run_name in enumerate(("a long name of a run, " * 4, "\u8bd7\u6b4c")):
        origin = replace(ORIGIN, run_name=run_name)
        for method in ("merged", "awq"):
            folder = make_folder(tmp_path / f"{method}-{number}", origin, method)
            names.append(record_export(services, folder, method, (), origin).label)
    long = "a-long-name-of-a-run-a-long-name-of-a-run-a-long-name"
    assert names == [f"{long}-merged:1", f"{long}-of-awq:1", "r-1-merged:1", "r-1-awq:1"]


def test_a_folder_that_vanished_is_missing_and_comes_back_where_it_was_moved(
    services: Services, tmp_path: Path
) -> None:
    made = record_export(services, make_folder(tmp_path / "out", ORIGIN, "nf4"), "nf4", (), ORIGIN)
    (tmp_path / "out").rename(tmp_path / "moved")
    (copy,) = look_at_folders(made).copies
    assert (copy.state, copy.problem) == ("missing", "it was moved or deleted")

    found = add_folder(services, tmp_path / "moved")
    assert found.label == made.label
    assert look_at_folders(found).folder() == str(tmp_path / "moved")

    (tmp_path / "moved" / "model.safetensors").unlink()
    states = {c.place: c.state for c in look_at_folders(found).copies}
    assert states[str(tmp_path / "moved")] == "damaged"


def test_another_artifact_takes_a_place_over(services: Services, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out", ORIGIN, "nf4")
    old = record_export(services, folder, "nf4", (), ORIGIN)
    (folder / "model.safetensors").write_bytes(b"other")
    record_export(services, folder, "nf4", (), ORIGIN)
    assert find_artifact(services, old.label).copies == ()


@pytest.mark.parametrize("kind", ["model", "gguf"])
def test_folders_from_elsewhere_are_entered_with_what_is_known(
    services: Services, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    if kind == "gguf":
        (folder / "tiny-Q8_0.gguf").write_bytes(b"GGUF")
    else:
        config = {"quantization_config": {"quant_method": "awq", "bits": 4}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(b"1")
    made = add_folder(services, folder, "mine")
    assert (made.label, made.origin) == ("mine:1", None)
    assert (made.format, made.types) == (("gguf", ("Q8_0",)) if kind == "gguf" else ("awq", ()))


def test_what_is_no_artifact_is_refused(services: Services, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(UserError, match="is no artifact"):
            add_folder(services, folder)
    assert services.artifacts.all() == ()


def test_a_broken_proof_says_nothing_and_breaks_nothing(services: Services, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out", ORIGIN, "nf4")
    (folder / "proof.json").write_text("{")
    made = record_export(services, folder, "nf4", (), ORIGIN)
    assert (made.verdicts, made.measured) == ((), None)
    shutil.rmtree(folder)
    assert look_at_folders(made).copies[0].state == "missing"


def test_the_types_are_those_that_the_proof_says(services: Services, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out", ORIGIN, "gguf", "Q4_K_M")
    assert record_export(services, folder, "gguf", ("Q8_0",), ORIGIN).types == ("Q4_K_M",)
    folder = make_folder(tmp_path / "four", ORIGIN, "gptq", "gptq 8-bit")
    assert record_export(services, folder, "gptq", ("4-bit",), ORIGIN).types == ("8-bit",)


def test_a_moved_folder_is_the_same_with_what_programs_have_left_in_it(
    services: Services, tmp_path: Path
) -> None:
    made = record_export(
        services, make_folder(tmp_path / "out", ORIGIN, "gguf", "Q8_0"), "gguf", ("Q8_0",), ORIGIN
    )
    folder = (tmp_path / "out").rename(tmp_path / "moved")
    (folder / "Modelfile-Q8_0").write_text("FROM ./poems-Q8_0.gguf\n")
    (folder / ".DS_Store").write_bytes(b"1")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "x").write_bytes(b"1")
    found = add_folder(services, folder)
    assert (found.label, found.files) == (made.label, made.files)
    assert str(folder) in {one.place for one in found.copies}
