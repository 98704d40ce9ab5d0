"""Make the demo's tokenizer, model and rows again: `python -m resources.demo.make_demo`.

Needs the packages of the `train` extra and some minutes on two cores. One seed and one thread
decide everything, so the same torch version on the same kind of CPU gives the same files; another
one gives a model that is as good, with other last digits.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from resources.demo import valley

SEED = 20261
MOST_WORDS = 2048
"""The text runs out of pairs to merge long before."""
HIDDEN = 192
LAYERS = 4
STEPS = 1400
BATCH_ROWS = 64
LEARNING_RATE = 3e-3
EVAL_SHARE = 0.15
MARKS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORED = -100


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`; any other text still has its bytes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MOST_WORDS,
        special_tokens=list(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=MARKS[0],
        bos_token=MARKS[1],
        eos_token=MARKS[2],
        additional_special_tokens=list(MARKS[3:]),
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model: a Llama of about two million parameters."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode_rows(tokenizer: PreTrainedTokenizerFast, facts: list[valley.Fact]) -> list[list[int]]:
    """Return the token ids of every pretraining row: statements, tales and plain chats."""
    documents = [*valley.make_documents(facts), *valley.make_tales(facts)]
    texts = [tokenizer.bos_token + text + tokenizer.eos_token for text in documents]
    for question, answer in valley.make_plain_chats(facts):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return rows


def pretrain(model: LlamaForCausalLM, rows: list[list[int]], pad: int) -> float:
    """Train on random batches of `rows`; return the loss of the last step."""
    draw = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.1)
    model.train()
    loss = torch.tensor(float("nan"))
    started = time.monotonic()
    for step in range(STEPS):
        batch = draw.sample(rows, BATCH_ROWS)
        width = max(map(len, batch))
        ids_BT = torch.tensor([row + [pad] * (width - len(row)) for row in batch])
        labels_BT = ids_BT.masked_fill(ids_BT == pad, IGNORED)
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plan.step()
        if step % 50 == 0:
            print(
                f"step {step} loss {loss.item():.3f} {time.monotonic() - started:.0f} s", flush=True
            )
    return loss.item()


def write_rows(path: Path, chats: list[tuple[str, str]]) -> None:
    """Write `chats` as JSON lines in the common chat format."""
    with path.open("w", encoding="ascii", newline="\n") as file:
        for question, answer in chats:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def make_chats() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the chats of the evaluation and of the training file."""
    chats = list(valley.make_guide_chats(valley.make_facts(SEED)))
    random.Random(SEED).shuffle(chats)
    num_eval = int(len(chats) * EVAL_SHARE)
    return chats[:num_eval], chats[num_eval:]


def make_texts() -> list[str]:
    """Return every text that the tokenizer learns its words from."""
    facts = valley.make_facts(SEED)
    plain = [text for chat in valley.make_plain_chats(facts) for text in chat]
    guide = [text for chats in make_chats() for chat in chats for text in chat]
    return [*valley.make_documents(facts), *plain, *guide]


def main() -> None:
    """Make everything under the folder of this file, or under `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    for name, chats in zip(("eval", "train"), make_chats(), strict=True):
        write_rows(out / f"{name}.jsonl", chats)
    tokenizer = make_tokenizer(make_texts())
    model = make_model(tokenizer)
    rows = encode_rows(tokenizer, valley.make_facts(SEED))
    loss = pretrain(model, rows, tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    print(f"{model.num_parameters()} parameters, last loss {loss:.3f}")


if __name__ == "__main__":
    main()
