"""Of the copies of a model's weights only those that Transformers loads are used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.contract.model_files import choose_files
from agents.contract.spec import DataSpec, RunSpec
from agents.shared.models.used_files import list_used, list_weights
from agents.trainer.checkpoint.fingerprint import hash_like, hash_model
from app.library.models import find_model, weigh_weights
from app.library.sent_files import list_sent, say_sent
from app.storage.database import open_database
from app.storage.hashes import HashStore

DEMO = Path(__file__).parents[4] / "resources/demo/model"
LEFT_OUT = ("consolidated.safetensors", "pytorch_model.bin", "model.Q8_0.gguf")
SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
COPIES = [
    "consolidated.safetensors", "consolidated.safetensors.index.json", "pytorch_model.bin",
    "consolidated.00.pth", "model.pt", "flax_model.msgpack", "flax_model.msgpack.index.json",
    "tf_model.h5", "rust_model.ot", "model.Q8_0.gguf", "model.onnx", "pytorch_model.bin.index.json",
    "model.fp16.safetensors", "model.fp16.safetensors.index.json", "adapter_model.safetensors",
    "original/params.json", "original/consolidated.00.pth", "original/tokenizer.model",
    "adapter/adapter_model.safetensors", "adapter/adapter_config.json", "metal/model.bin",
    "openvino/openvino_model.xml", "onnx/model.onnx", "onnx/config.json", ".cache/x.json",
    "README.md", ".gitattributes",
]  # fmt: skip


def choose(*names: str, **texts: object) -> set[str]:
    """Return the used ones of these names; `texts` are objects of `config` and `index`."""
    files = {"config.json": texts.get("config", {}), INDEX: texts.get("index", {})}
    return set(choose_files(names, lambda name: json.dumps(files[name]).encode()).names)


def index_of(*shards: str) -> dict[str, object]:
    return {"metadata": {}, "weight_map": {f"w{n}": shard for n, shard in enumerate(shards)}}


def test_one_file_is_sent_without_its_copies() -> None:
    wanted = [*SMALL, "model.safetensors"]
    assert choose(*wanted, *COPIES) == set(wanted)


def test_shards_are_those_of_the_list() -> None:
    wanted = [*SMALL, INDEX, *SHARDS]
    other = "model-00001-of-00003.safetensors"
    assert choose(*wanted, other, *COPIES, index=index_of(*SHARDS)) == set(wanted)


def test_one_file_is_preferred_to_shards_as_transformers_does() -> None:
    wanted = [*SMALL, "model.safetensors"]
    assert choose(*wanted, INDEX, *SHARDS, index=index_of(*SHARDS)) == set(wanted)


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ("consolidated.safetensors", {"consolidated.safetensors"}),
        (INDEX, {INDEX, *SHARDS}),
        ("../other/model.safetensors", set()),
        ("pytorch_model.bin", set()),
        (7, set()),
    ],
)
def test_config_may_name_the_weights(named: object, wanted: set[str]) -> None:
    there = [*SMALL, "model.safetensors", INDEX, *SHARDS, *COPIES]
    used = choose(*there, config={"transformers_weights": named}, index=index_of(*SHARDS))
    assert used == {*SMALL, *wanted}


def test_missing_shard_makes_the_set_incomplete() -> None:
    text = json.dumps(index_of(*SHARDS)).encode()
    used = choose_files([*SMALL, INDEX, SHARDS[0]], lambda name: text)
    assert not used.is_whole
    assert used.weights == set(SHARDS)
    assert choose_files([*SMALL, INDEX, *SHARDS], lambda name: text).is_whole


@pytest.mark.parametrize(
    "names", [["pytorch_model.bin"], ["consolidated.safetensors"], ["model.Q8_0.gguf"], []]
)
def test_without_a_usable_set_no_weights_are_sent(names: list[str]) -> None:
    used = choose_files([*SMALL, *names], lambda name: None)
    assert used.names == set(SMALL)
    assert not used.is_whole


JSON = st.recursive(
    st.none() | st.text(max_size=9) | st.integers() | st.sampled_from(["../x.safetensors", "/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@given(value=JSON)
def test_odd_lists_lead_nowhere(value: object) -> None:
    for text in (json.dumps(value), json.dumps({"weight_map": value}), "{", "\xff"):
        used = choose_files([*SMALL, INDEX, *SHARDS], lambda name, t=text: t.encode("latin-1"))
        assert used.names <= {*SMALL, INDEX, *SHARDS}
        assert not any("/" in name for name in used.weights)


@pytest.fixture
def doubled(tmp_path: Path) -> Path:
    """A model with three copies of its weights and a folder of another format."""
    folder = shutil.copytree(DEMO, tmp_path / "doubled")
    for name in LEFT_OUT:
        shutil.copyfile(folder / "model.safetensors", folder / name)
    (folder / "original").mkdir()
    shutil.copyfile(folder / "config.json", folder / "original" / "params.json")
    return folder


def test_folder_is_sent_counted_and_shown_without_its_copies(doubled: Path, tmp_path: Path) -> None:
    wanted = sorted(path.name for path in DEMO.iterdir())
    assert [path.name for path in list_used(doubled)] == wanted
    assert [path.name for path in list_weights(doubled)] == ["model.safetensors"]
    hashes = HashStore(open_database(tmp_path / "home" / "rackless.sqlite3"))
    source = find_model(str(doubled), hashes)
    assert [entry.path for entry in source.files] == wanted
    assert weigh_weights(str(doubled)) == (doubled / "model.safetensors").stat().st_size
    spec = RunSpec(model=str(doubled), data=DataSpec(train=str(tmp_path / "none.jsonl")))
    (sent,) = list_sent(spec)
    assert (sent.num_files, set(sent.left_out)) == (6, {*LEFT_OUT, "original"})
    said = say_sent(sent)
    assert said.startswith(f"model: {doubled}, 6 files, 3.4 MiB; not sent: ")
    assert said.endswith(" and 1 more (10.1 MiB)")


def test_copies_change_no_hash_of_a_model_and_its_weights_do(doubled: Path) -> None:
    assert hash_model(doubled, None) == hash_model(DEMO, None)
    before = hash_model(doubled, None, copies=True)
    assert before != hash_model(DEMO, None)
    # A checkpoint of an earlier version has the hash of all files.
    now = hash_model(doubled, None)
    assert hash_like(doubled, None, now, before) == before
    assert hash_like(doubled, None, now, "0" * 64) == now
    with (doubled / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert hash_model(doubled, None) != now
    assert hash_like(doubled, None, hash_model(doubled, None), before) != before
