"""The demo's files are what the script makes, small, and usable."""

from __future__ import annotations

import json

import yaml
from transformers import AutoModelForCausalLM

from resources.demo import make_demo, valley
from tests.agents.trainer.ranks import DEMO


def test_the_rows_are_those_of_the_script(tmp_path):
    for part, chats in zip(("eval", "train"), make_demo.make_chats(), strict=True):
        path = tmp_path / f"{part}.jsonl"
        make_demo.write_rows(path, chats)
        assert path.read_bytes() == (DEMO / f"{part}.jsonl").read_bytes()


def test_the_tokenizer_is_that_of_the_script(tmp_path):
    make_demo.make_tokenizer(make_demo.make_texts()).save_pretrained(tmp_path)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    kept = json.loads((DEMO / "model" / "tokenizer.json").read_text())
    assert made["model"]["vocab"] == kept["model"]["vocab"]
    assert made["model"]["merges"] == kept["model"]["merges"]


def test_the_model_is_small_and_loads():
    num_bytes = sum(path.stat().st_size for path in (DEMO / "model").iterdir())
    assert num_bytes < 8 << 20
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    assert 1_000_000 < model.num_parameters() < 3_000_000


def test_no_question_is_in_both_files():
    questions = [
        {json.loads(line)["messages"][0]["content"] for line in (DEMO / name).open()}
        for name in ("train.jsonl", "eval.jsonl")
    ]
    assert not questions[0] & questions[1]
    assert len(questions[0]) > 250


def test_every_fact_is_drawn_once_for_each_town():
    facts = valley.make_facts(make_demo.SEED)
    assert len({(fact.town, fact.topic.name) for fact in facts}) == len(facts)
    assert len(facts) == valley.NUM_TOWNS * len(valley.TOPICS)


def test_the_run_file_names_files_that_are_there():
    run = yaml.safe_load((DEMO / "run.yaml").read_text())
    for name in (run["model"], run["data"]["train"], run["data"]["eval"]):
        assert (DEMO / name).exists()
