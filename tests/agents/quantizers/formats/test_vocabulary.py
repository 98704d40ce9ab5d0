"""SentencePiece tokenizers reach llama.cpp whole, from tokenizer.model or from tokenizer.json."""

from __future__ import annotations

import io
import json
import re
import shutil

import pytest
import torch

from agents.quantizers.formats.vocabulary import PIECES_FILE, read_pieces, with_pieces
from agents.quantizers.inference.llama_cpp import LlamaCpp
from agents.quantizers.proof.compare import Distance
from agents.quantizers.proof.verdict import (
    LEAST_SAME_TOKENS,
    Proof,
    find_lost_tokens,
    share_of_same_tokens,
)
from agents.trainer.data.tokenizer import load_tokenizer
from tests.agents.quantizers.forked_converter import convert
from tests.agents.trainer.ranks import DEMO

LINES = re.findall(r"\w[^\"\n]{20,120}", (DEMO / "train.jsonl").read_text("utf-8"))[:400]
TEXTS = [*LINES[:40], "one  two   1234567", "\u4f60\u597d \U0001f600 caf\u00e9", "x\n\n\ty = x * 2"]

GEMMA = {
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "pad_piece": "<pad>",
    "eos_piece": "<eos>",
    "bos_piece": "<bos>",
    "user_defined_symbols": "<mask>",
}


def proof(**changes):
    """Return that of a file like its original."""
    same = Distance(kl=0.0, top1=1.0, perplexity=2.0, num_tokens=9)
    return Proof(
        name="F16",
        distance=same,
        original_perplexity=2.0,
        control=same,
        same_answers=1.0,
        size_bytes=1,
        original_bytes=1,
        tokens_per_s=1.0,
        first_token_s=1.0,
        runtime="llama.cpp",
        **changes,
    )


def train_pieces(kind):
    """Train a SentencePiece model of Llama 2's or Gemma's kind."""
    from sentencepiece import SentencePieceTrainer

    made = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=made,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **{} if kind == "Llama" else GEMMA,
    )
    return made.getvalue()


@pytest.fixture(scope="module", params=["Llama", "Gemma2"])
def folders(request, tmp_path_factory):
    """Write a model as hubs have it and as Transformers saves it, which drops tokenizer.model."""
    import transformers

    kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    whole, saved = folder / "whole", folder / "saved"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=600,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float16)
    for one in (whole, saved):
        model.save_pretrained(one)
    named = {"tokenizer_class": f"{kind.rstrip('2')}Tokenizer", "add_bos_token": True}
    (whole / "tokenizer_config.json").write_text(json.dumps(named))
    (whole / PIECES_FILE).write_bytes(train_pieces(kind))
    load_tokenizer(whole)[0].save_pretrained(saved)
    assert not (saved / PIECES_FILE).exists()
    return whole, saved


def test_a_model_with_nothing_but_pieces_is_tokenized_as_they_say(folders):
    from sentencepiece import SentencePieceProcessor

    whole, saved = folders
    tokenizer, _ = load_tokenizer(whole)
    again, _ = load_tokenizer(saved)
    processor = SentencePieceProcessor(str(whole / PIECES_FILE))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert again.encode(text, add_special_tokens=False) == ids
        if "Gemma" not in type(tokenizer).__name__:  # which puts no space before a text
            assert ids == processor.encode(text)


def test_the_pieces_are_found_again_in_the_merges(folders):
    from sentencepiece import SentencePieceProcessor

    first = SentencePieceProcessor(str(folders[0] / PIECES_FILE))
    second = SentencePieceProcessor(model_proto=read_pieces(folders[1]))
    for number in range(first.get_piece_size()):
        assert second.id_to_piece(number) == first.id_to_piece(number)
        assert second.is_byte(number) == first.is_byte(number)
        assert second.is_unknown(number) == first.is_unknown(number)
    same = [line for line in TEXTS if second.encode(line) == first.encode(line)]
    assert same == TEXTS


def test_llama_cpp_splits_alike_with_and_without_the_file(folders, tmp_path):
    pytest.importorskip("xllamacpp")
    made = []
    for folder in folders:
        before = sorted(folder.iterdir())
        convert(folder, tmp_path / f"{folder.name}.gguf", "F16")
        assert sorted(folder.iterdir()) == before
        made.append(LlamaCpp(tmp_path / f"{folder.name}.gguf", num_words=600, context_tokens=64))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved.gguf", "whole.gguf"]
    whole, saved = made
    assert [saved.split(text) for text in TEXTS] == [whole.split(text) for text in TEXTS]
    tokenizer, _ = load_tokenizer(folders[0])
    rows = [tokenizer.encode(text) for text in TEXTS]
    assert share_of_same_tokens(rows, tokenizer, saved.split) == 1
    assert find_lost_tokens(rows, tokenizer, saved.split) == ()


def test_a_file_whose_scores_are_lost_is_not_to_be_kept(folders, tmp_path):
    """What llama.cpp's converter makes by itself of a Llama that Transformers 5 has saved."""
    pytest.importorskip("xllamacpp")
    if folders[1].parent.name.startswith("Gemma"):
        pytest.skip("its converter refuses them without the file")
    tokenizer, _ = load_tokenizer(folders[1])
    rows = [tokenizer.encode(text) for text in TEXTS]
    convert(folders[1], tmp_path / "alone.gguf", "F16", keeps_pieces=False)
    made = LlamaCpp(tmp_path / "alone.gguf", num_words=600, context_tokens=64)
    share = share_of_same_tokens(rows, tokenizer, made.split)
    assert share < LEAST_SAME_TOKENS
    found = proof(same_tokens=share)
    assert not found.keep
    assert f"{100 * (1 - share):.0f} % of the tokens differ" in found.problems[0]
    lost = proof(lost_tokens=find_lost_tokens([[1]], tokenizer, lambda text: [7, 8]))
    assert lost.problems == (
        "llama.cpp takes <s>, which the model learned as one token, for plain text.",
    )
    assert proof(same_tokens=1.0).keep


def test_other_tokenizers_are_left_as_they_are(tmp_path):
    with with_pieces(DEMO / "model", tmp_path / "links") as folder:
        assert folder == DEMO / "model"
    assert read_pieces(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("[1, 2]")
    assert read_pieces(tmp_path) is None


def test_the_links_go_even_if_the_conversion_fails(folders, tmp_path):
    def fail():
        with with_pieces(folders[1], tmp_path / "links") as folder:
            assert folder.name == folders[1].name
            config = (folder / "config.json").read_bytes()
            assert config == (folders[1] / "config.json").read_bytes()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not (tmp_path / "links").exists()
    assert (folders[1] / "config.json").exists()


def test_pieces_that_no_merge_makes_and_ids_without_a_piece(folders, tmp_path):
    from sentencepiece import SentencePieceProcessor

    shutil.copytree(folders[1], tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    tokenizer["added_tokens"] += [
        {"id": 702, "content": "<|turn|>", "special": True},
        {"id": 703, "content": "\n\n", "special": False},
    ]
    file.write_text(json.dumps(tokenizer))
    found = SentencePieceProcessor(model_proto=read_pieces(tmp_path / "model"))
    assert found.get_piece_size() == 704
    assert found.is_control(702)
    assert found.encode("a\n\nb")[-2] == 703
    assert found.is_unused(701)
    tokenizer["model"]["unk_token"] = "<none>"
    file.write_text(json.dumps(tokenizer))
    found = SentencePieceProcessor(model_proto=read_pieces(tmp_path / "model"))
    assert (found.unk_id(), found.id_to_piece(704)) == (704, "<none>")
