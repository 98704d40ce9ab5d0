"""`rackless nodes storage`: a table, and deleting after a question."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.cli import storage
from app.cli.kit.output import Output
from app.cli.main import build_parser
from app.errors import UserError
from tests.fakes.core import FakeCore
from tests.fakes.storage import CHECKPOINT, LAST, MODEL, PARTIAL


def test_the_disk_is_shown_and_items_are_deleted_after_asking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FakeCore()

    def ask(*words: str, as_json: bool = False) -> tuple[int, str]:
        args = build_parser().parse_args(["nodes", "storage", "alpha", *words])
        core.calls.clear()
        code = asyncio.run(storage.show_storage(core, args, Output(as_json)))  # type: ignore[arg-type]
        return code, "".join(capsys.readouterr())

    monkeypatch.setattr(storage, "confirm", lambda question: False)
    code, said = ask()
    assert code == 0
    assert LAST in said
    assert "Rackless uses 24.0 GiB; 60 / 100 GiB of the disk are in use" in said
    ask("--free")
    assert json.loads(ask("--free", as_json=True)[1])["freed"] is None
    assert core.calls == []
    with pytest.raises(UserError, match="is not deleted: the last checkpoint"):
        ask("--free", CHECKPOINT)
    with pytest.raises(UserError, match="no item called modles"):
        ask("--free", "modles")
    monkeypatch.setattr(storage, "confirm", lambda question: "1 item on alpha, 2.0" in question)
    assert "2.0 GiB are free again on alpha" in ask("--free")[1]
    assert core.calls == [("storage.free", "alpha", PARTIAL)]
    assert "There is nothing to delete." in ask("--free")[1]
    core.storage.changed[MODEL] = "run r-2 needs it by now"
    code, said = ask("--free", "model", "checkpoint", "--yes")
    assert core.calls == [("storage.free", "alpha", MODEL)]
    assert (code, f"{MODEL} stays: run r-2 needs it by now" in said) == (1, True)
