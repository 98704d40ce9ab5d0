"""A question is answered with the model's own template, piece by piece, in either runtime."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agents.artifacts import ChatJob
from agents.errors import UserError
from agents.quantizers.chat import answer
from agents.quantizers.gguf import convert
from agents.spec import AdapterSpec
from agents.wire import to_wire
from tests.agents.trainer.ranks import DEMO, Run, make_spec

PROMPT = "Who founded Brenford?"


def ask(model, **changes):
    pieces = []
    job = ChatJob(python=sys.executable, model=str(model), prompt=PROMPT, **changes)
    return answer(job, pieces.append), pieces


def test_the_demo_model_knows_its_valley():
    found, pieces = ask(DEMO / "model")
    assert found.text == "".join(pieces).strip()
    assert found.text.endswith(".")
    assert not found.cut
    assert found.num_tokens > 3
    assert found.first_token_s > 0
    assert found.tokens_per_s is not None
    short, _ = ask(DEMO / "model", max_tokens=2)
    assert (short.num_tokens, short.cut) == (2, True)
    drawn = {ask(DEMO / "model", temperature=5.0, max_tokens=8)[0].text for _ in range(3)}
    assert len(drawn) > 1


def test_llama_cpp_says_the_same(tmp_path):
    pytest.importorskip("xllamacpp")
    file = tmp_path / "demo-F16.gguf"
    convert(DEMO / "model", file, "F16")
    found, pieces = ask(file)
    assert found.text == ask(DEMO / "model")[0].text
    assert len(pieces) > 2
    assert not found.cut
    assert ask(file, max_tokens=2)[0].cut


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_checkpoint_on_top_of_its_base_answers_otherwise(tmp_path, tiny_model, kind):
    spec = make_spec(max_steps=6, learning_rate=3e-2, adapter=AdapterSpec(kind=kind, rank=8))
    run = Run(tmp_path / "home", tiny_model, spec)
    run.train_to_end()
    base, _ = ask(tiny_model, max_tokens=12)
    trained, _ = ask(tiny_model, max_tokens=12, checkpoint=str(run.checkpoint(6)))
    assert trained.text != base.text


def test_a_model_in_4_bits_answers_nearly_the_same():
    pytest.importorskip("bitsandbytes")
    found, _ = ask(DEMO / "model", in_4_bits=True)
    whole, _ = ask(DEMO / "model")
    assert found.text[:4] == whole.text[:4]
    assert found.text.endswith(".")


def test_it_runs_as_a_program_that_agents_start(tmp_path):
    job = ChatJob(python=sys.executable, model=str(DEMO / "model"), prompt=PROMPT)
    (tmp_path / "job.json").write_text(json.dumps({**to_wire(job), "agent_home": str(tmp_path)}))
    argv = [sys.executable, "-m", "agents.quantizers.chat", str(tmp_path / "job.json")]
    done = subprocess.run(
        [*argv, str(tmp_path / "report.json")], capture_output=True, text=True, check=True
    )
    pieces = [json.loads(line)["message"] for line in done.stdout.splitlines()]
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert "".join(pieces).strip() == report["text"]
    failed = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert failed.returncode == 3


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        ask(tmp_path / "nothing")


@pytest.mark.parametrize("changes", [{"max_tokens": 0}, {"temperature": -1.0}])
def test_questions_that_make_no_sense_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        ask(DEMO / "model", **changes)
