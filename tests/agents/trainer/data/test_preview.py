"""The preview shows what is learned and what is only read."""

from __future__ import annotations

import json

from agents.spec import DataSpec, RunSpec
from agents.trainer.data import preview
from agents.wire import to_wire
from tests.agents.trainer.ranks import DEMO


def run_preview(tmp_path, capsys, rows):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    spec = RunSpec(model=str(DEMO / "model"), data=DataSpec(train=str(path)), sequence_tokens=64)
    (tmp_path / "spec.json").write_text(json.dumps(to_wire(spec)))
    code = preview.main(tmp_path / "spec.json")
    return code, json.loads(capsys.readouterr().out)


def test_three_rows_are_shown_with_what_is_learned(tmp_path, capsys):
    rows = [json.dumps({"instruction": "Hi", "output": f"Ho {i}"}) for i in range(9)]
    code, shown = run_preview(tmp_path, capsys, ["{", *rows])
    assert code == 0
    assert shown["format"] == "alpaca"
    assert [row["row"] for row in shown["rows"]] == [2, 3, 4]
    (conversation,) = shown["rows"][0]["conversations"]
    assert conversation["parts"] == [
        {"text": "<|begin|><|user|>Hi<|end|><|assistant|>", "learned": False},
        {"text": "Ho 0<|end|>", "learned": True},
    ]
    assert shown["skipped"][0]["row"] == 1


def test_data_of_no_use_is_said(tmp_path, capsys):
    code, shown = run_preview(tmp_path, capsys, [""])
    assert (code, shown["kind"]) == (1, "failed")
    assert "is empty" in shown["message"]
