"""A model that was trained with tool calls calls the right tool for questions that it has not seen.

Run by hand: `pytest -m campaign tests/agents/trainer/data/test_tool_training.py`.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from agents.contract.spec import AdapterSpec, CheckpointSpec
from agents.trainer.data.stops import find_stops
from agents.trainer.data.tokenizer import load_tokenizer
from tests.agents.quantizers.test_merge import merge_to
from tests.agents.trainer.data.chat_templates import make_model
from tests.agents.trainer.ranks import Run, finish, make_spec

ASKED = {
    "get_weather": ("Is it warm in {}?", "Does it rain in {}?", "How cold is {}?", "{}: snow?"),
    "get_time": ("What time is it in {}?", "Is it late in {}?", "{}: which hour?", "Noon in {}?"),
    "find_train": ("How do I get to {}?", "A train to {}, please.", "Bring me to {}.", "To {}!"),
}
CITIES = (
    "Kelmar", "Oslo", "Rome", "Bonn", "Lima", "Cairo", "Paris", "Delhi", "Tunis", "Riga", "Bern",
    "Quito", "Dover", "Turin", "Malmo",
)  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""With the control tokens of the demo model."""
TOOLS = [{"type": "function", "function": {"name": name}} for name in ASKED]
NUM_UNSEEN = 20


def make_conversation(name, question, city):
    call = {"type": "function", "function": {"name": name, "arguments": {"city": city}}}
    return [
        {"role": "user", "content": question.format(city)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


@pytest.mark.campaign
def test_the_right_tool_is_called_for_unseen_questions(tmp_path):
    folder = make_model(tmp_path / "model", TEMPLATE, ())
    spec = make_spec(
        adapter=AdapterSpec(kind="full"),
        sequence_tokens=128,
        max_steps=300,
        learning_rate=1.5e-3,
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=None),
    )
    run = Run(tmp_path / "home", folder, spec)
    asked = [(name, one) for name, questions in ASKED.items() for one in questions]
    every = [(*one, city) for one, city in itertools.product(asked, CITIES)]
    random.Random(7).shuffle(every)
    unseen, seen = every[:NUM_UNSEEN], every[NUM_UNSEEN:]
    rows = [{"messages": make_conversation(*one), "tools": TOOLS} for one in seen]
    run.train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert finish(run.start(), timeout_s=3600) == [0], run.read_log(0)
    merge_to(run, tmp_path / "merged", step=spec.max_steps)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokenizer, _ = load_tokenizer(tmp_path / "merged")
    said = []
    for one in unseen:
        ids = tokenizer.apply_chat_template(
            make_conversation(*one)[:1], tools=TOOLS, add_generation_prompt=True,
            return_tensors="pt", return_dict=True,
        )  # fmt: skip
        stops = list(find_stops(tmp_path / "merged", tokenizer))
        found = model.generate(**ids, max_new_tokens=60, do_sample=False, eos_token_id=stops)
        answer = tokenizer.decode(found[0][ids["input_ids"].shape[1] :])
        assert answer.endswith("<|end|>"), answer
        said.append(json.loads(answer.removesuffix("<|end|>")))
    assert [one["name"] for one in said] == [name for name, *_ in unseen]
    # A model of this size does not copy the city of each question.
    assert all(one["arguments"]["city"] in CITIES for one in said)
