"""Chat templates in Ollama's form: the same text for every turn, or an honest no."""

from __future__ import annotations

import pytest

from app.artifacts.chat_template import express

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|h|>' + m['role'] + '<|/h|>\n\n' + "
    "m['content'] | trim + '<|eot|>' }}{% endfor %}{{ '<|h|>assistant<|/h|>\n\n' }}"
)
THINKING = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ '[INST] <<SYS>>' + m['content'] }}"
    "{% elif m['role'] == 'user' %}{% if loop.index0 == 0 %}[INST] {% endif %}{{ m['content'] }}"
    " [/INST]{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
TALK = [("system", "Be kind."), ("user", "Who?"), ("assistant", "I."), ("user", "And?")]


@pytest.mark.parametrize(
    ("template", "begins", "ends", "stop"),
    [
        (CHATML, "<|im_start|>system\nBe kind.<|im_end|>\n", "assistant\n", "<|im_end|>"),
        (LLAMA_3, "<|h|>system<|/h|>\n\nBe kind.<|eot|>", "<|/h|>\n\n", "<|eot|>"),
        (THINKING, "<|im_start|>system", "assistant\n<think>\n", "<|im_end|>"),
    ],
)
def test_turns_are_put_as_the_model_has_learned_them(
    template: str, begins: str, ends: str, stop: str
) -> None:
    found = express(template, "<s>", "</s>")
    text = found.render(TALK)
    assert text.startswith(begins)
    assert text.endswith(ends)
    assert found.stop == stop
    go = found.to_go()
    assert go.startswith('{{ range .Messages }}{{ if eq .Role "system" }}')
    assert go.count("{{ .Content }}") == 3
    assert "<s>" not in go, "llama.cpp adds the first token itself"


def test_a_template_without_a_system_prompt_has_none() -> None:
    found = express(NO_SYSTEM, "<s>", "</s>")
    assert found.system is None
    assert "system" not in found.to_go()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LLAMA_2, "first turn"),
        ("{{ messages[0]['content'] }}", "leaves out"),
        ("{{ oops", "cannot be rendered"),
        ("{{ 1 // 0 }}", "cannot be rendered"),
        ("{% macro on() %}{{ on() }}{% endmacro %}{{ on() }}", "cannot be rendered"),
        ("{% for m in messages %}{{ loop.index }}{{ m['content'] }};{% endfor %}", "first turn"),
        (CHATML.replace("<|im_end|>", '"""'), "characters"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered"),
    ],
)
def test_what_does_more_is_not_guessed_at(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        express(template, "<s>", "</s>")
