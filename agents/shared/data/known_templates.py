"""Chat templates that a run file can name, in the form in which their families publish them.

Each begins with the tokenizer's BOS, which is left out if the tokenizer begins no text with it.
"""

from __future__ import annotations

BEGIN = "{{ bos_token }}"
PLAIN_TEMPLATE = (
    BEGIN + "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + (eos_token or '') }}"
    "{% elif message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n### Response:\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
"""Chat template for tokenizers without one, with the wording of Stanford Alpaca."""
# Rackless moves a refused system prompt to the first question.
_NO_SYSTEM = (
    "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
KNOWN = {
    "chatml": (
        BEGIN + "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-3": (
        BEGIN + "{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        BEGIN + "{% for message in messages %}" + _NO_SYSTEM + "{{ '<start_of_turn>' + "
        "('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
        "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "mistral": (
        BEGIN + "{% for message in messages %}" + _NO_SYSTEM + "{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + '[/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        BEGIN + "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "vicuna": (
        BEGIN + "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ 'USER: ' + message['content'] + ' ' }}{% elif message['role'] == 'assistant' %}"
        "{{ 'ASSISTANT: ' + message['content'] + eos_token }}"
        "{% else %}{{ message['content'] + ' ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "alpaca": PLAIN_TEMPLATE,
}
"""Templates by name."""


def is_template(text: str) -> bool:
    """Return whether a text is a template, not the name of one.

    >>> is_template("chatml"), is_template("{{ messages[0].content }}")
    (False, True)
    """
    return "{{" in text or "{%" in text
