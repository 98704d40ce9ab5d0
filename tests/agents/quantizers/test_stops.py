"""A trained model stops by itself: in chat, merged, in llama.cpp, and where other programs serve
it.
"""

from __future__ import annotations

import json
import shutil

import pytest

from agents.contract.spec import AdapterSpec
from agents.errors import ExpectedError
from agents.quantizers.inference.models import load_model
from agents.shared.models.gguf_file import read_metadata
from agents.trainer.data.stops import find_stops, write_stops
from agents.trainer.data.tokenizer import load_tokenizer
from tests.agents.quantizers.forked_converter import convert
from tests.agents.quantizers.test_chat import ask, speaker_of
from tests.agents.quantizers.test_make import job_for
from tests.agents.quantizers.test_make import run as make_artifact
from tests.agents.quantizers.test_merge import merge_to
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.data.chat_templates import make_model
from tests.agents.trainer.ranks import DEMO, Run, make_spec

# Short texts of their kinds; the demo model's vocabulary has no other control tokens.
OPENS_THOUGHT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
KINDS = {
    "chatml-on-base": (families.CHATML, ("<|im_start|>", "<|im_end|>")),
    "closed-only-if-followed": (families.CLOSED_IF_FOLLOWED.replace("</s>", "<|end|>"), ()),
    "opens-thought": (OPENS_THOUGHT, ("<think>", "</think>")),
}


@pytest.mark.parametrize(
    "kind",
    [
        "chatml-on-base",
        pytest.param("closed-only-if-followed", marks=pytest.mark.campaign),
        pytest.param("opens-thought", marks=pytest.mark.campaign),
    ],
)
def test_a_short_training_teaches_to_stop(tmp_path, kind):
    pytest.importorskip("xllamacpp")
    model = make_model(tmp_path / "model", *KINDS[kind])
    spec = make_spec(
        adapter=AdapterSpec(rank=16, alpha=32),
        sequence_tokens=128,
        batch_sequences=24,
        max_steps=60,
        learning_rate=5e-3,
        seed=42,
    )
    run = Run(tmp_path / "home", model, spec)
    shutil.copyfile(DEMO / "train.jsonl", run.train)
    run.train_to_end()
    merge_to(run, tmp_path / "merged", step=60)
    convert(tmp_path / "merged", tmp_path / "m-F16.gguf", "F16")
    speakers = [
        speaker_of(model, checkpoint=str(run.checkpoint(60))),
        speaker_of(tmp_path / "merged"),
        speaker_of(tmp_path / "m-F16.gguf"),
    ]
    found = [
        ask(speaker, "When is the market of Kelmar?", max_tokens=60)[0] for speaker in speakers
    ]
    assert [one.cut for one in found] == [False] * 3
    assert all("Monday" in one.text for one in found)
    # Each program finds the token that ends answers where it looks for it.
    tokenizer, _ = load_tokenizer(model)
    stops = list(find_stops(model, tokenizer))
    told = json.loads((tmp_path / "merged" / "generation_config.json").read_bytes())["eos_token_id"]
    assert told == (stops if len(stops) > 1 else stops[0])
    about = read_metadata(tmp_path / "m-F16.gguf")
    named = [about.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    assert [token for token in named if token is not None] == stops


def test_the_ids_of_all_files_are_kept(tmp_path):
    folder = make_model(tmp_path / "model", *KINDS["chatml-on-base"])
    tokenizer, _ = load_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    write = [
        ("generation_config.json", {"eos_token_id": [7, 2], "temperature": 0.6}, (7, 2, end)),
        ("config.json", {"text_config": {"eos_token_id": 9}, "eos_token_id": None}, (7, 2, 9, end)),
        ("generation_config.json", {"eos_token_id": None}, (9, end)),
    ]
    for name, values, expected in write:
        (folder / name).write_text(json.dumps(values))
        assert find_stops(folder, tokenizer) == expected
    write_stops(folder, tokenizer)
    write_stops(folder, tokenizer)
    settings = json.loads((folder / "generation_config.json").read_bytes())
    assert settings == {"eos_token_id": [9, end]}


def test_a_model_without_settings_of_generation_gets_some(tmp_path):
    folder = make_model(tmp_path / "model", *KINDS["opens-thought"])
    (folder / "generation_config.json").unlink()
    tokenizer, _ = load_tokenizer(folder)
    write_stops(folder, tokenizer)
    settings = json.loads((folder / "generation_config.json").read_bytes())
    assert settings == {"bos_token_id": 1, "eos_token_id": 2}
    assert load_model(folder, "cpu").generation_config.eos_token_id == 2


def test_a_template_that_does_not_end_is_named(tmp_path):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    folder = make_model(tmp_path / "model", endless, ())
    with pytest.raises(ExpectedError, match="chat template"):
        find_stops(folder, load_tokenizer(folder)[0])


def test_a_quantized_folder_names_what_the_merged_one_names(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = make_model(tmp_path / "model", *KINDS["chatml-on-base"])
    tokenizer, _ = load_tokenizer(model)
    write_stops(model, tokenizer)
    make_artifact(job_for(tmp_path, "nf4", model=str(model)), tmp_path)
    told = json.loads((tmp_path / "nf4" / "generation_config.json").read_bytes())
    assert told["eos_token_id"] == [2, tokenizer.convert_tokens_to_ids("<|im_end|>")]
