"""Names and figures of strangers: in an old database, in journals, in the window."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.contract.run import FileEntry, RankPlacement, StreamChunk
from agents.contract.spec import DataSpec, RunSpec
from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.cli.main import run as rackless
from app.errors import RacklessError
from app.paths import Paths
from app.runs.journals.history import RunHistory
from app.runs.journals.mirror import Mirror
from app.runs.journals.streams import store_chunk
from app.storage.artifacts import ArtifactStore
from app.storage.database import open_database
from app.storage.runs import AttemptRecord, RunRecord, RunStore

Attack = Callable[..., None]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("state", ["failed", "running"])
@pytest.mark.parametrize(
    ("run_id", "node", "attempt"),
    [
        ("../../victim", "pc", 1),
        ("VICTIM", "pc", 1),
        ("..", "pc", 1),
        ("r-1", "../../../../victim", 1),
        ("r-1", "pc", 0),
        ("r-1", "pc", -3),
    ],
)
def test_a_bad_name_in_an_old_database_is_shown_and_its_folder_never_touched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    attack: Attack,
    run_id: str,
    node: str,
    attempt: int,
    state: Any,
) -> None:
    home, victim = tmp_path / "home", tmp_path / "victim"
    monkeypatch.setenv("RACKLESS_HOME", str(home))
    (victim / "attempts" / "1").mkdir(parents=True)
    (victim / "letter.txt").write_text("dear anna")
    run_id = run_id.replace("VICTIM", str(victim))
    assert rackless(["runs", "list"]) == 0  # makes the home
    store = RunStore(open_database(Paths(home).database))
    spec = RunSpec(model="m", data=DataSpec(train="x.jsonl"), name="poems")
    store.add(
        RunRecord(
            run_id=run_id, name="poems", state=state, spec=spec, attempt=attempt, nodes=(node,),
            created_s=1.7e9,
        )
    )  # fmt: skip
    place = RankPlacement(rank=0, local_rank=0, node=node, device="cpu")
    store.save_attempt(
        AttemptRecord(run_id=run_id, attempt=attempt, placements=(place,), launched_s=1.7e9)
    )
    capsys.readouterr()
    codes = [rackless(words) for words in (["runs", "list"], ["runs", "show", run_id])]
    shown = capsys.readouterr().out
    for words in (["runs", "logs", run_id], ["runs", "resume", run_id], ["checkpoints", run_id]):
        rackless(words)
    deleted = rackless(["runs", "delete", run_id])
    said = capsys.readouterr().err
    attack(
        given=f"a stored run {run_id!r}, attempt {attempt} on {node!r}",
        tried="to be listed, shown and deleted",
        happened=f"shown and deleted; {said}",
    )
    assert codes == [0, 0]
    assert deleted == 0
    assert "poems" in shown
    assert "internal error" not in said
    assert (victim / "letter.txt").read_text() == "dear anna"
    assert sorted(path.name for path in victim.rglob("*")) == ["1", "attempts", "letter.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "victim"]
    assert store.get(run_id) is None


def test_a_link_in_place_of_a_run_is_neither_written_through_nor_deleted(
    tmp_path: Path, attack: Attack
) -> None:
    runs, victim = tmp_path / "runs", tmp_path / "victim"
    (runs / "r-1" / "attempts").mkdir(parents=True)
    victim.mkdir()
    (runs / "r-1" / "attempts" / "1").symlink_to(victim)
    mirror = Mirror(runs / "r-1" / "attempts" / "1" / "pc", below=runs)
    with pytest.raises(RacklessError) as error:
        mirror.append("rank-0.log", 0, b"evil")
    attack(given="a symbolic link", tried="to be mirrored through", happened=str(error.value))
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 10**13, "dropped_bytes": 10**13, "size_bytes": 10**13 + 4},
        {"offset": 10**12, "dropped_bytes": 10**12, "size_bytes": 10**12 + 4},
        {
            "stream": "rank-0.jsonl",
            "offset": 10**8,
            "dropped_bytes": 10**8,
            "size_bytes": 2 * 10**8,
        },
        {"data_base64": "\u00e9\u00e9=="},
        {"data_base64": "YWJj" * 10, "size_bytes": 3},
        {"stream": "../rank-0.log"},
        {"dropped_bytes": -5},
    ],
)
def test_a_chunk_that_no_run_has_is_refused_with_a_declared_error(
    tmp_path: Path, attack: Attack, changes: dict[str, Any]
) -> None:
    known = {"stream": "rank-0.log", "offset": 0, "data_base64": "ZXZpbA==", "size_bytes": 4}
    chunk = StreamChunk(run_id="r-1", attempt=1, **{**known, **changes})
    with pytest.raises(RacklessError) as error:
        store_chunk(Mirror(tmp_path / "pc"), chunk)
    attack(given=f"a chunk with {changes}", tried="to be stored", happened=str(error.value))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 100_000


LINES = [
    b'{"kind": "step", "step": 1, "time_s": 1e300, "loss": 1' + b"0" * 400 + b"}",
    b'{"kind": "step", "step": 1' + b"0" * 30 + b"}",
    b'{"kind": "step", "step": -5, "step_s": 1e-320, "global_tokens": 1e308}',
    b'{"kind": "started", "step": 0, "shares": [1' + b"0" * 400 + b"]}",
    b'{"kind": "warning", "message": "\\ud800", "time_s": -1e300}',
    b'{"kind": "warning", "message": "\\u001b[2J\\nrackless: all is well", "time_s": 1e300}',
    b'{"kind": "eval", "step": 3, "loss": Infinity, "time_s": NaN}',
    b'{"kind": "trace", "first_step": 1, "file": "../../../etc/passwd"}',
    b'{"kind": ' + b"[" * 100_000,
    b'{"kind": "checkpoint", "step": 1e400, "seconds": 1e400}',
]


def test_a_journal_of_a_liar_is_read_without_an_error_and_names_no_file_elsewhere(
    tmp_path: Path, attack: Attack
) -> None:
    part = tmp_path / "r-1" / "attempts" / "1" / "pc"
    part.mkdir(parents=True)
    for name in ("rank-0.jsonl", "supervisor.jsonl"):
        (part / name).write_bytes(b"\n".join(LINES) + b"\n")
    history = RunHistory("r-1", tmp_path / "r-1")
    history.refresh()
    told = [event.text for event in history.events]
    attack(given="a journal with absurd values", tried=f"{LINES[0][:60]!r} ...", happened=f"{told}")
    assert all(0 <= event.time_s <= 32_503_680_000 for event in history.events)
    assert not any(set(text) & set("\x1b\n\ud800") for text in told)
    traces = [trace.path for a in history.attempts.values() for trace in a.traces]
    assert not any("passwd" in path or ".." in path for path in traces)
    json.dumps([step.step for step in history.steps()])


def test_the_window_shows_names_of_others_as_plain_text(attack: Attack) -> None:
    pytest.importorskip("PySide6")
    from PySide6.QtCore import Qt
    from PySide6.QtWidgets import QApplication

    from app.gui.kit.primitives import ElidedLabel, make_label, make_tooltip

    app = QApplication.instance() or QApplication([])
    evil = "<img src='file:///dev/zero'>\x1b[2J\u202egpj.exe"
    for label in (make_label(evil), make_label(evil, wraps=True), ElidedLabel(evil)):
        label.setText(evil)
        assert label.textFormat() == Qt.TextFormat.PlainText
        assert not set(label.text()) & set("\x1b\u202e")
    shown = make_tooltip(evil)
    attack(given="a name with HTML and controls", tried=evil, happened=shown)
    assert "<img" not in shown
    assert not set(shown) & set("\x1b\u202e")
    del app


async def test_the_agent_answers_requests_of_any_shape_with_a_declared_error(
    tmp_path: Path, attack: Attack
) -> None:
    import sys

    requests: list[Any] = [
        {"kind": "cancel", "args": {"request": [1]}},
        {"kind": "cancel", "args": {"request": {}}},
        {"kind": "attempt.status", "args": {"run_id": "../../x", "attempt": 1}},
        {"kind": "attempt.status", "args": {"run_id": "r-1", "attempt": -1}},
        {"kind": "attempt.stop", "args": {"run_id": "r", "attempt": 1, "grace_s": 1e300}},
        {"kind": "probe.listen", "args": {"address": "127.0.0.1", "timeout_s": 1e300}},
        {"kind": "stream.follow", "args": {"run_id": "r", "attempt": 10**17, "offsets": {}}},
        {"kind": "run.delete", "args": {"run_id": ".."}},
        {"kind": "run.fence", "args": {"run_id": "a/b", "attempt": 1}},
        {"kind": "artifact.delete", "args": {"path": "runs/../../x/y"}},
        {"kind": "chat.ask", "args": {"chat": [], "turn": []}},
        {"kind": "telemetry.follow", "args": {"after_s": "x"}},
    ]
    lines = [json.dumps({"type": "request", "id": n, **r}) for n, r in enumerate(requests, 1)]
    lines += ['{"type": []}', '{"type": "request", "id": 1e400, "kind": "x"}', "[" * 100_000]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents", "serve", "nonce"),
        env={"RACKLESS_AGENT_HOME": str(tmp_path / "agent"), "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n".join(lines).encode() + b"\n")
    answers: dict[int, Any] = {}
    async with asyncio.timeout(60):
        while len(answers) < len(requests):
            line = await process.stdout.readline()
            assert line, (await process.communicate())[1]
            message = json.loads(line) if line.startswith(b"{") else {}
            if message.get("type") == "response":
                answers[message["id"]] = message
        process.stdin.close()
        await process.wait()
    kinds = {requests[n - 1]["kind"]: (a["error"] or {}).get("kind") for n, a in answers.items()}
    attack(given="requests of a lying master", tried=", ".join(kinds), happened=f"{kinds}")
    assert "bug" not in kinds.values()


def test_an_artifact_with_a_bad_file_name_in_an_old_database_is_listed_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, attack: Attack
) -> None:
    home, folder = tmp_path / "home", tmp_path / "model"
    monkeypatch.setenv("RACKLESS_HOME", str(home))
    folder.mkdir()
    letter = tmp_path / "letter.txt"
    letter.write_text("dear anna")
    assert rackless(["artifacts", "list"]) == 0  # makes the home
    store = ArtifactStore(open_database(Paths(home).database))
    bad = FileEntry(path="../letter.txt", size_bytes=9, sha256="0" * 64)
    place = ArtifactCopy(kind="folder", place=str(folder), made_s=1.7e9)
    store.add(
        ArtifactSnapshot(
            name="poems", version=1, format="merged", size_bytes=9, created_s=1.7e9, files=(bad,),
            copies=(place,),
        )
    )  # fmt: skip
    capsys.readouterr()
    code = rackless(["artifacts", "list"])
    rackless(["artifacts", "delete", "poems", "--yes"])
    said = capsys.readouterr()
    attack(given="a stored artifact", tried=bad.path, happened=said.out + said.err)
    assert code == 0
    assert "poems" in said.out
    assert letter.read_text() == "dear anna"
