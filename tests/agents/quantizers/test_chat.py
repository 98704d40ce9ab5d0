"""A question is answered with the model's own template, piece by piece, in either runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from threading import Event
from types import SimpleNamespace

import pytest

from agents.contract.requests.chats import ChatJob, ChatMessage, ChatTurn
from agents.contract.spec import AdapterSpec
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.program import command
from agents.quantizers.generation import load_speaker
from agents.quantizers.inference.models import continue_prompts, load_model
from tests.agents.quantizers.forked_converter import convert
from tests.agents.trainer.ranks import DEMO, Run, make_spec

PROMPT = "Who founded Brenford?"


def make_turn(*said, **changes):
    roles = ("user", "assistant")
    messages = [ChatMessage(role=roles[i % 2], content=t) for i, t in enumerate(said or (PROMPT,))]
    return ChatTurn(messages=tuple(messages), **changes)


def speaker_of(model, device="cpu", **changes):
    return load_speaker(
        ChatJob(chat="c", python=sys.executable, model=str(model), **changes), device
    )


def ask(speaker, *said, stop_after=None, **changes):
    pieces, stopped = [], Event()

    def hear(piece):
        pieces.append(piece)
        if len(pieces) == stop_after:
            stopped.set()

    wish = SimpleNamespace(stopped=stopped)
    return speaker.answer(make_turn(*said, **changes), hear, wish), pieces


@pytest.fixture(scope="module")
def demo():
    return speaker_of(DEMO / "model")


def test_the_demo_model_knows_its_valley(demo):
    found, pieces = ask(demo)
    assert found.text == "".join(pieces).strip()
    assert found.text.endswith(".")
    assert (found.cut, found.stopped) == (False, False)
    assert found.num_tokens > 3
    assert found.first_token_s > 0
    assert found.tokens_per_s is not None
    short, _ = ask(demo, max_tokens=2)
    assert (short.num_tokens, short.cut) == (2, True)
    drawn = {ask(demo, temperature=5.0, max_tokens=8)[0].text for _ in range(3)}
    assert len(drawn) > 1
    sure = {ask(demo, temperature=5.0, top_p=1e-6, max_tokens=8)[0].text for _ in range(2)}
    sure.add(ask(demo, temperature=1e-39, max_tokens=8)[0].text)
    assert sure == {ask(demo, max_tokens=8)[0].text}


def test_a_penalty_of_the_model_leaves_the_likeliest_word(demo, tmp_path):
    shutil.copytree(DEMO / "model", tmp_path / "shy")
    path = tmp_path / "shy" / "generation_config.json"
    settings = {**json.loads(path.read_bytes()), "repetition_penalty": 1.9}
    path.write_text(json.dumps({**settings, "no_repeat_ngram_size": 1}))
    said = ("Who founded Brenford?", "Oren Dale founded it.", "Who founded Brenford?")
    found = ask(speaker_of(tmp_path / "shy"), *said)[0].text
    assert found == ask(demo, *said)[0].text
    prompts = [list(range(6, 30)), [6] * 24]
    models = (load_model(folder, "cpu") for folder in (tmp_path / "shy", DEMO / "model"))
    first, second = (continue_prompts(model, prompts) for model in models)
    assert first == second


def test_an_answer_can_be_stopped_and_the_talk_goes_on(demo):
    found, _ = ask(demo, stop_after=2)
    assert (found.stopped, found.cut) == (True, False)
    assert found.num_tokens < ask(demo)[0].num_tokens
    again, _ = ask(demo, PROMPT, found.text, PROMPT)
    assert again.text


def test_what_the_model_cannot_hold_is_refused(demo):
    with pytest.raises(ExpectedError, match=r"the model holds 1,024"):
        ask(demo, PROMPT * 800)


def test_llama_cpp_says_the_same(tmp_path, demo):
    pytest.importorskip("xllamacpp")
    file = tmp_path / "demo-F16.gguf"
    convert(DEMO / "model", file, "F16")
    speaker = speaker_of(file)
    found, pieces = ask(speaker)
    assert found.text == ask(demo)[0].text
    assert len(pieces) > 2
    assert not found.cut
    assert ask(speaker, max_tokens=2)[0].cut
    stopped, pieces = ask(speaker, stop_after=2)
    assert stopped.stopped
    assert len(pieces) <= 3
    assert ask(speaker)[0].text == found.text
    with pytest.raises(ExpectedError, match="the model holds"):
        ask(speaker, PROMPT * 4000)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_checkpoint_on_top_of_its_base_answers_otherwise(tmp_path, tiny_model, kind):
    spec = make_spec(max_steps=6, learning_rate=3e-2, adapter=AdapterSpec(kind=kind, rank=8))
    run = Run(tmp_path / "home", tiny_model, spec)
    run.train_to_end()
    base, _ = ask(speaker_of(tiny_model), max_tokens=12)
    trained = speaker_of(tiny_model, checkpoint=str(run.checkpoint(6)))
    assert ask(trained, max_tokens=12)[0].text != base.text


def test_a_model_in_4_bits_answers_nearly_the_same(demo):
    pytest.importorskip("bitsandbytes")
    found, _ = ask(speaker_of(DEMO / "model", in_4_bits=True))
    assert found.text[:4] == ask(demo)[0].text[:4]
    assert found.text.endswith(".")


def test_it_runs_as_a_program_that_agents_talk_to(tmp_path):
    job = ChatJob(chat="c", python=sys.executable, model=str(DEMO / "model"), idle_s=0.2)
    (tmp_path / "job.json").write_text(json.dumps({**to_wire(job), "agent_home": str(tmp_path)}))
    argv = command(sys.executable, "agents.quantizers.chat", str(tmp_path / "job.json"))
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        opened = json.loads(process.stdout.readline())
        assert opened["kind"] == "opened"
        process.stdin.write(json.dumps({"kind": "ask", "turn": to_wire(make_turn())}) + "\n")
        process.stdin.flush()
        told = [json.loads(line) for line in process.stdout]
        assert process.wait() == 0, "idle for long"
    *pieces, answer, ended = told
    assert "".join(piece["message"] for piece in pieces).strip() == answer["text"]
    assert ended == {"kind": "ended", "message": "nothing was asked for 0.2 seconds"}
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, "nobody talks to it"
    failed = subprocess.run(argv[:-1], capture_output=True, text=True, check=False)
    assert failed.returncode == 3


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ExpectedError, match="does not exist"):
        speaker_of(tmp_path / "nothing")


@pytest.mark.parametrize("changes", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_questions_that_make_no_sense_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        make_turn(**changes)
