"""Short chat templates in the manner of published families, and models with them, for tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.agents.trainer.ranks import DEMO

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}<|{{ m.role }}|>\n"
    "{{ m.content }}<|end|>\n{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}<|end|>"
    "\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
    "{% else %}<|endoftext|>{% endif %}"
)
PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
_SPLIT = (
    "{% set c = m.content %}{% set r = m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].strip() %}{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    + _SPLIT
    + "<|im_start|>assistant\n{% if loop.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
QWEN3_5 = QWEN3.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}",
)
"""The small ones, which do not think unless asked."""
DEEPSEEK_R1 = (
    "<|begin_of_text|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
GLM4 = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM4_5 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}"
    + _SPLIT
    + "<|assistant|>\n<think>{{ r if loop.last }}</think>\n{{ c }}{% else %}<|{{ m.role }}|>\n"
    "{{ m.content }}{% if enable_thinking is defined and not enable_thinking %}/nothink{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking }}"
    "{% endif %}"
)
DEEPSEEK_V3_1 = DEEPSEEK_R1.replace("<|Assistant|>{{", "<|Assistant|></think>{{").replace(
    "<think>\n{% endif %}", "{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
NEMOTRON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    + _SPLIT
    + "<think>{{ '\\n' + r + '\\n' if r }}</think>{{ c }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>"
    "{{ '\\n' }}{% endif %}{% endif %}"
)
"""Thinks unless told otherwise."""
GPT_OSS = (
    "<|start|>system<|message|>You are a model.<|end|>{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SMOLLM3 = (
    "<|im_start|>system\nReasoning mode: {{ '/no_think' if enable_thinking is defined and not "
    "enable_thinking else '/think' }}<|im_end|>\n{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
    "{% endif %}"
)
LLAMA4 = (
    "<|begin_of_text|>{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
TEKKEN = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
CLOSED_IF_FOLLOWED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if not loop.last %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}</s><|assistant|>{% endif %}"
)
TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<s>", "</s>", "[INST]", "[/INST]",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|endoftext|>", "<think>", "</think>", "<|User|>",
    "<|Assistant|>", "[gMASK]", "<sop>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>",
    "<|header_start|>", "<|header_end|>", "<|eot|>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
)  # fmt: skip
"""Their control tokens, in addition to those of the demo model."""


def make_model(folder: Path, template: str, tokens: tuple[str, ...]) -> Path:
    """Copy the demo model with another chat template and more control tokens."""
    shutil.copytree(DEMO / "model", folder)
    path = folder / "tokenizer.json"
    about = json.loads(path.read_bytes())
    last = max([*about["model"]["vocab"].values(), *(one["id"] for one in about["added_tokens"])])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    about["added_tokens"] += [
        {"id": last + place, "content": token, "special": True, **flags}
        for place, token in enumerate(tokens, start=1)
    ]
    path.write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(template)
    return folder
