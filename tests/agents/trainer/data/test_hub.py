"""Data sets of the hub: Parquet as the hub converts it, else the files of the data set itself."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from agents.contract.spec import DataSpec, RunSpec
from agents.errors import ExpectedError
from agents.trainer.data.hub import find_data, find_model


def fake_download(folder, names, *, converted):
    def download(dataset, *, repo_type, allow_patterns, revision=None):
        assert (dataset, repo_type) == ("org/name", "dataset")
        if (revision is not None) != converted:
            raise LocalEntryNotFoundError("404 Not Found")
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("x")
        return str(folder)

    return download


def names_of(found, folder):
    return [path.relative_to(folder).as_posix() for path in found.paths]


def test_the_converted_training_split_comes_first(tmp_path):
    names = ["default/train/0001.parquet", "default/train/0000.parquet"]
    found = find_data("org/name", fake_download(tmp_path, names, converted=True))
    assert names_of(found, tmp_path) == sorted(names)


def test_one_of_several_parts_has_to_be_named(tmp_path):
    names = ["de/train/0.parquet", "en/partial-train/0.parquet"]
    download = fake_download(tmp_path, names, converted=True)
    with pytest.raises(ExpectedError, match="has the parts de, en"):
        find_data("org/name", download)
    assert names_of(find_data("org/name:en", download), tmp_path) == names[1:]


def test_else_the_files_of_the_data_set_are_taken(tmp_path):
    names = ["data/train.jsonl", "data/test.jsonl", "README.md"]
    found = find_data("org/name", fake_download(tmp_path, names, converted=False))
    assert names_of(found, tmp_path) == ["data/train.jsonl"]


def find_held_out(folder, names, *, converted, train="org/name", name="org/name"):
    download = fake_download(folder, names, converted=converted)
    return names_of(find_data(name, download, held_out_from=train), folder)


@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (["train", "test", "validation"], "validation"),
        (["train", "test"], "test"),
        (["dev", "partial-train"], "dev"),
    ],
)
def test_evaluation_takes_the_split_that_is_held_out(tmp_path, splits, expected, converted):
    names = [f"default/{split}/0000.parquet" for split in splits]
    download = fake_download(tmp_path, names, converted=converted)
    for _ in range(2):  # the second time the files of both splits lie there
        trained = names_of(find_data("org/name", download), tmp_path)
        assert trained == [name for name in names if "train" in name]
        found = find_held_out(tmp_path, names, converted=converted)
        assert found == [f"default/{expected}/0000.parquet"]


@pytest.mark.parametrize("converted", [True, False])
def test_a_data_set_that_holds_out_nothing_cannot_evaluate_itself(tmp_path, converted):
    names = ["default/train/0000.parquet"]
    with pytest.raises(
        ExpectedError, match="org/name holds out nothing to evaluate with"
    ) as caught:
        find_held_out(tmp_path, names, converted=converted)
    assert "data.eval" in caught.value.hint
    found = find_held_out(tmp_path, names, converted=converted, train="other/set")
    assert found == names


def test_what_another_part_holds_out_is_not_taken(tmp_path):
    names = ["de/test/0.parquet", "de/train/0.parquet", "en/train/0.parquet"]
    with pytest.raises(ExpectedError, match="org/name:en holds out nothing"):
        find_held_out(tmp_path, names, converted=True, train="org/name:en", name="org/name:en")
    found = find_held_out(tmp_path, names, converted=True, name="org/name:de")
    assert found == names[:1]


def test_other_kinds_beside_the_training_files_do_no_harm(tmp_path):
    names = ["train.jsonl", "test.jsonl", "requirements.txt"]
    download = fake_download(tmp_path, names, converted=False)
    assert names_of(find_data("org/name", download), tmp_path) == names[:1]


def test_what_cannot_be_fetched_is_said():
    def download(dataset, **options):
        raise LocalEntryNotFoundError("no network")

    with pytest.raises(ExpectedError, match="cannot be fetched from the hub: no network"):
        find_data("org/name", download)


class Refused(GatedRepoError):
    """What the hub's tools raise; theirs wants an answer of the hub to be made of."""

    def __init__(self):
        OSError.__init__(self, "401 Client Error.\n\nCannot access gated repo")


class Unknown(RepositoryNotFoundError):
    def __init__(self):
        OSError.__init__(self, "404 Client Error.")


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (Refused(), "behind a licence", "Accept it at https://huggingface.co/org/name, then give"),
        (Unknown(), "it is missing or private", "if it is private, give the node your token"),
        (OSError(""), "cannot be fetched from the hub: OSError", "Check the spelling"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_said(monkeypatch, error, message, hint):
    def refuse(*names, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(ExpectedError, match=message) as caught:
        find_model("org/name")
    assert hint in caught.value.hint


def test_data_behind_a_licence_are_said():
    def refuse(name, **options):
        raise Refused

    with pytest.raises(ExpectedError, match="behind a licence") as caught:
        find_data("org/name", refuse)
    assert "https://huggingface.co/datasets/org/name" in caught.value.hint


def test_a_model_in_gptq_is_loaded_to_answer_and_not_to_train(tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model, tmp_path / "gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))

    assert find_model(str(folder)) == folder
    with pytest.raises(ExpectedError, match=r"is quantized \(gptq\), and nothing can be trained"):
        find_model(str(folder), RunSpec(model=str(folder), data=DataSpec(train="d")))
