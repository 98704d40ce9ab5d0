"""Commands for what loads a format; configurations held against what vLLM reads."""

from __future__ import annotations

import json
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest

from agents.contract.requests.exports import Origin
from app.artifact import ArtifactSnapshot
from app.artifacts.record import look_at_folders, record_export
from app.artifacts.serving import check_vllm_config
from app.artifacts.serving_files import hand_off, write_modelfile
from app.errors import UserError
from tests.app.artifacts.test_chat_template import CHATML, LLAMA_2
from tests.fakes.artifacts import make_folder
from tests.fakes.cluster import FakeCluster, make_services

ORIGIN = Origin(base="org/base", data="chats.jsonl", run_id="r-1", run_name="Poems", step=40)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True, "desc_act": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}


def pack_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def write_gguf(path: Path, template: str, turn_end: int | None = None) -> None:
    """Write the head of a GGUF file: a template, four tokens, and numbers between them."""
    tokens = b"".join(map(pack_text, ("<unk>", "<s>", "</s>", "a")))
    values = [
        pack_text("general.alignment") + struct.pack("<II", 4, 32),
        pack_text("tokenizer.chat_template") + struct.pack("<I", 8) + pack_text(template),
        pack_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 4) + tokens,
        pack_text("tokenizer.ggml.bos_token_id") + struct.pack("<II", 4, 1),
        pack_text("tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 2),
        pack_text("tokenizer.ggml.add_bos_token") + struct.pack("<I?", 7, True),
    ]
    if turn_end is not None:
        values.append(pack_text("tokenizer.ggml.eot_token_id") + struct.pack("<II", 4, turn_end))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values))


def register(
    tmp_path: Path, method: str, *types: str, config: object = None, turn_end: int | None = None
) -> ArtifactSnapshot:
    services = make_services(tmp_path / "home", FakeCluster())
    folder = make_folder(tmp_path / "my models", ORIGIN, method, *types)
    for kind in types if method == "gguf" else ():
        template = CHATML if kind == "Q8_0" else LLAMA_2
        write_gguf(folder / f"Poems-{kind}.gguf", template, turn_end)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return look_at_folders(record_export(services, folder, method, types, ORIGIN))


def test_gguf_goes_to_llama_cpp_and_ollama(tmp_path: Path) -> None:
    made = register(tmp_path, "gguf", "Q8_0", "Q4_K_M")
    found = hand_off(made)
    assert [one.runtime for one in found] == ["llama.cpp", "ollama", "llama.cpp", "ollama"]
    server, ollama, _, other = found
    path = str(tmp_path / "my models" / "Poems-Q8_0.gguf")
    assert shlex.split(server.command)[:3] == ["llama-server", "-m", path]
    assert "generated text in llama.cpp b1" in server.notes[0]
    assert "not tested here" in server.notes[1]

    written = write_modelfile(made, ollama)
    assert written == tmp_path / "my models" / "Modelfile-Q8_0"
    assert str(written) in shlex.split(ollama.command)
    text = written.read_text()
    assert text.startswith('FROM ./Poems-Q8_0.gguf\nTEMPLATE """{{ range .Messages }}')
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert "its own chat template" in ollama.notes[0] or "own chat template" in ollama.notes[0]
    assert other.modelfile == "FROM ./Poems-Q4_K_M.gguf\n"
    assert "cannot be written in a Modelfile: " in other.notes[0]
    assert write_modelfile(made, server) is None


def test_ollama_stops_at_the_token_that_ends_an_answer(tmp_path: Path) -> None:
    made = register(tmp_path, "gguf", "Q8_0", "Q4_K_M", turn_end=3)
    translated, other = (one.modelfile for one in hand_off(made) if one.runtime == "ollama")
    assert translated is not None
    assert "TEMPLATE" in translated
    assert translated.endswith('PARAMETER stop "a"\n')
    assert other == 'FROM ./Poems-Q4_K_M.gguf\nPARAMETER stop "a"\n'


def test_a_gguf_file_that_is_none_is_told(tmp_path: Path) -> None:
    made = register(tmp_path, "gguf", "Q8_0")
    for data in (b"GGUF\x03", b"pickle", b"GGUF" + struct.pack("<IQQ", 3, 0, 9)):
        (tmp_path / "my models" / "Poems-Q8_0.gguf").write_bytes(data)
        made = look_at_folders(made)
        if made.folder():
            assert "cannot be said" in hand_off(made)[1].notes[0]


@pytest.mark.parametrize(
    ("method", "config", "runtimes"),
    [
        ("merged", None, ["vllm", "tgi"]),
        ("awq", AWQ, ["vllm", "tgi"]),
        ("gptq", GPTQ, ["vllm", "tgi"]),
        ("nf4", NF4, ["vllm"]),
    ],
)
def test_folders_go_to_what_loads_them(
    tmp_path: Path, method: str, config: dict[str, Any] | None, runtimes: list[str]
) -> None:
    about: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    if config is not None:
        about["quantization_config"] = config
    found = hand_off(register(tmp_path, method, config=about))
    assert [one.runtime for one in found] == runtimes
    assert found[0].notes[0].startswith("The configuration has every field")
    assert all(one.notes[-1] == "Not tested here." for one in found)
    assert shlex.split(found[0].command)[2] == str(tmp_path / "my models")


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("awq", {"bits": 8}, "4 bits only"),
        ("awq", {"zero_point": None}, "zero_point is missing"),
        ("awq", {"group_size": 100}, "group_size is 100"),
        ("awq", {"quant_method": "compressed-tensors"}, "vLLM expects 'awq'"),
        ("gptq", {"sym": False}, "symmetric weights"),
        ("gptq", {"bits": 3}, "symmetric weights"),
        ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "'uint8' only"),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit"),
    ],
)
def test_what_vllm_would_refuse_is_said(kind: str, change: dict[str, Any], problem: str) -> None:
    good = {"awq": AWQ, "gptq": GPTQ, "nf4": NF4}[kind]
    config = {"architectures": ["X"], "quantization_config": good}
    assert check_vllm_config(kind, config) == ()
    (found,) = check_vllm_config(kind, {**config, "quantization_config": {**good, **change}})
    assert problem in found


def test_a_colon_in_a_path_is_no_end_of_it_for_docker(tmp_path: Path) -> None:
    services = make_services(tmp_path / "home", FakeCluster())
    folder = make_folder(tmp_path / "poems: one", ORIGIN, "merged")
    made = look_at_folders(record_export(services, folder, "merged", (), ORIGIN))
    words = shlex.split(hand_off(made)[1].command)
    assert words[words.index("--mount") + 1] == f"type=bind,src={folder},dst=/model,readonly"


def test_models_without_what_vllm_needs() -> None:
    assert "no architecture" in check_vllm_config("merged", {})[0]
    assert "has no quantization_config" in check_vllm_config("awq", {"architectures": ["X"]})[0]


def test_only_a_copy_on_this_pc_is_served(tmp_path: Path) -> None:
    made = register(tmp_path, "merged")
    (tmp_path / "my models" / "config.json").unlink()
    (tmp_path / "my models" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no whole copy on this PC"):
        hand_off(look_at_folders(made))
