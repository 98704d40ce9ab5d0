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
_TOOLS = "<tools>{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}{{ '\n' }}</tools>"
_HERMES_CALL = (
    '{% set c = c.function %}<tool_call>\n{"name": "{{ c.name }}", "arguments": '
    "{{ c.arguments | tojson }}}\n</tool_call>"
)
QWEN2_5_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' }}"
    + _TOOLS
    + "<|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n"
    "{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    + _HERMES_CALL
    + "{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_TOOLS = QWEN2_5_TOOLS.replace(
    "<|im_start|>assistant\n{{ m.content }}",
    _SPLIT + "<|im_start|>assistant\n{% if loop.last or (r and loop.index0 > messages.index("
    "(messages | selectattr('role', 'equalto', 'user') | list)[-1]) | int) %}"
    "<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}",
).replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    + _TOOLS
    + "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.tool_calls is defined %}{% for c in m.tool_calls %}{{ '\n' if not loop.first }}"
    + _HERMES_CALL
    + "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_TOOLS = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": '
    '"{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% else %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL_TOOLS = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}"
    "{% endfor %}<s>{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]</s>'
    "{% elif m.role == 'tool' %}{% if (m.tool_call_id or '') | length != 9 "
    "%}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GLM4_TOOLS = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% for c in m.tool_calls or [] %}<|assistant|>{{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}{% endfor %}{% if not m.tool_calls %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM4_5_TOOLS = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    + _SPLIT
    + "<|assistant|>\n<think>{{ r }}</think>{{ '\n' + c if c }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ call.function.name }}"
    "{% for k, v in call.function.arguments.items() %}{{ '\n' }}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}{{ '\n' }}"
    "</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)
GPT_OSS_TOOLS = (
    "<|start|>system<|message|>You are a model.<|end|>{% if tools %}<|start|>developer<|message|>"
    "namespace functions {% for t in tools %}type {{ t.function.name }} = "
    "{{ t.function.parameters | tojson }};{% endfor %}<|end|>{% endif %}"
    "{% set ns = namespace(called='') %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}"
    "{% set later = namespace(answer=false) %}{% for other in messages[loop.index:] %}"
    "{% if other.role == 'assistant' and 'tool_calls' not in other %}{% set later.answer = true %}"
    "{% endif %}{% endfor %}{% if m.thinking and not later.answer %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set ns.called = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ ns.called }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{% if not ns.called %}{{ raise_exception('no call before') }}"
    "{% endif %}<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ARGUMENTS_AS_TEXT = (
    "<|begin_of_text|>{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'user' %}"
    "<|User|>{{ m.content }}{% elif m.role == 'tool' %}<tool_output>{{ m.content }}</tool_output>"
    "{% else %}<|Assistant|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}</tool_call>{% endfor %}"
    "</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
"""As DeepSeek-V3 concatenates them."""
TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<s>", "</s>", "[INST]", "[/INST]",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|endoftext|>", "<think>", "</think>", "<|User|>",
    "<|Assistant|>", "[gMASK]", "<sop>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>",
    "<|header_start|>", "<|header_end|>", "<|eot|>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "<|call|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<|observation|>",
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
