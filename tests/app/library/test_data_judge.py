"""Data that would be trained wrongly is refused here, before a byte of it is sent."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import DataSpec, RunSpec
from app.cli.kit.output import Output
from app.cli.plan import plan_document, print_plan
from app.errors import UserError
from app.forecasts.planner import Planner, describe_nodes
from app.gui.kit.theme import read_palette
from app.gui.new_run.data_view import data_html
from app.planning.candidate import Plan
from app.presentation.data_text import describe_data
from app.runs.inputs.preview import preview_data
from app.runs.lifecycle.launch import start_run
from app.runs.services import Services
from tests.app.forecasts.test_learning import CONFIG
from tests.fakes.cluster import FakeCluster, make_facts
from tests.fakes.models import write_model

DEMO = Path(__file__).parents[3] / "resources" / "demo"
QA = {"prompt": "Who founded Brenford?", "completion": "Oren Dale."}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the form that the file's name asks for."""
    if path.suffix == ".csv":
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
        path.write_text(text.getvalue())
    elif path.name == "wrapped.json":
        path.write_text(json.dumps({"version": 1, "data": rows}))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def with_data(spec: RunSpec, path: Path, **changes: Any) -> RunSpec:
    return replace(spec, data=replace(spec.data, train=str(path), **changes))


NAMES = ["a.jsonl", "a.json", "wrapped.json", "a.csv"]


@pytest.mark.parametrize("name", NAMES)
def test_answers_that_a_label_calls_bad_are_refused_before_anything_is_sent(
    tmp_path: Path, services: Services, cluster: FakeCluster, spec: RunSpec, name: str
) -> None:
    path = write(tmp_path / name, [{**QA, "label": number % 2 == 0} for number in range(40)])
    with pytest.raises(UserError) as refused:
        asyncio.run(start_run(services, with_data(spec, path)))
    assert str(path) in refused.value.message
    assert "in 20 of 40 rows (50 %), the first of them row 2, 'label'" in refused.value.message
    assert "data.ignore_columns: [label]" in refused.value.hint
    assert not any(node.pushed for node in cluster.nodes.values())
    kept = with_data(spec, path, ignore_columns=("label",))
    assert asyncio.run(start_run(services, kept))


def test_evaluation_data_is_judged_as_well(
    tmp_path: Path, services: Services, spec: RunSpec
) -> None:
    path = write(tmp_path / "a.jsonl", [{**QA, "images": ["a.png"]}])
    asked = replace(spec, data=replace(spec.data, eval=str(path)))
    with pytest.raises(UserError, match="'images' holds pictures"):
        asyncio.run(start_run(services, asked))


def test_of_a_folder_the_file_with_the_first_such_row_is_named(
    tmp_path: Path, services: Services, spec: RunSpec
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    write(folder / "a.jsonl", [QA, QA])
    write(folder / "b.jsonl", [QA, {**QA, "history": ["Ann asked who founded it."]}])
    with pytest.raises(UserError, match=r"in 1 of 4 rows \(25 %\), b\.jsonl, row 2, 'history'"):
        asyncio.run(start_run(services, with_data(spec, folder)))


def plan(services: Services, spec: RunSpec, path: Path) -> Plan:
    write_model(Path(spec.model), **CONFIG)
    cluster = describe_nodes(services.planning, {"alpha": make_facts()})
    return asyncio.run(Planner(services).plan(with_data(spec, path), cluster))


def printed(found: Plan, spec: RunSpec) -> str:
    out = io.StringIO()
    print_plan(found, spec, Output(as_json=False, out=out))
    return out.getvalue()


def test_a_plan_names_what_is_refused_what_is_not_used_and_what_is_cut(
    tmp_path: Path, services: Services, spec: RunSpec
) -> None:
    rows = [{**QA, "source": "web", "label": number > 4} for number in range(10)]
    rows[9] = {**rows[9], "completion": "The river runs. " * 2000}
    path = write(tmp_path / "a.jsonl", rows)
    found = plan(services, spec, path)
    text = printed(found, spec)
    assert "A start refuses this data." in text
    assert "refused: in 5 of 10 rows (50 %), the first of them row 1, 'label'" in text
    assert "not used: 'source' (100 %)" in text
    assert "% of the tokens" in text
    document = json.loads(json.dumps(plan_document(found)))
    kinds = {one["kind"]: one for one in document["findings"]}
    assert (kinds["verdict"]["column"], kinds["verdict"]["consequence"]) == ("label", "refuse")
    assert kinds["cut"]["count"] > 0.7 * kinds["cut"]["total"]


def test_a_plan_reads_the_template_of_a_model_that_is_here(
    tmp_path: Path, services: Services, spec: RunSpec
) -> None:
    answer = {"role": "assistant", "content": "Oren.", "reasoning_content": "It was he."}
    rows = [{"messages": [{"role": "user", "content": "Who?"}, answer]}]
    path = write(tmp_path / "a.jsonl", rows)
    template = Path(spec.model, "chat_template.jinja")
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (found,) = plan(services, spec, path).findings
    assert (found.kind, found.column) == ("template", "messages[].reasoning_content")
    template.write_text("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}")
    assert not plan(services, spec, path).findings


def test_a_plan_refuses_tools_that_the_template_leaves_out(
    tmp_path: Path, services: Services, spec: RunSpec
) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [{"name": "sky", "arguments": {}}]}
    tools = [{"name": "sky"}]
    rows = [{"messages": [{"role": "user", "content": "Who?"}, answer], "tools": tools}]
    path = write(tmp_path / "a.jsonl", rows)
    template = Path(spec.model, "chat_template.jinja")
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    found = plan(services, spec, path).findings
    assert {(one.kind, one.column, one.consequence) for one in found} == {
        ("no_tools", "tools", "refuse"),
        ("no_tools", "messages[].tool_calls", "refuse"),
    }
    template.write_text("{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}")
    assert not plan(services, spec, path).findings


def test_a_preview_tells_the_same_in_the_window_and_on_the_command_line(
    tmp_path: Path, services: Services
) -> None:
    rows = [{**QA, "<b>x</b>\x1b[2J": "1", "label": number % 2 == 0} for number in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    spec = RunSpec(model=str(DEMO / "model"), data=DataSpec(train=str(path)))
    found = asyncio.run(preview_data(services, spec))
    assert found.is_refused
    told = dict(describe_data(found))
    assert "in 20 of 40 rows (50 %), the first of them row 2, 'label'" in told["refused"]
    assert told["not used"] == r"'<b>x</b>\x1b[2J' (100 %)"
    html = data_html(found, read_palette("dark"))
    assert "&lt;b&gt;x&lt;/b&gt;" in html
    assert "<b>x" not in html
