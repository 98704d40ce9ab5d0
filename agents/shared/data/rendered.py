"""Recognize texts that a chat template has already rendered, and their answers."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Begin of an answer, end of it, and begin of the next turn, by the templates of known families.
_ANSWERS = (
    ("<|im_start|>assistant", "<|im_end|>", "<|im_start|>"),
    ("<|start_header_id|>assistant<|end_header_id|>", "<|eot_id|>", "<|start_header_id|>"),
    ("<|header_start|>assistant<|header_end|>", "<|eot|>", "<|header_start|>"),
    ("<start_of_turn>model", "<end_of_turn>", "<start_of_turn>"),
    ("<|start|>assistant<|channel|>final<|message|>", "<|return|>", "<|start|>"),
    ("[/INST]", "</s>", "[INST]"),
    ("<|assistant|>", "<|end|>", "<|user|>"),
    ("<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"),
    ("### Response:", "", "### Instruction:"),
    ("### Assistant:", "", "### Human:"),
    ("ASSISTANT:", "</s>", "USER:"),
    ("\n\nAssistant:", "", "\n\nHuman:"),
)
_BEGINS = tuple(begin for begin, _, _ in _ANSWERS)
_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?$")
_CONTROL = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|header_start|eot|start|channel"
    r"|assistant|user|system)\|>|<(?:start|end)_of_turn>|\[/?INST\]|<\uff5c(?:User|Assistant)\uff5c>"
)


def ends_with_answer_begin(prompt: str) -> bool:
    """Return whether a prompt ends where a template lets the answer begin.

    >>> ends_with_answer_begin("<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n")
    True
    >>> ends_with_answer_begin("What does [/INST] mean?")
    False
    """
    bare = _THOUGHT.sub("", prompt.rstrip()).rstrip()
    return bare.endswith(tuple(begin.strip() for begin in _BEGINS))


def find_control(text: str) -> str:
    """Return the first control token of a known template in a text; empty: it has none.

    >>> find_control("<|im_start|>user"), find_control("a [INST] b"), find_control("plain")
    ('<|im_start|>', '[INST]', '')
    """
    if "<" not in text and "[" not in text:
        return ""
    found = _CONTROL.search(text)
    return found.group() if found else ""


def find_answers(text: str) -> tuple[range, ...]:
    """Return the answers of a rendered text with the tokens that end them; empty: none is found.

    >>> text = "[INST] Hi [/INST] Hello</s>[INST] Bye [/INST] Goodbye</s>"
    >>> [text[part.start : part.stop] for part in find_answers(text)]
    [' Hello</s>', ' Goodbye</s>']
    """
    for begin, end, following in _ANSWERS:
        if begin in text:
            return tuple(_find_between(text, begin, end, following))
    return ()


def _find_between(text: str, begin: str, end: str, following: str) -> Iterator[range]:
    place = text.find(begin)
    while place >= 0:
        start = place + len(begin)
        # A header ends with its line.
        if text[start : start + 2] == "\n\n" and begin.endswith("|>"):
            start += 2
        elif text[start : start + 1] == "\n":
            start += 1
        stop = text.find(end, start) if end else -1
        stop = stop + len(end) if stop >= 0 else text.find(following, start)
        stop = stop if stop >= 0 else len(text)
        if stop > start:
            yield range(start, stop)
        place = text.find(begin, stop)
