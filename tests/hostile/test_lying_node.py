"""A node that lies: what it names stays inside our folder, what it says does nothing but show."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import run
from app.errors import UserError
from app.events import EventHub
from app.nodes.files import transfer
from app.nodes.fleet import Fleet
from app.nodes.node import Node, parse_ssh_target
from app.nodes.ssh_hosts import resolve_host
from tests.hostile.liar import FACTS, Liar, lying_pc

pytestmark = pytest.mark.netns
SPEC = {"model": "m", "name": "poems", "data": {"train": "x.jsonl"}}
Rackless = Callable[..., str]


@pytest.fixture(scope="module")
def pc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    folder = tmp_path_factory.mktemp("liar") / "pc"
    with lying_pc(folder) as liar:
        yield liar


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the user beside the home of Rackless."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear anna")
    return folder


@pytest.fixture
def rackless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Rackless:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))

    def command(*words: str) -> str:
        run(words)
        said = capsys.readouterr()
        return said.out + said.err

    return command


ADOPT = ("runs", "adopt", "r-1", "--node", "liar", "--yes")
"""The user agrees to watch the run that the node lists."""


def status(**changes: object) -> dict[str, object]:
    """An attempt that a node reports."""
    rank = {"rank": 0, "local_rank": 0, "node": "liar", "device": "cpu"}
    known = {"run_id": "r-1", "attempt": 1, "node": "liar", "state": "done", "spec": SPEC}
    return {**known, "all_ranks": [rank], "started_s": 1.7e9, **changes}


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


LIES = {
    "a run id that climbs": {"run_id": "../../victim"},
    "an absolute run id": {"run_id": "VICTIM"},
    "a run id of a dot": {"run_id": "."},
    "an attempt that is no number of ours": {"attempt": 0},
    "a negative attempt": {"attempt": -1},
    "a node that climbs": {
        "all_ranks": [{"rank": 0, "local_rank": 0, "node": "../../../../victim", "device": "cpu"}]
    },
    "a run id with a line break": {"run_id": "r-1\nr-2"},
    "a time that no calendar has": {"started_s": 1e300},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_node_writes_nothing_outside_runs_and_deleting_its_run_deletes_nothing(
    pc: Liar, rackless: Rackless, victim: Path, tmp_path: Path, lie: str, attack: Any
) -> None:
    told = {k: str(victim) if v == "VICTIM" else v for k, v in LIES[lie].items()}
    pc.says(
        {
            "attempt.list": {"attempts": [status(**told)]},
            "stream.list": {"streams": {"rank-0.log": 4}},
            "stream.read": chunk(run_id=told.get("run_id", "r-1")),
        }
    )
    rackless(*pc.arguments())
    rackless("runs", "adopt", told.get("run_id", "r-1"), "--node", "liar", "--yes")
    shown = json.loads(rackless("runs", "list", "--json") or "null")
    runs = shown if isinstance(shown, list) else shown["runs"]
    for one in runs:
        rackless("runs", "delete", one["run_id"])
        rackless("runs", "delete", one["run_id"], "--yes")
    attack(given=lie, tried=f"to be stored: {told}", happened=f"{len(runs)} runs were stored")
    assert (victim / "letter.txt").read_text() == "dear anna"
    assert everything_in(victim) == {"letter.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {"home", "victim"}


def chunk(**changes: object) -> dict[str, object]:
    known = {"run_id": "r-1", "attempt": 1, "stream": "rank-0.log", "offset": 0}
    return {**known, "data_base64": "ZXZpbA==", "size_bytes": 4, **changes}


CHUNKS = {
    "a stream of another name": ({"stream": "../../../../victim/letter.txt"}, 4),
    "a stream of another rank": ({"stream": "rank-7.log"}, 4),
    "a stream of another run": ({"run_id": "r-2"}, 4),
    "a hole of ten terabytes": (
        {"offset": 10**13, "dropped_bytes": 10**13, "size_bytes": 10**13 + 4},
        10**13 + 4,
    ),
    "a hole in a journal": (
        {
            "stream": "rank-0.jsonl",
            "offset": 10**9,
            "dropped_bytes": 10**9,
            "size_bytes": 10**9 + 4,
        },
        4,
    ),
    "an offset below zero": ({"offset": -4}, 4),
    "base64 beyond ASCII": ({"data_base64": "\u00e9\u00e9=="}, 4),
    "bytes behind the end": ({"size_bytes": 1}, 4),
}


@pytest.mark.parametrize("lie", CHUNKS)
def test_a_lying_log_fills_no_disk_and_writes_only_its_own_mirror(
    pc: Liar, rackless: Rackless, victim: Path, tmp_path: Path, lie: str, attack: Any
) -> None:
    changes, size = CHUNKS[lie]
    pc.says(
        {
            "attempt.list": {"attempts": [status()]},
            "stream.list": {"streams": {"rank-0.log": size}},
            "stream.read": chunk(**changes),
        }
    )
    said = rackless(*pc.arguments())
    said += rackless(*ADOPT)
    said += rackless("runs", "list")
    mirrored = [p for p in (tmp_path / "home" / "runs").rglob("*.*") if p.is_file()]
    sizes = {path.name: path.stat().st_size for path in mirrored}
    attack(given=lie, tried=f"to be mirrored: {changes}", happened=f"mirrored: {sizes}")
    assert not [path for path in mirrored if path.stat().st_size > 100 and "lock" not in path.name]
    assert everything_in(victim) == {"letter.txt"}
    assert "rank-7.log" not in sizes
    assert "internal error" not in said


def test_the_log_of_the_same_node_is_mirrored_while_it_tells_the_truth(
    pc: Liar, rackless: Rackless, tmp_path: Path
) -> None:
    pc.says(
        {
            "attempt.list": {"attempts": [status()]},
            "stream.list": {"streams": {"rank-0.log": 4}},
            "stream.read": chunk(),
        }
    )
    rackless(*pc.arguments())
    assert not (tmp_path / "home" / "runs" / "r-1").exists(), "the user has not agreed"
    rackless(*ADOPT)
    log = tmp_path / "home" / "runs" / "r-1" / "attempts" / "1" / "liar" / "rank-0.log"
    assert log.read_bytes() == b"evil"


def test_names_of_streams_from_a_node_are_only_the_documented_ones(
    pc: Liar, rackless: Rackless, tmp_path: Path, attack: Any
) -> None:
    names = ("rank-\u0663.log", "rank-00.log", ".bashrc", "intent.json", "x" * 80, "rank-0.log.exe")
    pc.says(
        {
            "attempt.list": {"attempts": [status()]},
            "stream.list": {"streams": dict.fromkeys(names, 4)},
            "stream.read": chunk(stream=names[0]),
        }
    )
    rackless(*pc.arguments())
    rackless(*ADOPT)
    found = {path.name for path in (tmp_path / "home" / "runs").rglob("*") if path.is_file()}
    attack(given="odd names of streams", tried=f"{names}", happened=f"files: {sorted(found)}")
    assert not found & set(names)


def test_a_node_that_answers_in_a_wrong_form_is_shown_with_the_reason(
    pc: Liar, rackless: Rackless, attack: Any
) -> None:
    pc.says({"attempt.list": {"attempts": [status(run_id="../x")]}})
    added = rackless(*pc.arguments())
    assert "attempt.list in a wrong form" in added
    pc.says({"facts": {**FACTS, "gpus": [{"uuid": [], "index": 1e400, "name": None}]}})
    said = rackless("nodes", "list")
    attack(given="facts of wrong types", tried="to be shown as a node", happened=said)
    assert "internal error" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "answer",
    [
        {"result": {"run_id": "r-2", "attempt": 1, "node": "liar", "state": "running"}},
        {"result": {"run_id": "r-1", "attempt": 1, "node": "liar", "state": []}},
        {"result": {"ranks": [{"rank": 10**9}]}},
        {"result": []},
        {"error": {"kind": "bug", "message": "boo", "traceback": "line 1"}},
        {"error": {"kind": "\x1b", "message": "boo"}},
    ],
)
def test_wrong_answers_about_a_running_run_leave_every_list_usable(
    pc: Liar, rackless: Rackless, attack: Any, answer: dict[str, Any]
) -> None:
    known = status(state="running")
    streams = {"stream.list": {"streams": {}}}
    pc.says({"attempt.list": {"attempts": [known]}, "attempt.status": known, **streams})
    rackless(*pc.arguments())
    rackless(*ADOPT)
    assert "running" in rackless("runs", "list")
    lines = {"attempt.status": [json.dumps({"type": "response", "id": "NUMBER", **answer})]}
    lines["attempt.status"] = [lines["attempt.status"][0].replace('"NUMBER"', "NUMBER")]
    pc.says({"attempt.list": {"attempts": []}}, lines=lines, silent=["attempt.status"])
    said = "".join(
        rackless(*words)
        for words in (
            ("runs", "list"),
            ("runs", "show", "r-1"),
            ("nodes", "list"),
            ("checkpoints",),
        )
    )
    attack(given=f"a status of {answer}", tried="to end every list", happened=said)
    assert "poems" in said
    assert "internal error" not in said


def test_what_a_node_says_is_shown_escaped_on_a_terminal(
    pc: Liar, rackless: Rackless, attack: Any
) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\u202egpj.exe\r\nrackless: all is well\x9b31m"
    gpu = {"uuid": "GPU-1", "index": 0, "name": evil, "memory_bytes": 1 << 34}
    facts = {**FACTS, "hostname": evil, "cpu": evil, "gpus": [gpu], "gpu_problem": evil}
    pc.says({"facts": facts, "attempt.list": {"attempts": [status(message=evil, hint=evil)]}})
    said = rackless(*pc.arguments())
    for words in (("nodes", "list"), ("nodes", "show", "liar"), ("runs", "found"), ADOPT,
                  ("runs", "list"),
                  ("runs", "show", "r-1"), ("check", "liar")):  # fmt: skip
        said += rackless(*words)
    attack(given="names with control characters", tried=repr(evil), happened=ascii(said[:300]))
    assert "owned" in said
    assert not set(said) & set("\x1b\x07\x9b\u202e\r")
    assert "\nrackless: all is well" not in said


def test_lines_that_are_no_messages_take_down_neither_the_command_nor_the_node(
    pc: Liar, rackless: Rackless, attack: Any
) -> None:
    lines = [
        '{"type": []}',
        '{"type": {}}',
        '{"type": "event", "kind": "x", "request_id": 1e400}',
        '{"type": "response", "id": ' + "9" * 400 + "}",
        '{"type": "response", "id": NUMBER, "result": ' + "[" * 5000,
        '{"type": "event", "kind": "\\ud800"}',
        '{"type": "response", "id": NUMBER, "error": {"kind": "user", "message": {}}}',
    ]
    pc.says({}, lines={"facts": lines, "ping": lines[:2]})
    said = rackless(*pc.arguments())
    said += rackless("nodes", "list")
    attack(given="lines that are no messages", tried=f"{lines[0]} ...", happened=said)
    assert "liar" in said
    assert "internal error" not in said


HEADERS: dict[str, dict[str, Any]] = {
    "a file that climbs": {"files": [{"path": "../evil", "size_bytes": 1, "sha256": "0"}]},
    "a petabyte": {"files": [{"path": "a", "size_bytes": 10**15, "sha256": "0"}]},
    "two names for one file": {
        "files": [{"path": p, "size_bytes": 1, "sha256": "0"} for p in ("a", "A")]
    },
    "a file in a file": {
        "files": [{"path": p, "size_bytes": 1, "sha256": "0"} for p in ("a", "a/b")]
    },
    "a hundred thousand files": {
        "files": [{"path": f"{n}", "size_bytes": 0, "sha256": "0"} for n in range(100_000)]
    },
    "a name that acts on a terminal": {
        "files": [{"path": "\x1b[2J", "size_bytes": 0, "sha256": "0"}]
    },
}


@pytest.mark.parametrize("lie", [*HEADERS, "bytes behind the last file", "noise without a list"])
async def test_a_fetch_takes_no_more_than_was_listed_and_fits(
    pc: Liar, tmp_path: Path, lie: str, attack: Any
) -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    flood = {"files": [{"path": "a", "size_bytes": 0, "sha256": empty}]}
    header = "x" if lie.startswith("noise") else json.dumps(HEADERS.get(lie, flood))
    pc.says({}, send={"header": header, "flood_mib": 0 if lie in HEADERS else 40})
    async with Fleet(tmp_path / "home", EventHub()) as fleet:
        host = resolve_host(parse_ssh_target(pc.address), (), key=pc.key)
        node = Node(name="liar", address=host.address)
        await fleet.join(node, pc.fingerprint)
        began_s = time.monotonic()
        out = tmp_path / "out" / "model"
        with pytest.raises(UserError) as error:
            await transfer.fetch(fleet.client("liar"), "runs/r/exports/merged", out)
    attack(given=lie, tried="to be fetched", happened=str(error.value))
    assert time.monotonic() - began_s < 30
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_a_checkpoint_of_a_lying_node_is_no_path_of_another(
    pc: Liar, rackless: Rackless, attack: Any
) -> None:
    info = {"run_id": "r-1", "step": 5, "attempt": 1, "path": "../../../etc", "size_bytes": 1,
            "manifest_sha256": "0", "created_s": 1e9}  # fmt: skip
    pc.says({"attempt.list": {"attempts": [status()]}, "checkpoint.list": {"checkpoints": [info]}})
    rackless(*pc.arguments())
    said = rackless("checkpoints", "list", "r-1") + rackless("checkpoints", "r-1")
    attack(given="a checkpoint with another path", tried=info["path"], happened=said)
    assert "/etc" not in said
