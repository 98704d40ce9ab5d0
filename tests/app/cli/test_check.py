"""What `rackless check` prints while it runs, and its one document in the end."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest

from agents.contract.messages import Progress
from app.cli.check import _check
from app.cli.kit.output import Output
from app.cli.main import build_parser, run
from app.core.action import Report
from app.core.nodes import CheckNodes, RowChecked
from app.provisioning.check_row import CheckRow, make_row
from tests.fakes.core import FakeCore, make_node

ROWS = (
    make_row("clock", "big", "warn", "9 s behind", "set it", evidence="9.1 s"),
    make_row("disk", "big", "pass", "40 GiB free"),
    CheckRow(check="tcp", node="big", peer="b", status="fail", message="no\nway", fix="mend it"),
)


def run_check(rows: tuple[CheckRow, ...], as_json: bool) -> tuple[int, str, list[str]]:
    """Return the exit code, the output, and the output so far after each report."""
    out = io.StringIO()
    seen: list[str] = []

    async def check(action: CheckNodes, report: Report) -> tuple[CheckRow, ...]:
        # The last known first, as the fastest node would be.
        for row in reversed(rows):
            report(RowChecked(row))
            report(Progress(message="1 of 2 nodes examined"))
            seen.append(out.getvalue())
        return rows

    core = FakeCore(node_map={"big": make_node("big")})
    core.answers[CheckNodes] = check
    output = Output(as_json, out, io.StringIO())
    args = build_parser().parse_args(["check"])
    code = asyncio.run(_check(core, args, output))
    return code, out.getvalue(), seen


def test_rows_are_printed_as_they_are_known() -> None:
    code, text, seen = run_check(ROWS, as_json=False)
    assert code == 1
    assert "no way" in seen[0]
    assert "40 GiB" not in seen[0]
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["STATUS", "fail", "pass", "warn"]
    assert len({line.index("big") for line in lines[1:4]} | {lines[0].index("NODE")}) == 1
    assert "  big, clock: set it" in text
    assert lines[-1] == "3 checks: 1 passed, 1 failed, 1 warning"


@pytest.mark.parametrize(("rows", "code"), [(ROWS, 1), (ROWS[:2], 0), ((), 0)])
def test_one_document_in_the_end(rows: tuple[CheckRow, ...], code: int) -> None:
    got, text, seen = run_check(rows, as_json=True)
    assert got == code
    assert set(seen) <= {""}
    found = json.loads(text)
    assert [row["check"] for row in found] == [row.check for row in rows]
    assert all(row["evidence"] == own.evidence for row, own in zip(found, rows, strict=True))


def test_an_error_with_json_is_one_line_with_four_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    for words, code in ((["check", "pc"], 1), (["check", "--fix"], 2)):
        assert run([*words, "--json"]) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        assert list(json.loads(printed.err)) == ["what", "where", "next", "code"]
        assert len(printed.err.splitlines()) == 1
