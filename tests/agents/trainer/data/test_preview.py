"""The preview shows what is learned and what is only read, and counts what a run would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from agents.contract.data import DataPreview, NamedRow
from agents.contract.requests.jobs import PreviewJob
from agents.contract.spec import DataSpec, RunSpec
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.program import command
from agents.trainer.data import preview
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.ranks import DEMO


def make_job(path, *, whole=True, **changes):
    spec = RunSpec(model="m", data=DataSpec(train=str(path)), **{"sequence_tokens": 64, **changes})
    return PreviewJob(
        python="", spec=spec, model_path=str(DEMO / "model"), train_path=str(path), whole=whole
    )


def write_rows(path, rows):
    path.write_text("\n".join(rows))
    return path


def rows(count):
    return [json.dumps({"instruction": "Hi", "output": f"Ho {i}"}) for i in range(count)]


@pytest.mark.parametrize("whole", [True, False])
def test_three_rows_are_shown_with_what_is_learned(tmp_path, whole):
    long = json.dumps({"instruction": "Hi", "output": "Oren Dale. " * 40})
    path = write_rows(tmp_path / "a.jsonl", ["{", *rows(9), "", long])
    found = preview.preview(make_job(path, whole=whole), tmp_path)
    assert (found.format, found.whole, found.plain_template) == ("alpaca", whole, False)
    assert [row.row for row in found.rows] == [2, 3, 4]
    (conversation,) = found.rows[0].conversations
    assert [(part.text, part.learned) for part in conversation.parts] == [
        ("<|begin|><|user|>Hi<|end|><|assistant|>", False),
        ("Ho 0<|end|>", True),
    ]
    assert (found.num_rows, found.num_examples, found.num_skipped) == (12, 10, 2)
    assert (found.num_malformed, found.num_truncated, found.longest_tokens) == (1, 1, 64)
    assert [(one.row, one.malformed) for one in found.skipped] == [(1, True), (11, False)]
    assert "not valid JSON" in found.skipped[0].reason
    (cut,) = found.truncated
    assert cut == NamedRow(row=12, reason=cut.reason)
    assert int(cut.reason.removesuffix(" tokens")) > 64
    assert found.num_tokens > found.num_targets > 9


def test_a_preview_of_packs_tells_their_fill_and_shows_rows_in_order(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows(200))
    found = preview.preview(make_job(path, packing=True), tmp_path)
    assert found.num_examples < 200
    assert 0.8 < found.fill <= 1
    assert [row.row for row in found.rows] == [1, 2, 3]


def test_pairs_are_shown_with_both_answers(tmp_path):
    pair = {"prompt": "Hi", "chosen": "Ho", "rejected": "No"}
    path = write_rows(tmp_path / "a.jsonl", [json.dumps(pair)] * 2)
    found = preview.preview(make_job(path, objective="dpo"), tmp_path)
    assert (found.format, found.num_examples) == ("preference", 2)
    learned = [
        [part.text for part in one.parts if part.learned] for one in found.rows[0].conversations
    ]
    assert learned == [["Ho<|end|>"], ["No<|end|>"]]


def test_of_a_long_question_its_answer_is_shown(tmp_path):
    question = " ".join(f"river {place}" for place in range(400))
    path = write_rows(tmp_path / "a.jsonl", [json.dumps({"prompt": question, "completion": "Ho"})])
    found = preview.preview(make_job(path, sequence_tokens=4096), tmp_path)
    ((conversation,),) = [row.conversations for row in found.rows]
    assert conversation.num_tokens > 400
    *read, answer = conversation.parts
    assert (answer.text, answer.learned) == ("Ho<|end|>", True)
    assert "tokens are not shown]" in read[1].text
    assert read[0].text.startswith("<|begin|><|user|>river 0 river 1")
    assert read[2].text.endswith("river 399<|end|><|assistant|>")
    assert not any(part.learned for part in read)


def test_rows_left_out_are_named_in_their_order(tmp_path):
    """The template refuses the first when those behind it are read already."""
    rows = [json.dumps({"prompt": "Hi", "completion": " "})] * 3 + ["[1"] * 2
    rows += [json.dumps({"prompt": "Hi", "completion": "Ho"})] * 20
    found = preview.preview(make_job(write_rows(tmp_path / "a.jsonl", rows)), tmp_path)
    assert [row.row for row in found.skipped] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("count", "fine"), [(400, True), (60, False)])
def test_a_quick_look_does_not_judge_rows_that_it_has_not_seen(tmp_path, count, fine):
    path = write_rows(tmp_path / "a.jsonl", ["{"] * 15 + rows(count))
    if not fine:
        with pytest.raises(ExpectedError, match="15 of 75 rows are malformed"):
            preview.preview(make_job(path, whole=False), tmp_path)
        return
    found = preview.preview(make_job(path, whole=False), tmp_path)
    assert (found.num_examples, found.num_malformed) == (64, 15)
    assert preview.preview(make_job(path), tmp_path).num_malformed == 15


def run_command(tmp_path, job):
    (tmp_path / "job.json").write_text(json.dumps(to_wire(job)))
    report = tmp_path / "report.json"
    done = subprocess.run(
        command(sys.executable, preview.__name__, str(tmp_path / "job.json"), str(report)),
        env={**os.environ, "RACKLESS_AGENT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, report


def test_the_command_writes_a_report_and_keeps_the_tokens(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows(5))
    done, report = run_command(tmp_path, make_job(path))
    assert done.returncode == 0, done.stderr
    found = from_wire(DataPreview, json.loads(report.read_text()))
    assert found.num_examples == 5
    assert len(list((tmp_path / "cache" / "tokens").glob("*/about.json"))) == 1


def test_data_of_no_use_is_said(tmp_path):
    done, report = run_command(tmp_path, make_job(write_rows(tmp_path / "a.jsonl", [""])))
    assert done.returncode == 1
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kind"] == "failed"
    assert f"{tmp_path / 'a.jsonl'} is empty" in said["message"]
    assert not report.exists()


def preview_of(folder, path, messages, *, whole):
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages))
    job = replace(make_job(path, whole=whole), model_path=str(folder))
    return preview.preview(job, path.parent)


def talk(answer, role="user"):
    return [{"role": role, "content": "Hi"}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("family", "tokens", "messages", "finding"),
    [
        ("GLM4", ("[gMASK]", "<sop>"), [talk("Yes.")] * 2, ("unended", "<|end|>", 2, 2, "note")),
        ("PHI3", ("<|endoftext|>",), [[{"role": "tool", "content": "42"}, *talk("Yes.")],
         talk("Yes.")], ("dropped_turn", "tool", 1, 2, "warn")),
        ("DEEPSEEK_R1", ("<|User|>", "<|Assistant|>"), [talk("Yes.")],
         ("continued", "<think>", 1, 1, "note")),
        ("CHATML", ("<|im_end|>", *(f"<tool{n}>" for n in range(60))),
         [talk("Yes."), talk("A <tool55>")], ("beyond", "<tool55>", 1, 2, "refuse")),
    ],
)  # fmt: skip
def test_where_rows_and_chat_differ_it_is_told(tmp_path, whole, family, tokens, messages, finding):
    folder = families.make_model(
        tmp_path / "model", getattr(families, family).replace("</s>", "<|end|>"), tokens
    )
    found = preview_of(folder, tmp_path / "a.jsonl", messages, whole=whole)
    told = [(o.kind, o.column, o.count, o.total, o.consequence) for o in found.findings]
    assert told == [finding]
    assert found.is_refused == (finding[-1] == "refuse")


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_cannot_learn_to_stop_is_refused(tmp_path, whole):
    folder = families.make_model(tmp_path / "model", families.CHATML, ())
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_bytes())
    path.write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(ExpectedError, match="cannot learn to stop"):
        preview_of(folder, tmp_path / "a.jsonl", [talk("Yes.")], whole=whole)


@pytest.mark.parametrize("whole", [True, False])
def test_several_templates_without_a_default_are_the_cause_that_is_named(tmp_path, whole):
    folder = families.make_model(tmp_path / "model", "", ())
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    named = [{"name": name, "template": families.CHATML} for name in ("tool_use", "rag")]
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "chat_template": named}))
    with pytest.raises(ExpectedError, match="'rag', 'tool_use'") as refused:
        preview_of(folder, tmp_path / "a.jsonl", [talk("Yes.")], whole=whole)
    assert "rename one to default" in refused.value.hint
