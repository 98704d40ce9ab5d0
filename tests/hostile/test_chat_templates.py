"""A stranger's chat template ends in a clear error wherever it is rendered, and fills no memory.

Templates that loop, double a text, recurse or compute one huge number are tried in the preview of
data, in training, in a chat in both runtimes, and in the hand-off to Ollama on the master.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agents.contract.requests.chats import ChatJob, ChatMessage, ChatTurn
from agents.contract.wire import to_wire
from agents.program import command
from agents.quantizers.formats.gguf import convert
from app.artifacts.chat_template import express
from app.core.core import Core
from app.core.library import PreviewData, ReadRunFile
from app.errors import UserError
from tests.agents.trainer.conftest import fork_server
from tests.agents.trainer.ranks import Run, finish, make_spec
from tests.hostile.planted import ROOT, copy_model, write_run_file

__all__ = ["fork_server"]
LOOP = "".join(f"{{% for {name} in range(90000) %}}" for name in "abc") + "{% endfor %}" * 3
DOUBLE = "{% set n = namespace(x='a' * 1000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
DOUBLE += "{% endfor %}{{ n.x }}"
MANY = "{% for i in range(99999) %}{{ 'ab' * 60000 }}{% endfor %}"
TEMPLATES = {
    "a range of 10^12": "{% for i in range(10 ** 12) %}{{ i }}{% endfor %}",
    "nested loops": LOOP,
    "one huge text": "{{ 'a' * 10 ** 10 }}",
    "a text that doubles": DOUBLE,
    "many long texts": MANY,
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "one huge number": "{{ 10 ** (10 ** 10) }}",
    "a number that squares itself": "{% set n = namespace(x=3) %}{% for i in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "padding": "{{ '%10000000000d' % 1 }}",
    "centring": "{{ 'a' | center(10 ** 10) }}",
    "endless brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "endless blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
}
ENDLESS = ("nested loops", "a text that doubles", "many long texts")
"""Those of which only time or memory say that they do not end."""
MOST_S = 60.0
"""Time for any of them, which includes the start of a program on a busy PC, in seconds."""
REFUSALS = ("needs more than", "refuses it", "refuses this", "cannot be", "is no text")
TRY_ALL = """
import json, sys
def main(arguments):
    from pathlib import Path
    from agents.errors import ExpectedError
    from agents.trainer.data.conversations import ConversationRow, ConversationTurn
    from agents.trainer.data.tokenizer import load_tokenizer
    from agents.trainer.data.tokens import tokenize_rows
    turns = tuple(ConversationTurn(role=r, content="x") for r in ("user", "assistant"))
    row = ConversationRow(number=7, turns=turns)
    tokenizer, _ = load_tokenizer(Path(arguments[0]))
    given = json.loads(Path(arguments[1]).read_text())
    for name, template in {**given, "a number": 5, "a list": [1]}.items():
        tokenizer.chat_template = template
        try:
            said = str(list(tokenize_rows(tokenizer, [row], 128)))
        except ExpectedError as error:
            said = error.message
        print("SAID", json.dumps([name, said]), flush=True)
    return 0
"""


def run_limited(argv: Sequence[str], more: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program of ours, which no test lets take more than its bounds and a start."""
    return subprocess.run(
        argv,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{more}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_every_template_of_a_stranger_ends_while_data_is_tokenized(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    (tmp_path / "try_all.py").write_text(TRY_ALL)
    (tmp_path / "templates.json").write_text(json.dumps(TEMPLATES))
    model = copy_model(tmp_path / "model")
    argv = command(sys.executable, "try_all", str(model), str(tmp_path / "templates.json"))
    started = time.monotonic()
    done = run_limited(argv, str(tmp_path))
    lines = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line[:4] == "SAID"]
    said = dict(json.loads(line) for line in lines)
    for name, text in said.items():
        attack(given=f"a chat template with {name}", tried="to tokenize a row", happened=text[:300])
    assert set(said) == {*TEMPLATES, "a number", "a list"}, done.stderr[-2000:]
    for name, text in said.items():
        assert any(words in text for words in REFUSALS), (name, text)
    for name in ENDLESS:
        assert "row 7" in said[name]
        assert "chat template of this model needs more than" in said[name]
    assert time.monotonic() - started < 3 * MOST_S


def make_model(folder: Path, template: str) -> Path:
    model = copy_model(folder)
    (model / "chat_template.jinja").write_text(template)
    return model


def test_the_preview_names_the_row_of_a_template_that_does_not_end(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    # Only the third row sets it off, so that no trial before the data would have found it.
    template = "{% if 'TRIGGER' in messages[0]['content'] %}" + LOOP + "{% endif %}"
    template += "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    make_model(tmp_path / "run" / "model", template)
    run_file = write_run_file(tmp_path / "run")
    rows = (tmp_path / "run" / "train.jsonl").read_text().splitlines()
    turns = [{"role": "user", "content": "TRIGGER"}, {"role": "assistant", "content": "x"}]
    rows[2] = json.dumps({"messages": turns})
    (tmp_path / "run" / "train.jsonl").write_text("\n".join(rows))

    async def preview() -> None:
        async with Core.open(tmp_path / "master") as core:
            spec = await core.do(ReadRunFile(path=run_file))
            await core.do(PreviewData(spec=spec, whole=True))

    with pytest.raises(UserError) as refused:
        asyncio.run(preview())
    attack(
        given="a template that loops at one row of the data only",
        tried="to hold up the preview",
        happened=refused.value.message,
    )
    assert "chat template" in refused.value.message
    assert "row 3" in refused.value.message
    assert refused.value.hint


def test_a_rank_ends_with_the_reason_when_a_template_does_not(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    model = make_model(tmp_path / "model", DOUBLE)
    run = Run(tmp_path / "attempt", model, make_spec(max_steps=1))
    assert finish(run.start()) == [3]
    (failed,) = [line for line in run.journal() if line["kind"] == "failed"]
    attack(
        given="a template that doubles a text",
        tried="to fill the memory of a node at the start of a run",
        happened=failed["message"],
    )
    assert "chat template of this model needs more than" in failed["message"]


@pytest.mark.parametrize("runtime", ["Transformers", "llama.cpp"])
def test_a_chat_with_a_template_that_does_not_end_is_refused(
    tmp_path: Path, attack: Callable[..., None], runtime: str
) -> None:
    model = make_model(tmp_path / "model", LOOP if runtime == "Transformers" else DOUBLE)
    if runtime == "llama.cpp":
        convert(model, tmp_path / "made.gguf", "F16")
        model = tmp_path / "made.gguf"
    job = ChatJob(chat="c", python=sys.executable, model=str(model), idle_s=0.2)
    (tmp_path / "job.json").write_text(json.dumps({**to_wire(job), "agent_home": str(tmp_path)}))
    argv = command(sys.executable, "agents.quantizers.chat", str(tmp_path / "job.json"))
    turn = ChatTurn(messages=(ChatMessage(role="user", content="Who are you?"),))
    said = []
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"kind": "ask", "turn": to_wire(turn)}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            said.append(json.loads(line))
            if said[-1]["kind"] in ("failed", "answer"):
                break
        process.kill()
    attack(
        given="a chat template that loops or doubles a text",
        tried=f"to hold up a chat in {runtime}",
        happened=said[-1]["message"],
    )
    assert said[-1]["kind"] == "failed"
    assert "needs more than" in said[-1]["message"]


@pytest.mark.parametrize("name", ["nested loops", "a text that doubles", "one huge number"])
def test_the_master_hands_no_endless_template_to_ollama(
    attack: Callable[..., None], name: str
) -> None:
    started = time.monotonic()
    with pytest.raises(
        ValueError, match=r"needs more than|cannot be rendered|does not end"
    ) as said:
        express(TEMPLATES[name], "<s>", "</s>")
    attack(
        given=f"a GGUF file whose chat template has {name}",
        tried="to freeze the window of the master",
        happened=str(said.value),
    )
    assert time.monotonic() - started < MOST_S


@pytest.mark.campaign
def test_a_single_operation_that_does_not_end_is_killed_with_a_reason(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    make_model(tmp_path / "run" / "model", "{{ 1 | round(10 ** 10, 'ceil') }}")
    run_file = write_run_file(tmp_path / "run")

    async def preview() -> None:
        async with Core.open(tmp_path / "master") as core:
            spec = await core.do(ReadRunFile(path=run_file))
            await core.do(PreviewData(spec=spec, whole=False))

    started = time.monotonic()
    with pytest.raises(UserError) as refused:
        asyncio.run(preview())
    attack(
        given="a template that rounds to 10^10 places",
        tried="to hold up the preview in one operation, which no error can interrupt",
        happened=refused.value.message,
    )
    assert "chat template" in refused.value.message
    assert time.monotonic() - started < MOST_S
