"""A GGUF file predicts and answers as its original, where a character is several tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from agents.errors import ExpectedError
from agents.quantizers.inference import llama_cpp
from agents.quantizers.inference.llama_cpp import LlamaCpp, open_server
from agents.quantizers.inference.models import continue_prompts
from tests.agents.quantizers.forked_converter import convert
from tests.agents.trainer.ranks import DEMO

TEXT = "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u6211\u4eec\u5b66\u4e60\u4e2d\u6587\u3002\U0001f600 a"
STEPS = 60


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Let the demo's model learn from a text, most of whose tokens are parts of characters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("xllamacpp")
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    convert(folder, folder / "model.gguf", "F16")
    row = ids[0].tolist()
    made = LlamaCpp(
        folder / "model.gguf", num_words=model.config.vocab_size, context_tokens=2 * len(row)
    )
    return model.eval(), made, row


def test_probabilities_are_told_within_characters(learned):
    model, made, row = learned
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    found = made.predict(row)
    assert (found.exp() - wanted.exp()).abs().max() < 0.01
    likeliest = [made.answer(row[:place], 1)[0] for place in range(1, len(row))]
    assert likeliest == wanted.argmax(1).tolist()


def test_a_model_that_predicts_no_numbers_is_not_taken_for_a_bug(monkeypatch, tmp_path):
    """llama.cpp tells NaN as null."""
    content = [{"top_logprobs": [{"id": 1, "logprob": None}]}]
    told = {"choices": [{"logprobs": {"content": content}}]}
    server = SimpleNamespace(handle_completions=lambda asked: told)
    monkeypatch.setattr(llama_cpp, "open_server", lambda *args, **more: server)
    made = LlamaCpp(tmp_path / "broken.gguf", num_words=4, context_tokens=8)
    assert made.predict([0, 1, 2]).isnan().all()


def test_an_answer_has_all_its_tokens(learned):
    model, made, row = learned
    (wanted,) = continue_prompts(model, [row[:5]])
    for count in (1, 2, 12):
        assert made.answer(row[:5], count) == wanted[:count], "it may end within a character"


def test_a_file_that_llama_cpp_refuses_is_told_in_words(tmp_path):
    pytest.importorskip("xllamacpp")
    (tmp_path / "odd.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ExpectedError, match=r"llama\.cpp .* cannot load odd\.gguf") as caught:
        open_server(tmp_path / "odd.gguf", 64)
    assert "cannot load odd.gguf: " in caught.value.message
    assert "failed to load model" in caught.value.message
    assert "another format" in caught.value.hint
