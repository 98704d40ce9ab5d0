"""Models stop by themselves with every published template, in chat, merged and in llama.cpp.

Run by hand, a quarter of an hour: `pytest -m campaign tests/agents/trainer/data/test_stops.py`. A
small model learns a few answers in 60 steps, and is asked for three of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import AdapterSpec, DataSpec
from tests.agents.quantizers.forked_converter import convert
from tests.agents.quantizers.test_chat import ask, speaker_of
from tests.agents.quantizers.test_merge import merge_to
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.data import published
from tests.agents.trainer.data.chat_templates import make_model
from tests.agents.trainer.ranks import DEMO, Run, make_spec

OWN = {
    "llama-2": families.LLAMA2,
    "llama-4": families.LLAMA4,
    "mistral-v0.3": families.MISTRAL,
    "tekken": families.TEKKEN,
    "phi-4": families.PHI4,
    "glm-4": families.GLM4,
    "deepseek-v3.1": families.DEEPSEEK_V3_1,
    "smollm3": families.SMOLLM3,
    "none": "",
}
"""Families of which TRL has no template."""
NAMES = (*published.list_families(), *OWN)
THOUGHT = "It is about the valley."
NUM_ROWS = 6
MAX_TOKENS = 4096


def read(name: str) -> str:
    """Return a template."""
    return OWN[name] if name in OWN else published.read(name)


def list_cases() -> list[Any]:
    """Return each template without thoughts, and with them if it knows any."""
    modes = [(name, False) for name in NAMES]
    modes += [(name, True) for name in NAMES if "think" in read(name) or name == "gptoss"]
    return [
        pytest.param(name, thinks, marks=pytest.mark.campaign, id=f"{name}-{thinks}")
        for name, thinks in sorted(modes)
    ]


def write_rows(path: Path, text: str, *, thinks: bool) -> dict[str, str]:
    """Write a few rows; return the answers of three questions."""
    lines = (DEMO / "train.jsonl").read_text().splitlines()[:NUM_ROWS]
    rows = [json.loads(line)["messages"] for line in lines]
    asked = {turns[0]["content"]: turns[1]["content"] for turns in rows[:3]}
    keys = (key for key in ("reasoning_content", "thinking", "reasoning") if f"{key}" in text)
    key = next((key for key in keys if f".{key}" in text or f"['{key}']" in text), None)
    for _, answer in rows if thinks else ():
        if key is not None:
            answer[key] = THOUGHT
        else:
            answer["content"] = f"<think>\n{THOUGHT}\n</think>\n\n{answer['content']}"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
    return asked


def make_folder(folder: Path, name: str) -> Path:
    """Return the demo model with a template and its control tokens, as a base model has them."""
    text, end = read(name), published.find_end(name)
    known = (DEMO / "model" / "tokenizer.json").read_text()
    tokens = [one for one in published.find_tokens(text, end) if json.dumps(one) not in known]
    make_model(folder, text, tuple(tokens))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_bytes())
    path.write_text(json.dumps({**settings, "eos_token": end, "bos_token": "<s>"}))
    # The demo's tokenizer makes about four tokens of a word, and some prompts are long.
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    path.write_text(json.dumps({**config, "max_position_embeddings": MAX_TOKENS}))
    if not text:
        (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize(("name", "thinks"), list_cases())
def test_a_model_stops_and_answers(tmp_path, name, thinks):
    pytest.importorskip("xllamacpp")
    text = read(name)
    model = make_folder(tmp_path / "model", name)
    options = next((one for one in ("enable_thinking", "thinking") if f"{one} " in text), None)
    value = "true" if thinks else "false"
    spec = make_spec(
        data=DataSpec(
            train="train.jsonl",
            template_options=(f"{options}={value}",) if options is not None else (),
        ),
        adapter=AdapterSpec(kind="full"),
        sequence_tokens=MAX_TOKENS,
        batch_sequences=NUM_ROWS,
        max_steps=60,
        learning_rate=2e-3,
        seed=42,
    )
    run = Run(tmp_path / "home", model, spec)
    asked = write_rows(run.train, text, thinks=thinks)
    run.train_to_end()
    merge_to(run, tmp_path / "merged", step=60)
    convert(tmp_path / "merged", tmp_path / "m-F16.gguf", "F16")
    places = {
        "chat": speaker_of(model, checkpoint=str(run.checkpoint(60))),
        "merged": speaker_of(tmp_path / "merged"),
        "gguf": speaker_of(tmp_path / "m-F16.gguf"),
    }
    wrong = []
    for place, speaker in places.items():
        for question, answer in asked.items():
            found = ask(speaker, question, max_tokens=80)[0]
            if found.cut or answer not in found.text:
                wrong.append((place, question, found.cut, found.text))
    assert not wrong
