"""Ask models one question, with nothing but Transformers: `answer.py QUESTION FOLDER...`.

Prints a JSON list with one answer per folder. Nothing of Rackless is imported, because this is the
proof that an exported model is a plain one.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_ANSWER_TOKENS = 40


def answer(folder: str, question: str) -> str:
    """Return what the model in `folder` says to `question`, always its likeliest words."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    text = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(text).strip()


if __name__ == "__main__":
    print(json.dumps([answer(folder, sys.argv[1]) for folder in sys.argv[2:]]))
