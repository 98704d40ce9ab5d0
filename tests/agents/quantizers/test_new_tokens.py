"""New tokens, another template and its options: trained, resumed, and in every export."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from agents.quantizers.inference.models import load_model
from agents.shared.models.gguf_file import read_metadata
from agents.trainer.data.tokenizer import load_tokenizer
from tests.agents.quantizers.forked_converter import convert
from tests.agents.quantizers.test_chat import ask, speaker_of
from tests.agents.quantizers.test_merge import merge_to
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.ranks import DEMO, Run, make_spec, make_tiny_model

NEW = ("<|im_start|>", "<|im_end|>")
QUESTION = "When is the market of Kelmar?"


def train(tmp_path, model, **changes):
    data = DataSpec(train="train.jsonl", chat_template="chatml", new_tokens=NEW)
    settings = {
        "adapter": AdapterSpec(rank=16, alpha=32),
        "sequence_tokens": 128,
        "batch_sequences": 24,
        "max_steps": 60,
        "learning_rate": 5e-3,
        "seed": 42,
        "data": data,
    }
    run = Run(tmp_path / "home", model, make_spec(**{**settings, **changes}))
    shutil.copyfile(DEMO / "train.jsonl", run.train)
    return run


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_new_tokens_are_learned_and_exported(tmp_path, kind):
    pytest.importorskip("xllamacpp")
    adapter = AdapterSpec(kind=kind, rank=16, alpha=32)
    model = shutil.copytree(DEMO / "model", tmp_path / "model")
    before = load_tokenizer(model)[0]
    rate = 5e-3 if kind == "lora" else 2e-3
    run = train(tmp_path, model, adapter=adapter, learning_rate=rate)
    run.train_to_end()
    merge_to(run, tmp_path / "merged", step=60)
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.convert_tokens_to_ids(list(NEW)) == [len(before), len(before) + 1]
    assert merged.chat_template.endswith("{{ '<|im_start|>assistant\n' }}{% endif %}")
    told = json.loads((tmp_path / "merged" / "generation_config.json").read_bytes())
    assert told["eos_token_id"] == [2, len(before) + 1]
    convert(tmp_path / "merged", tmp_path / "m-F16.gguf", "F16")
    about = read_metadata(tmp_path / "m-F16.gguf")
    assert "<|im_start|>" in about["tokenizer.chat_template"]
    speakers = [
        speaker_of(model, checkpoint=str(run.checkpoint(60))),
        speaker_of(tmp_path / "merged"),
        speaker_of(tmp_path / "m-F16.gguf"),
    ]
    found = [ask(speaker, QUESTION, max_tokens=60)[0] for speaker in speakers]
    assert [one.cut for one in found] == [False] * 3
    texts = [one.text for one in found]
    assert texts == [texts[0]] * 3
    assert any(word in texts[0] for word in ("Monday", "market"))
    assert "<|im" not in texts[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_adapter_is_that_of_peft_and_the_merged_model_computes_the_same(tmp_path, tied, padded):
    from peft import PeftModel

    known = len(load_tokenizer(DEMO / "model")[0])
    rows = 768 if padded else known
    model = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied, vocab_size=rows)
    run = train(tmp_path, model, max_steps=2, adapter=AdapterSpec(rank=4, alpha=8, dropout=0.1))
    run.train_to_end()
    merge_to(run, tmp_path / "out", step=2)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    size = rows if padded else known + 2
    assert merged.get_input_embeddings().weight.shape[0] == merged.config.vocab_size == size
    base = AutoModelForCausalLM.from_pretrained(model)
    base.resize_token_embeddings(size)
    both = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    ids = torch.arange(known - 30, known + 2)[None]
    with torch.no_grad():
        logits = [one.eval()(input_ids=ids).logits for one in (merged, both)]
    assert torch.allclose(*logits, rtol=1e-4, atol=1e-5)
    about = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_bytes())
    assert sorted(about["modules_to_save"]) == ["lm_head", "model.embed_tokens"]
    assert (tmp_path / "out" / "adapter" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "adapter" / "chat_template.jinja").exists()


def test_rows_begin_as_the_mean_and_only_new_ones_change_without_training(tmp_path):
    from agents.trainer.model.vocabulary import add_rows

    known = len(load_tokenizer(DEMO / "model")[0])
    folder = make_tiny_model(tmp_path / "model", vocab_size=known + 1, tie_word_embeddings=False)
    data = DataSpec(train="t", new_tokens=("<|end|>", "<a>", "<b>"))
    tokenizer = load_tokenizer(folder, data=data)[0]
    model = load_model(folder, "cpu")
    before = [end.weight.clone() for end in (model.get_input_embeddings(), model.lm_head)]
    add_rows(model, tokenizer, data.new_tokens)
    for old, end in zip(before, (model.get_input_embeddings(), model.lm_head), strict=True):
        assert torch.equal(end.weight[:known], old[:known])
        mean = old[:known].double().mean(0).float()
        assert end.weight.shape[0] == known + 2
        assert torch.allclose(end.weight[known:], mean.expand(2, -1), atol=1e-7)


def test_a_resumed_run_is_bit_equal(tmp_path):
    model = make_tiny_model(tmp_path / "model", vocab_size=len(load_tokenizer(DEMO / "model")[0]))
    straight = train(tmp_path / "a", model, max_steps=4)
    straight.train_to_end()
    again = train(tmp_path / "b", model, max_steps=4)
    again.train_to_end()
    shutil.rmtree(again.checkpoint(4))
    again.train_to_end(resume_step=2)
    files = [
        load_file(one.checkpoint(4) / "adapter_model.safetensors") for one in (straight, again)
    ]
    assert files[0].keys() == files[1].keys()
    assert any("embed_tokens" in name for name in files[0])
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())


def test_a_template_option_travels_with_the_model(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(families.QWEN3)
    data = DataSpec(train="train.jsonl", template_options=("enable_thinking=false",))
    run = train(tmp_path, model, max_steps=2, data=data)
    run.train_to_end()
    merge_to(run, tmp_path / "out", step=2)
    question = [{"role": "user", "content": "Hi"}]
    texts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(
            question, tokenize=False, add_generation_prompt=True
        )
        for folder in (tmp_path / "out", model)
    ]
    assert [text.endswith("<think>\n\n</think>\n\n") for text in texts] == [True, False]
    assert (tmp_path / "out" / "adapter" / "chat_template.jinja").exists()


@pytest.mark.parametrize("mode", ["pipeline", "streamed"])
def test_modes_that_keep_embeddings_frozen_are_refused_by_name(mode):
    data = DataSpec(train="t", new_tokens=NEW)
    for changes in ({"data": data}, {"adapter": AdapterSpec(also_train=("lm_head",))}):
        spec = {"model": "m", "data": DataSpec(train="t"), **changes}
        with pytest.raises(ValueError, match=f"with parallel {mode}"):
            RunSpec(**spec, parallel=mode)
        assert RunSpec(**spec).refuse_mode(mode)
