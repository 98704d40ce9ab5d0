"""Files of a model's folder, and run files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from agents.shared.models.config_findings import LIMITS
from agents.shared.models.folder import inspect_model
from agents.shared.models.safetensors_header import HeaderError, parse_header
from app.errors import UsageError, UserError
from app.planning.shape.model_shape import read_shape
from app.runfile.run_file import parse_run
from tests.fakes.models import CONFIG, TOKENIZER, name_shapes, pack, write_model
from tests.hostile.fuzzing import Target, json_values, mutated

RAW = pack(name_shapes())
LENGTH = int.from_bytes(RAW[:8], "little")
HEADER = RAW[8 : 8 + LENGTH]
RUN = b"""model: org/name
data: {train: chats.jsonl, eval: null}
adapter: {kind: lora, rank: 16, alpha: 32, dropout: 0.05, targets: ".*q_proj"}
sequence_tokens: 2048
batch_sequences: 24
learning_rate: 2e-4
nodes: [alpha, beta]
checkpoint: {every_minutes: 10, keep: 3}
"""
numbers = st.integers(-(10**20), 10**20) | st.floats() | json_values()
configs = st.dictionaries(st.sampled_from(sorted({*LIMITS, *CONFIG, "text_config"})), numbers)


def read_folder(files: dict[str, bytes]) -> None:
    """Write a whole model with some files replaced, and inspect it in both ways."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name, "model"))
        for file, data in files.items():
            (folder / file).write_bytes(data)
        for whole in (True, False):
            found = inspect_model(folder, whole=whole)
            assert all(one.message and one.kind for one in found.findings)


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


places = st.dictionaries(st.text(max_size=8), st.text(max_size=20) | json_values(), max_size=4)
folders = st.fixed_dictionaries(
    {},
    optional={
        "config.json": configs.map(lambda more: as_bytes({**CONFIG, **more})),
        "model.safetensors": mutated((RAW[: LENGTH + 200],)),
        "model.safetensors.index.json": places.map(
            lambda held: as_bytes({"metadata": {}, "weight_map": held})
        ),
        "tokenizer.json": mutated((as_bytes(TOKENIZER),)),
        "tokenizer_config.json": json_values().map(as_bytes),
        "adapter_config.json": json_values().map(as_bytes),
    },
)
TARGETS = (
    Target(
        name="safetensors header",
        inputs=st.tuples(mutated((HEADER,)), st.integers(0, 10**6)),
        read=lambda pair: parse_header(*pair),
        allowed=(HeaderError,),
    ),
    Target(name="folder of a model", inputs=folders, read=read_folder, allowed=()),
    Target(
        name="config of a model",
        inputs=configs.map(lambda more: {**CONFIG, **more}),
        read=read_shape,
        allowed=(UserError,),
    ),
    Target(
        name="run file",
        inputs=mutated((RUN,)).map(lambda raw: raw.decode("utf-8", "replace")),
        read=parse_run,
        allowed=(UsageError,),
    ),
)
