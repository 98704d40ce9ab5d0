"""GGUF files and configs that lie about themselves are refused in words, at once, in little memory.

With RACKLESS_FUZZ_SEED=2 and RACKLESS_FUZZ_S=600 in the environment, the search for an exception of
another type begins from another seed and takes ten minutes.
"""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.errors import ExpectedError
from agents.quantizers.inference.llama_cpp import open_server
from agents.shared.models.config import find_config
from agents.shared.models.gguf_file import read_metadata
from app.artifacts.bundle import read_artifact, read_origin, read_verdicts
from app.errors import UserError
from tests.agents.serve.test_server import Agent
from tests.hostile.planted import ROOT

UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9
FUZZ_S = float(os.environ.get("RACKLESS_FUZZ_S", "3"))
SEED = int(os.environ.get("RACKLESS_FUZZ_SEED", "1"))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf(*pairs: bytes, count: int | None = None, version: int = 3) -> bytes:
    head = struct.pack("<IQQ", version, 0, len(pairs) if count is None else count)
    return b"GGUF" + head + b"".join(pairs)


WHOLE = gguf(
    pair("general.architecture", STRING, text("llama")),
    pair("llama.block_count", UINT32, struct.pack("<I", 2)),
    pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 2, text("<s>") + text("</s>"))),
    pair("tokenizer.ggml.scores", ARRAY, array(6, 3, struct.pack("<3f", 1.0, 2.0, float("nan")))),
    pair("tokenizer.ggml.bos_token_id", UINT32, struct.pack("<I", 0)),
    pair("tokenizer.chat_template", STRING, text("{{ messages[0]['content'] }}")),
)
DEEP = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(10_000))
LIES = {
    "2^60 keys": gguf(count=1 << 60),
    "a key twice": gguf(pair("a", UINT8, b"1"), pair("a", UINT8, b"2")),
    "an array of 2^60 bytes": gguf(pair("a", ARRAY, array(UINT8, 1 << 60))),
    "an array of 2^60 texts": gguf(pair("a", ARRAY, array(STRING, 1 << 60))),
    "10,000 arrays within each other": gguf(pair("a", ARRAY, DEEP + array(UINT8, 1, b"1"))),
    "a text of 2^63 bytes": gguf(pair("a", STRING, struct.pack("<Q", 1 << 63))),
    "a key of 2^63 bytes": gguf(struct.pack("<Q", 1 << 63), count=1),
    "a kind of value that does not exist": gguf(pair("a", 99, b"1")),
    "an array of a kind that does not exist": gguf(pair("a", ARRAY, array(77, 1, b"1"))),
    "a text that is cut": gguf(pair("a", STRING, text("abc")))[:-1],
    "no magic": b"GGML" + WHOLE[4:],
    "nothing at all": b"",
    "version 0": gguf(version=0),
    "a version of the future": gguf(version=1 << 31),
}


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(WHOLE)
    about = read_metadata(tmp_path / "a.gguf")
    assert about["general.architecture"] == "llama"
    assert about["tokenizer.ggml.tokens"] == ["<s>", "</s>"]
    assert about["tokenizer.ggml.scores"][:2] == [1.0, 2.0]


@pytest.mark.parametrize("lie", LIES)
def test_a_gguf_file_that_lies_is_refused_at_once(
    tmp_path: Path, attack: Callable[..., None], lie: str
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(LIES[lie])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"GGUF|gguf") as refused:
        read_metadata(path)
    attack(given=f"a GGUF file with {lie}", tried="to read it", happened=str(refused.value))
    assert time.monotonic() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_huge_sparse_gguf_file_takes_no_memory(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    path = tmp_path / "huge.gguf"
    with path.open("wb") as file:
        file.write(gguf(pair("a", ARRAY, array(STRING, 1 << 36)), count=1))
        file.truncate(1 << 40)  # a terabyte that takes no disk: its zeros are empty texts
    started = time.monotonic()
    with pytest.raises(ValueError, match="cannot hold an array"):
        read_metadata(path)
    attack(
        given="a GGUF file of a terabyte, nearly all of it a hole",
        tried="to make its reader build a list of 2^36 texts",
        happened=f"refused after {time.monotonic() - started:.1f} s",
    )
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("lie", ["an array of 2^60 texts", "10,000 arrays within each other"])
def test_a_chat_does_not_give_a_lying_file_to_llama_cpp(
    tmp_path: Path, attack: Callable[..., None], lie: str
) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "odd.gguf").write_bytes(LIES[lie])
    with pytest.raises(ExpectedError) as refused:
        open_server(tmp_path / "odd.gguf", 64)
    attack(given=f"a GGUF file with {lie}", tried="to load it", happened=refused.value.message)
    assert "odd.gguf" in refused.value.message
    assert refused.value.hint


@pytest.mark.timeout(FUZZ_S + 60)
def test_no_damage_of_a_gguf_file_raises_anything_else(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    path = tmp_path / "odd.gguf"
    end_s = time.monotonic() + FUZZ_S
    num_read = num_refused = 0
    while time.monotonic() < end_s:
        data = bytearray(WHOLE)
        for _ in range(dice.randint(1, 6)):
            place = dice.randrange(len(data))
            kind = dice.randrange(4)
            if kind == 0:
                data[place] = dice.randrange(256)
            elif kind == 1:
                del data[place : place + dice.randint(1, 40)]
            elif kind == 2:
                huge = dice.choice([1 << 63, (1 << 64) - 1, 1 << 31, 0, ARRAY, STRING])
                data[place : place + 8] = struct.pack("<Q", huge)
            else:
                data[place:place] = dice.randbytes(dice.randint(1, 20))
            data = data or bytearray(b"G")
        path.write_bytes(data)
        try:
            read_metadata(path)
            num_read += 1
        except ValueError:
            num_refused += 1
    assert num_refused > 100 * min(FUZZ_S, 1)
    assert num_read > 0


DEEP_JSON = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
CONFIGS = {
    "100,000 lists within each other": DEEP_JSON,
    "900 objects within each other": b'{"a":' * 900 + b"1" + b"}" * 900,
    "a number of a million digits": b'{"hidden_size": ' + b"9" * 1_000_000 + b"}",
    "a key with two values": b'{"hidden_size": 64, "model_type": "llama", "hidden_size": 4096}',
    "a list": b"[1, 2]",
    "half of it": b'{"hidden_size": 64',
    "bytes that are no text": b'{"a": "\xff\xfe"}',
    "nothing": b"",
}


@pytest.mark.parametrize("lie", CONFIGS)
def test_a_config_that_is_none_is_refused_in_words(
    tmp_path: Path, attack: Callable[..., None], lie: str
) -> None:
    (tmp_path / "config.json").write_bytes(CONFIGS[lie])
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"config\.json") as refused:
        find_config(str(tmp_path), os.environ)
    attack(given=f"a config.json with {lie}", tried="to plan with it", happened=str(refused.value))
    assert time.monotonic() - started < 2


def test_a_config_of_gigabytes_is_not_read(tmp_path: Path, attack: Callable[..., None]) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(ValueError, match="which is not a config") as refused:
        find_config(str(tmp_path), os.environ)
    attack(given="a config.json of 8 GiB", tried="to plan with it", happened=str(refused.value))


def test_a_node_sends_a_config_with_infinity_as_not_known(tmp_path: Path) -> None:
    about = {"time_step_limit": [0.0, float("inf")], "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(about))
    agent = Agent(tmp_path / "home")
    agent.read()
    answer = agent.ask("model.config", model=str(tmp_path))
    agent.end()
    assert answer["error"] is None
    assert answer["result"]["config"] == {"time_step_limit": [0.0, None], "hidden_size": 64}


@pytest.mark.parametrize("lie", CONFIGS)
def test_an_artifact_with_odd_json_is_refused_or_left_out(
    tmp_path: Path, attack: Callable[..., None], lie: str
) -> None:
    for name in ("config.json", "proof.json"):
        (tmp_path / name).write_bytes(CONFIGS[lie])
    assert read_verdicts(tmp_path) == ()
    assert read_origin(tmp_path) is None
    with pytest.raises(UserError) as refused:
        read_artifact(tmp_path)
    attack(
        given=f"an artifact whose proof.json is {lie}",
        tried="to register it",
        happened=refused.value.message,
    )
    assert "proof.json" in refused.value.message
    (tmp_path / "proof.json").unlink()
    if lie != "a key with two values":
        with pytest.raises(UserError):
            read_artifact(tmp_path)


def test_a_plan_with_an_odd_config_says_what_is_wrong(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes(DEEP_JSON)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    about = {"model": "model", "data": {"train": "train.jsonl"}}
    (tmp_path / "run.yaml").write_text(json.dumps(about))
    cluster = ROOT / "resources" / "clusters" / "two-3090.yaml"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "app",
            "plan",
            str(tmp_path / "run.yaml"),
            "--cluster",
            str(cluster),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RACKLESS_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    attack(
        given="a config.json of 100,000 lists within each other",
        tried="rackless plan",
        happened=done.stderr.strip(),
    )
    assert done.returncode in (1, 2)
    assert "config.json" in done.stderr
    assert "nested more than" in done.stderr
    assert "Traceback" not in done.stderr
