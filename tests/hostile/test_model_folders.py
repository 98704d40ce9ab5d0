"""Model folders from strangers, each broken in another way: named before a byte is sent."""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agents.contract.messages import to_wire
from agents.contract.node import ModelRefusal
from agents.contract.spec import AdapterKind, AdapterSpec, DataSpec, RunSpec
from agents.serve.handlers import find_handler
from agents.shared.models.fit import find_misfits, find_refusals
from agents.shared.models.folder import inspect_model
from app.errors import UserError
from app.forecasts.planner import Planner
from app.planning.hardware.cluster import Cluster
from app.runs.inputs.preview import preview_data
from app.runs.lifecycle.launch import start_run
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.models import (
    CONFIG,
    TOKENIZER,
    name_shapes,
    pack,
    pack_header,
    write_model,
    write_shards,
)

Break = Callable[[Path], None]
TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster("alpha", "beta")


@pytest.fixture
def services(tmp_path: Path, cluster: FakeCluster) -> Services:
    return make_services(tmp_path / "home", cluster)


def make_run(tmp_path: Path, **changes: Any) -> RunSpec:
    data = tmp_path / "chats.jsonl"
    data.write_text('{"text": "hello"}\n')
    spec = RunSpec(model=str(tmp_path / "model"), data=DataSpec(train=str(data)))
    return replace(spec, **changes)


def refused(services: Services, spec: RunSpec) -> str:
    """Start a run that must be refused; return what a person reads."""
    with pytest.raises(UserError) as caught:
        asyncio.run(start_run(services, spec))
    assert caught.value.hint, caught.value.message
    return f"{caught.value.message}. {caught.value.hint}"


def config(**changes: Any) -> Break:
    """Change config.json alone; the weights stay."""

    def change(folder: Path) -> None:
        text = json.dumps({**CONFIG, **changes})
        (folder / "config.json").write_text(text)

    return change


def weights(data: bytes | Callable[[bytes], bytes]) -> Break:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(data if isinstance(data, bytes) else data(path.read_bytes()))

    return change


def tensors(change_shapes: Callable[[dict[str, tuple[int, ...]]], Any], **kinds: Any) -> Break:
    """Write weights that are valid, and not those of the config."""
    shapes = name_shapes()
    change_shapes(shapes)
    return weights(pack(shapes, **kinds))


def entry(**changes: Any) -> Break:
    """Write one tensor whose entry lies."""
    return weights(pack_header({"a.weight": {**TENSOR, **changes}}, 16))


def index(change: Callable[[dict[str, Any]], Any]) -> Break:
    def rewrite(folder: Path) -> None:
        write_shards(folder)
        path = folder / "model.safetensors.index.json"
        listed = json.loads(path.read_text())
        change(listed)
        path.write_text(json.dumps(listed))

    return rewrite


def file(name: str, text: str | bytes) -> Break:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def without(*names: str, then: Break | None = None) -> Break:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()
        if then is not None:
            then(folder)

    return change


def pipe(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def link(name: str, target: str = "/etc/hostname") -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def sparse(name: str, size: int) -> Break:
    def change(folder: Path) -> None:
        with (folder / name).open("wb") as handle:
            handle.truncate(size)

    return change


def lose_shard(folder: Path) -> None:
    write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_shard(folder: Path) -> None:
    write_shards(folder)
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def double_shard(folder: Path) -> None:
    write_shards(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))
    second.write_bytes(first.read_bytes())


def swap_shards(folder: Path) -> None:
    write_shards(folder)
    one, two = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def place_into(name: str) -> Break:
    return index(lambda listed: listed["weight_map"].update({"lm_head.weight": name}))


def adapter(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    base = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(base))
    (folder / "adapter_model.safetensors").write_bytes(pack({"a.weight": (2, 2)}))


def tokenizer(**changes: Any) -> Break:
    model = {**TOKENIZER["model"], **changes}  # type: ignore[dict-item]
    return file("tokenizer.json", json.dumps({**TOKENIZER, "model": model}))


def gpt2(lost: str) -> Break:
    """Write another family, with experts, without one of its weights."""

    def change(folder: Path) -> None:
        shapes: dict[str, tuple[int, ...]] = {"wte.weight": (48, 8), "ln_f.weight": (8,)}
        for number in range(2):
            parts = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "ln_1": (8,)}
            parts |= {f"mlp.experts.{expert}.up": (8, 16) for expert in range(2)}
            shapes |= {f"h.{number}.{name}.weight": shape for name, shape in parts.items()}
        shapes.pop(lost, None)
        sizes = {"vocab_size": 48, "n_embd": 8, "n_layer": 2, "n_head": 2, "num_experts": 2}
        said = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
        (folder / "config.json").write_text(json.dumps(said))
        (folder / "model.safetensors").write_bytes(pack(shapes))

    return change


DEEP = b"[" * 200_000
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
ZOO: dict[str, tuple[Break, str]] = {
    # ---- safetensors
    "cut in its data": (weights(lambda raw: raw[:-100]), "model.safetensors is cut off"),
    "cut in its header": (weights(lambda raw: raw[:200]), "ends in its header"),
    "empty file": (weights(b""), "0 bytes, too few for a safetensors"),
    "four bytes": (weights(b"abcd"), "4 bytes, too few for a safetensors"),
    "header of 2^63 bytes": (weights(struct.pack("<Q", 2**63) + b"{}"), "claims a header of"),
    "header of 2^64-1 bytes": (weights(b"\xff" * 8 + b"{}"), "claims a header of"),
    "header of 101 MB": (weights(struct.pack("<Q", 101_000_000) + b"{}"), "claims a header of"),
    "pickle by another name": (weights(b"\x80\x04\x95" + bytes(50)), "damaged file"),
    "zip by another name": (weights(b"PK\x03\x04" + bytes(50)), "damaged file"),
    "web page instead of a file": (weights(b"<!DOCTYPE html><html></html>"), "damaged file"),
    "pointer of git lfs": (weights(b"version https://git-lfs.github.com/spec/v1\n"), "damaged"),
    "no JSON": (weights(pack_header(b"{nope}", 0)), "header that is not JSON"),
    "a JSON list": (weights(pack_header([1], 0)), "is not a JSON object"),
    "deep JSON": (weights(pack_header(b'{"a":' + DEEP, 0)), "header"),
    "million lists": (weights(pack_header(b'{"a":[' + b"[]," * 10**6 + b"[]]}", 0)), "more lists"),
    "not UTF-8": (weights(pack_header(b'{"\xff": 1}', 0)), "not JSON"),
    "number of 5,000 digits": (weights(pack_header(b'{"a": ' + b"9" * 5000 + b"}", 0)), "not JSON"),
    "bytes after the last tensor": (weights(lambda raw: raw + bytes(9)), "9 bytes that belong to"),
    "unknown type": (entry(dtype="F128"), "unknown type F128"),
    "type that is a number": (entry(dtype=7), "unknown type 7"),
    "shape that does not fit": (entry(shape=[2, 3]), "F32 of shape [2, 3] takes 24"),
    "type that lies": (entry(dtype="F64"), "F64 of shape [2, 2] takes 32"),
    "negative size": (entry(shape=[-2, -2]), "impossible shape"),
    "size that is a text": (entry(shape=["2", 2]), "impossible shape"),
    "size that is a fraction": (entry(shape=[2.0, 2]), "impossible shape"),
    "size that is true": (entry(shape=[True, 4]), "impossible shape"),
    "product beyond 64 bits": (entry(shape=[2**40, 2**40]), "impossible shape"),
    "product that wraps to 4": (entry(shape=[2**62 + 1, 4]), "impossible shape"),
    "5,000 dimensions": (entry(shape=[1] * 5000), "impossible shape"),
    "no shape": (entry(shape=None), "impossible shape"),
    "offsets backwards": (entry(data_offsets=[16, 0]), "impossible place"),
    "offsets beyond the file": (entry(data_offsets=[16, 32]), "leaves a gap"),
    "one offset": (entry(data_offsets=[0]), "impossible place"),
    "negative offset": (entry(data_offsets=[-16, 0]), "impossible place"),
    "entry that is a list": (weights(pack_header({"a": [1]}, 0)), "not by a JSON object"),
    "tensors that overlap": (
        weights(pack_header({"a": TENSOR, "b": TENSOR}, 16)),
        "overlaps the tensor before it",
    ),
    "gap between tensors": (
        weights(pack_header({"a": TENSOR, "b": {**TENSOR, "data_offsets": [20, 36]}}, 36)),
        "leaves a gap",
    ),
    "name given twice": (
        weights(pack_header(b'{"a":' + json.dumps(TENSOR).encode() + b',"a":{}}', 16)),
        "names a twice",
    ),
    "pipe instead of weights": (pipe("model.safetensors"), "is a pipe, not a file"),
    "link out of the folder": (link("model.safetensors"), "leads out of"),
    "link to nothing": (link("tokenizer.json", "/nowhere/x"), "leads out of"),
    "weights of zeros": (sparse("model.safetensors", 1 << 40), "is not a JSON object"),
    # ---- shards
    "missing shard": (lose_shard, "model-00002-of-00002.safetensors is missing"),
    "cut shard": (cut_shard, "model-00001-of-00002.safetensors is cut off"),
    "swapped shards": (swap_shards, "is not in"),
    "one shard in the place of another": (double_shard, "weight twice, in model-00001-of-00002"),
    "shard above the folder": (place_into("../../x.safetensors"), "not a file of the folder"),
    "shard by an absolute path": (place_into("/etc/x.safetensors"), "not a file of the folder"),
    "shard by a Windows path": (place_into("..\\x.safetensors"), "not a file of the folder"),
    "shard on a drive": (place_into("C:x.safetensors"), "not a file of the folder"),
    "shard that is a pickle": (place_into("pytorch_model.bin"), "not a file of the folder"),
    "shard that is a number": (index(lambda i: i["weight_map"].update(a=1)), "not a file of the"),
    "tensor that no shard has": (
        index(lambda i: i["weight_map"].update({"x.weight": "model-00001-of-00002.safetensors"})),
        "x.weight is not in model-00001",
    ),
    "empty list of shards": (index(lambda i: i["weight_map"].clear()), "has no weight_map"),
    "list without a map": (index(lambda i: i.pop("weight_map")), "has no weight_map"),
    "list without metadata": (index(lambda i: i.pop("metadata")), "has no metadata"),
    "list of shards that is no JSON": (
        without("model.safetensors", then=file("model.safetensors.index.json", "{")),
        "not JSON",
    ),
    "shards without a list": (
        without("model.safetensors", then=file("model-00001-of-00002.safetensors", b"x")),
        "has neither model.safetensors nor",
    ),
    # ---- config
    "no config": (without("config.json"), "has no config.json"),
    "config that is no JSON": (file("config.json", "{"), "config.json that is not JSON"),
    "config that is a list": (file("config.json", "[]"), "config.json that is not a JSON object"),
    "empty config": (file("config.json", "{}"), "names no model_type"),
    "deep config": (file("config.json", DEEP), "config.json that"),
    "config of 5 MB": (file("config.json", b" " * (5 << 20)), "used: it has more than"),
    "config that is a pipe": (pipe("config.json"), "is a pipe, not a file"),
    "config in UTF-16": (
        file("config.json", json.dumps(CONFIG).encode("utf-16")),
        "config.json that is not JSON",
    ),
    "10^9 layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "layers as a text": (config(num_hidden_layers="2"), "num_hidden_layers is '2'"),
    "width 0": (config(hidden_size=0), "hidden_size is 0"),
    "negative width": (config(hidden_size=-8), "hidden_size is -8"),
    "width not a number": (config(hidden_size=float("nan")), "hidden_size is nan"),
    "width infinite": (config(hidden_size=float("inf")), "hidden_size is inf"),
    "width true": (config(hidden_size=True), "hidden_size is True"),
    "width as an object": (config(hidden_size={"a": 1}), "hidden_size is {'a': 1}"),
    "vocabulary of 10^12": (config(vocab_size=10**12), "vocab_size is 1000000000000"),
    "number of 100 digits": (config(intermediate_size=10**100), "more than 60 digits"),
    "heads 10^7": (config(num_attention_heads=10**7), "num_attention_heads is 10000000"),
    "positions as a text": (config(max_position_embeddings="all"), "max_position_embeddings is"),
    "epsilon not a number": (config(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "scaling that is a text": (config(rope_scaling="yarn"), "rope_scaling is 'yarn'"),
    "architectures as a number": (config(architectures=5), "architectures is 5"),
    "model_type as a list": (config(model_type=["llama"]), "model_type is"),
    "text_config as a list": (config(text_config=[]), "text_config is []"),
    "weights elsewhere": (config(transformers_weights="../x.safetensors"), "takes weights from"),
    # ---- weights of another config
    "one layer less than said": (config(num_hidden_layers=3), "model.layers.2 is missing"),
    "five layers less than said": (config(num_hidden_layers=7), "and 4 more layers are missing"),
    "one layer more than said": (config(num_hidden_layers=1), "config.json names 1 layers"),
    "larger vocabulary than said": (config(vocab_size=31), "embed_tokens.weight is 32 x 128"),
    "other width": (config(hidden_size=64), "config.json makes it"),
    "other inner width": (config(intermediate_size=512), "config.json makes it 512 x 128"),
    "no embedding": (tensors(lambda s: s.pop("model.embed_tokens.weight")), "embedding (embed_tok"),
    "no head, and not tied": (tensors(lambda s: s.pop("lm_head.weight")), "lm_head.weight) is"),
    "no last norm": (tensors(lambda s: s.pop("model.norm.weight")), "norm.weight) is missing"),
    "one matrix missing": (
        tensors(lambda s: s.pop("model.layers.1.self_attn.k_proj.weight")),
        "model.layers.1.self_attn.k_proj.weight is missing",
    ),
    "no layers at all": (
        weights(pack({"model.embed_tokens.weight": (32, 128), "model.norm.weight": (128,)})),
        "has no layers",
    ),
    "weights of another family": (weights(pack({"bert.x.weight": (2, 2)})), "has no layers"),
    # ---- tokenizer
    "no tokenizer": (without("tokenizer.json"), "has no tokenizer"),
    "tokenizer that is no JSON": (file("tokenizer.json", "{"), "tokenizer.json is not JSON"),
    "tokenizer that is cut": (
        file("tokenizer.json", json.dumps(TOKENIZER)[:-20]),
        "tokenizer.json is not JSON",
    ),
    "tokenizer that is a list": (file("tokenizer.json", "[]"), "json is not a JSON object"),
    "tokenizer without a model": (file("tokenizer.json", "{}"), "no object named model"),
    "deep tokenizer": (file("tokenizer.json", DEEP), "tokenizer.json is"),
    "tokenizer of 300 MB": (sparse("tokenizer.json", 300 << 20), "used: it has more than"),
    "tokenizer that is a pipe": (pipe("tokenizer.json"), "is a pipe, not a file"),
    "broken tokenizer_config": (file("tokenizer_config.json", "{"), "tokenizer_config.json is not"),
    "template of 1 GB": (sparse("chat_template.jinja", 1 << 30), "jinja cannot be used"),
    "template that is a pipe": (pipe("chat_template.jinja"), "is a pipe, not a file"),
    # ---- other kinds of folders
    "adapter alone": (adapter, "is an adapter, not a whole model"),
    "adapter that names another model": (
        file("adapter_config.json", '{"base_model_name_or_path": "org/evil"}'),
        "adapter_config.json, which stands for another model",
    ),
    "pickles alone": (
        without("model.safetensors", then=file("pytorch_model.bin", b"x")),
        "only pickled ones, which can run code",
    ),
    "GGUF alone": (
        without("model.safetensors", then=file("model-q4.gguf", b"GGUF")),
        "only a GGUF file",
    ),
    "no weights": (without("model.safetensors"), "has no weights in safetensors"),
    "encoder": (config(**BERT), "is not a causal language model: it reads texts and writes none"),
    "encoder without its task": (config(model_type="roberta", architectures=None), "reads texts"),
    "encoder and decoder": (config(model_type="t5", is_encoder_decoder=True), "an encoder and a"),
    "classifier": (config(architectures=["LlamaForSequenceClassification"]), "for another task"),
    "image model": (config(model_type="vit", architectures=["ViTModel"]), "not a causal language"),
    "GPTQ": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized (gptq)"),
    "AWQ": (config(quantization_config={"quant_method": "awq"}), "quantized (awq)"),
    "FP8": (config(quantization_config={"quant_method": "fp8"}), "quantized (fp8)"),
    "compressed": (config(quantization_config={"quant_method": "hqq"}), "quantized ("),
    "GPTQ without a word": (
        tensors(lambda s: s.update({"model.layers.0.mlp.up_proj.qweight": (2, 2)})),
        "holds quantized weights",
    ),
    "FP8 without a word": (tensors(lambda s: None, dtype="F8_E4M3", width=1), "holds quantized"),
    # ---- what a library would stumble over on the nodes
    "padding beyond the vocabulary": (config(pad_token_id=99), "pad_token_id is 99, and there are"),
    "tokenizer of an unknown type": (tokenizer(type="Foo"), "a model of the unknown type 'Foo'"),
    "tokenizer without words": (tokenizer(vocab={}), "has no vocabulary"),
    "added tokens by name": (
        file("tokenizer.json", json.dumps({**TOKENIZER, "added_tokens": {"a": 1}})),
        "added_tokens that are not a list",
    ),
    "end token that is a number": (
        file("tokenizer_config.json", '{"eos_token": 5}'),
        "has an eos_token that is not text",
    ),
    "template that is a number": (
        file("tokenizer_config.json", '{"chat_template": 5}'),
        "has a chat_template that is not text",
    ),
    "empty sentencepiece": (
        without("tokenizer.json", then=file("tokenizer.model", "")),
        "tokenizer.model is empty",
    ),
    "pointer instead of sentencepiece": (
        without("tokenizer.json", then=file("tokenizer.model", "version https://git-lfs.x")),
        "tokenizer.model is a page or a pointer",
    ),
    "vocabulary that is cut": (
        without("tokenizer.json", then=file("vocab.json", '{"a": 1')),
        "vocab.json is not JSON",
    ),
    "a layer of GPT-2 without its matrix": (gpt2("h.1.attn.c_attn.weight"), "c_attn.weight is mis"),
    "GPT-2 without its embedding": (gpt2("wte.weight"), "no matrix has 48 rows"),
    "one expert missing": (gpt2("h.0.mlp.experts.1.up.weight"), "experts.1.up.weight is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_a_broken_model_is_named_before_a_byte_is_sent(
    name: str, tmp_path: Path, services: Services, cluster: FakeCluster, attack: Callable[..., None]
) -> None:
    change, words = ZOO[name]
    change(write_model(tmp_path / "model"))
    told = refused(services, make_run(tmp_path))
    attack(given=f"model folder: {name}", tried="rackless start", happened=told)
    assert any(word in told for word in words.split("|")), told
    assert all(not cluster[node].pushed and not cluster[node].intents for node in ("alpha", "beta"))
    assert services.runs.store.all() == ()


@pytest.mark.parametrize("name", ["cut in its data", "encoder", "tokenizer that is cut"])
def test_a_model_on_a_node_is_checked_there_before_the_launch(
    name: str, tmp_path: Path, attack: Callable[..., None]
) -> None:
    change, words = ZOO[name]
    folder = write_model(tmp_path / "model")
    change(folder)
    spec = make_run(tmp_path, model=str(folder))
    call = SimpleNamespace(args={"model": str(folder), "spec": to_wire(spec)})
    inspect = find_handler("model.inspect")
    assert inspect is not None
    (refusal,) = inspect(cast(Any, call)).refusals
    attack(given=f"model folder on a node: {name}", tried="launch", happened=refusal.message)
    assert words in refusal.message


def test_what_a_node_says_of_its_model_stops_the_start(
    tmp_path: Path, services: Services, cluster: FakeCluster
) -> None:
    refusal = ModelRefusal(message="it is cut off", hint="Copy it")
    cluster["beta"].refusals["/srv/model"] = (refusal,)
    told = refused(services, make_run(tmp_path, model="/srv/model"))
    assert told == "beta: it is cut off. Copy it."
    assert not cluster["alpha"].intents
    assert services.runs.store.all() == ()


def test_a_preview_names_a_broken_tokenizer_before_it_sends_one(
    tmp_path: Path, services: Services, cluster: FakeCluster
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is not JSON"):
        asyncio.run(preview_data(services, make_run(tmp_path), node="alpha"))
    assert not cluster["alpha"].pushed


@pytest.mark.parametrize("name", ["cut in its data", "10^9 layers", "GPTQ", "one matrix missing"])
def test_a_plan_names_a_broken_model_in_milliseconds(
    name: str, tmp_path: Path, services: Services
) -> None:
    change, words = ZOO[name]
    change(write_model(tmp_path / "model"))
    spec, planner = make_run(tmp_path), Planner(services)
    began = time.monotonic()
    with pytest.raises(UserError, match=re.escape(words)):
        asyncio.run(planner.plan(spec, Cluster(nodes=())))
    assert time.monotonic() - began < 1.0


TARGETS: dict[str, tuple[Any, str]] = {
    "a name that no layer has": (("query",), "names 'query', and this model has no such linear"),
    "a name that is misspelt": (("q_porj",), "did you mean q_proj?"),
    "one of two": (("q_proj", "w_proj"), "names 'w_proj'"),
    "an embedding": (("embed_tokens",), "names 'embed_tokens'"),
    "a norm": (("input_layernorm",), "names 'input_layernorm'"),
    "a pattern that matches nothing": (".*layers[.]9[.].*_proj", "matches no linear layer"),
    "a pattern of a part of the name": ("q_pro[j]", "matches no linear layer"),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("weights_are_here", [True, False])
def test_targets_that_match_nothing_are_named_by_plan_and_start(
    name: str, weights_are_here: bool, tmp_path: Path, services: Services, cluster: FakeCluster
) -> None:
    targets, words = TARGETS[name]
    folder = write_model(tmp_path / "model")
    spec = make_run(tmp_path, adapter=AdapterSpec(targets=targets))
    if not weights_are_here:
        (folder / "model.safetensors").unlink()
    else:
        assert words in refused(services, spec)
        assert not cluster["alpha"].pushed
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        asyncio.run(Planner(services).plan(spec, Cluster(nodes=())))
    assert caught.value.message.startswith("adapter.targets")


def test_a_pattern_that_also_means_norms_is_refused_before_a_launch(
    tmp_path: Path, services: Services, cluster: FakeCluster
) -> None:
    write_model(tmp_path / "model")
    spec = make_run(tmp_path, adapter=AdapterSpec(targets=".*[.]layers[.]1[.].*"))
    words = "which also matches model.layers.1.input_layernorm, no linear layer"
    assert words in refused(services, spec)
    assert not cluster["alpha"].pushed


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ("q_proj",), ("lm_head",), ("self_attn.q_proj",), ".*[.]1[.].*up_proj"],
)
def test_targets_that_match_pass(targets: Any, tmp_path: Path) -> None:
    found = inspect_model(write_model(tmp_path / "model"))
    spec = make_run(tmp_path, adapter=AdapterSpec(targets=targets))
    assert find_refusals("m", found, spec) == ()


ODD: dict[str, Break] = {
    "weights of 64 bits": tensors(lambda s: None, dtype="F64", width=8),
    "added matrix of another use": tensors(lambda s: s.update({"value_head.weight": (1, 128)})),
    "another family": gpt2(""),
    "padding before the first token": config(pad_token_id=-1),
    "several templates": file("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'),
    "tokenizer of sentencepiece": without(
        "tokenizer.json", then=file("tokenizer.model", b"\n\x0b\n\x05<unk>")
    ),
    "text form of a tiktoken": without("tokenizer.json", then=file("tokenizer.model", "IQ== 0\n")),
}


@pytest.mark.parametrize("name", ODD)
def test_a_folder_that_is_merely_unusual_passes(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    ODD[name](folder)
    assert inspect_model(folder).findings == ()


def test_a_narrow_scale_beside_wide_weights_is_no_quantized_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = folder / "model.safetensors"
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    header = json.loads(path.read_bytes()[8 : 8 + size])
    end = max(one["data_offsets"][1] for name, one in header.items() if name != "__metadata__")
    scale = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [end, end + 1]}
    path.write_bytes(pack_header({**header, "model.layers.0.self_attn.k_scale": scale}, end + 1))
    assert inspect_model(folder).findings == ()


QUANTIZED: dict[str, tuple[dict[str, Any], AdapterKind, str]] = {
    "MXFP4": ({"quant_method": "mxfp4"}, "lora", ""),
    "MXFP4, to be NF4": (
        {"quant_method": "mxfp4"},
        "qlora",
        "stored in MXFP4, which is not turned",
    ),
    "MXFP4, in full": ({"quant_method": "mxfp4"}, "full", "already quantized"),
    "4 bits": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "qlora", ""),
    "4 bits without a method": ({"load_in_4bit": True}, "qlora", ""),
    "8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "lora", ""),
    "8 bits, to be NF4": ({"load_in_8bit": True}, "qlora", "stored in 8 bits, which is not turned"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_model_is_trained_in_the_ways_that_it_can(name: str, tmp_path: Path) -> None:
    settings, kind, words = QUANTIZED[name]
    found = inspect_model(write_model(tmp_path / "model", quantization_config=settings))
    spec = make_run(tmp_path, adapter=AdapterSpec(kind=kind))
    said = [one.message for one in find_refusals("m", found, spec)]
    assert [words in one for one in said] == ([True] if words else [])
    is_warned = any(one.key == "model" for one in find_misfits(spec, found))
    assert is_warned == (not words and "MXFP4" not in name)


def test_a_length_within_linear_scaling_needs_no_warning(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    found = inspect_model(write_model(tmp_path / "model", rope_scaling=scaling))
    for asked, kinds in ((4 * 64, []), (4 * 64 + 1, ["sequence_tokens"])):
        spec = make_run(tmp_path, sequence_tokens=asked)
        assert [one.key for one in find_misfits(spec, found)] == kinds


TEMPLATES = [{"name": name, "template": "{{ messages }}"} for name in ("tool_use", "rag")]
ENDS = {
    "nothing": ({}, "cannot learn to stop"),
    "an end token": ({"eos_token": "</s>"}, ""),
    "a class with one": ({"tokenizer_class": "GPT2Tokenizer"}, ""),
    "a template": ({"chat_template": "{{ messages }}"}, ""),
    "other templates": ({"chat_template": TEMPLATES}, "'tool_use', 'rag'"),
    "a default": ({"chat_template": [*TEMPLATES, {**TEMPLATES[0], "name": "default"}]}, ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_chat_rows_need_a_template_and_an_end(name: str, tmp_path: Path) -> None:
    settings, words = ENDS[name]
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    found = inspect_model(folder)
    chat = make_run(tmp_path)
    chat = replace(chat, data=replace(chat.data, format="chat"))
    said = [one.message for one in find_refusals("m", found, chat)]
    assert [words in one for one in said] == ([True] if words else [])
    # Plain text needs neither, and the format of rows may not be known yet.
    text = replace(chat, data=replace(chat.data, format="auto"))
    assert not find_refusals("m", found, text)
    assert any(words in one.text for one in find_misfits(text, found)) or not words


@pytest.mark.parametrize("shards", [True, False])
def test_a_whole_model_passes(tmp_path: Path, services: Services, shards: bool) -> None:
    (write_shards if shards else write_model)(tmp_path / "model")
    assert asyncio.run(start_run(services, make_run(tmp_path)))


def test_an_agent_answers_before_it_loads_what_inspects_models() -> None:
    code = (
        "import sys, agents.serve.handlers.models\nprint('agents.shared.models.fit' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
