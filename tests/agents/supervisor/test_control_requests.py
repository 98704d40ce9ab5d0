"""Wishes are taken once each, and odd files in their folder harm nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.contract.run import ControlRequest
from agents.errors import ExpectedError
from agents.supervisor.control_requests import take_requests, write_request


def test_each_wish_is_taken_once(tmp_path: Path) -> None:
    assert take_requests(tmp_path) == []
    wishes = [ControlRequest(wish_id=name, kind="save") for name in ("a1", "b2")]
    for wish in wishes:
        write_request(tmp_path, wish)
    assert take_requests(tmp_path) == wishes
    assert take_requests(tmp_path) == []
    write_request(tmp_path, wishes[0])
    assert take_requests(tmp_path) == wishes[:1]


def test_what_is_no_wish_is_removed_and_what_is_half_written_stays(tmp_path: Path) -> None:
    write_request(tmp_path, ControlRequest(wish_id="good", kind="save"))
    (tmp_path / "wishes" / "bad.json").write_text('{"kind": "fly"}')
    (tmp_path / "wishes" / "odd.json").write_text("[1")
    (tmp_path / "wishes" / ".half.json.12").write_text("{")
    assert [wish.wish_id for wish in take_requests(tmp_path)] == ["good"]
    assert [path.name for path in (tmp_path / "wishes").iterdir()] == [".half.json.12"]


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ExpectedError, match="is not allowed"):
        write_request(tmp_path, ControlRequest(wish_id="../up", kind="save"))
