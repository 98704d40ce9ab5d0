"""A report for a helper: what is in it, what never is, and that it works when little else does."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sqlite3
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.main import run
from app.core.core import Core
from app.core.new_nodes import AddNode
from app.doctor import cluster
from app.doctor.report import collect_report, save_report
from app.doctor.scrub import scrub
from app.errors import UserError
from app.nodes.node import LocalAddress
from app.paths import Paths
from app.provisioning.check_row import make_row
from app.provisioning.last_check import store_last_check

RECORDED = Path(__file__).parents[2] / "recorded" / "master"
RUN = "20261124-172351-3y4"
TOKEN = "hf_PlantedPlantedPlanted"
PASSWORD = "correcthorse-battery"
KEY_LINE = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtz"
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{KEY_LINE}\n-----END OPENSSH PRIVATE KEY-----"
RANDOM = "kJ8sd7FhG5kLq2PzXw9VbN3mRt6YuE1oAa4ScDd0"
PERSON = "annabelle"
ROW = "the patient said that her name is Penelope"
SECRETS = (TOKEN, PASSWORD, KEY_LINE, RANDOM, PERSON, ROW)
PLANTED = (
    f"token {TOKEN} and https://me:{PASSWORD}@hub.example/x?token={TOKEN} "
    f'{{"password": "{PASSWORD}"}} Authorization: Bearer {RANDOM} /home/{PERSON}/.ssh/id '
    f"C:\\Users\\{PERSON}\\x {PERSON}@10.0.0.5 {json.dumps(KEY)} {RANDOM}"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with secrets in every source."""
    home = tmp_path / "home"
    shutil.copytree(RECORDED, home)
    monkeypatch.setenv("RACKLESS_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", f"https://me:{PASSWORD}@hub.example")
    monkeypatch.setenv("SSH_AUTH_SOCK", f"/home/{PERSON}/agent.sock")
    paths = Paths(home)
    paths.settings_file.write_text(json.dumps({"note": PLANTED}))
    nodes = json.loads(paths.nodes_file.read_text())
    nodes[0]["address"].update(user=PERSON, key=PLANTED)
    paths.nodes_file.write_text(json.dumps(nodes))
    store_last_check(paths.last_check, [make_row("disk", "alpha", "fail", PLANTED)])
    paths.reports.mkdir()
    (paths.reports / "fault-20261124-000000-x.txt").write_text(PLANTED)
    folder = paths.attempt(RUN, 2) / "alpha"
    cut = "x" * 70_000 + f"\n{KEY_LINE}\n-----END OPENSSH PRIVATE KEY-----\n"
    with open(folder / "rank-0.log", "a") as file:
        file.write(f"{KEY[:40]}\n{cut}{PLANTED}\n")
    with open(folder / "rank-0.jsonl", "a") as file:
        file.write(json.dumps({"kind": "preview", "rows": [ROW]}) + "\n")
        file.write(json.dumps({"kind": "failed", "message": PLANTED}) + "\n")
        file.write(f'{{"kind": "preview", "rows": ["{ROW}')
    with sqlite3.connect(paths.database) as database:
        database.execute(
            "INSERT INTO run_events (run_id, time_s, severity, text) VALUES (?, 1, 'error', ?)",
            (RUN, PLANTED),
        )
        database.execute("UPDATE runs SET message = ?", (PLANTED,))
        told = json.dumps({"transport": "ssh", "host": "192.0.2.9", "port": 9, "user": PERSON})
        database.execute("UPDATE nodes SET address = ? WHERE name = 'beta'", (told,))
    database.close()
    return home


@pytest.fixture
def node_log() -> Iterator[Path]:
    """A log with secrets on the node that this PC is."""
    folder = Path(os.environ["RACKLESS_AGENT_HOME"]) / "runs" / "planted" / "attempts" / "1"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "rank-0.log").write_text(f"loading\n{PLANTED}\n")
    yield folder
    shutil.rmtree(folder.parents[1])


def read_zip(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def forms_of(secret: str) -> list[bytes]:
    """Return a secret as it would stand in text, and in base64 at each offset."""
    raw = secret.encode()
    coded = [base64.b64encode(b"x" * shift + raw)[4:-4] for shift in range(3)]
    return [raw, zlib.compress(raw)[2:-4], *coded]


async def add_this_pc(home: Path) -> None:
    async with Core.open(home) as core:
        await core.do(AddNode(name="here", address=LocalAddress()))


@pytest.mark.usefixtures("node_log")
def test_no_planted_secret_is_in_a_report(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "NODE_TIMEOUT_S", 4.0)
    asyncio.run(add_this_pc(home))
    file = tmp_path / "report.zip"
    assert run(["doctor", "--out", str(file)]) == 0
    printed = capsys.readouterr()
    found = read_zip(file)
    bodies = [file.read_bytes(), printed.out.encode(), *(text.encode() for text in found.values())]
    for secret in SECRETS:
        for form in forms_of(secret):
            assert [name for name, text in found.items() if form in text.encode()] == []
            assert all(form not in body for body in bodies)

    assert file.stat().st_mode & 0o077 == 0
    assert "hub.example" in found["system.json"], "only the secret part of an address goes"
    assert "disk" in found["last-check.json"]
    assert json.loads(found["nodes/here.json"])["facts"]["hostname"]
    assert "loading" in found["nodes/here/planted-1-rank-0.log"]
    assert "login_key cannot be read" in found["nodes/alpha.json"]
    assert found["nodes/beta.json"].startswith("not available: ")
    assert '"kind": "failed"' in found[f"runs/{RUN}/2/alpha/rank-0.jsonl"]
    assert json.loads(found["runs.json"])[0]["run"]["state"] == "done"
    assert "No rule finds a secret that looks like any other text" in found["README.txt"]
    # The list of what is inside comes first, in the file and on the screen.
    assert next(iter(found)) == "README.txt"
    assert all(name in found["README.txt"] for name in found if name != "README.txt")
    assert printed.out.index("runs.json") < printed.out.index(str(file))


def test_a_broken_store_and_a_newer_one_are_said(home: Path) -> None:
    database = Paths(home).database
    with sqlite3.connect(database) as store:
        store.execute("PRAGMA user_version = 99999")
    store.close()
    parts = {part.name: part.text for part in asyncio.run(collect_report(home))}
    assert "newer" in parts["store.txt"]
    assert "rackless.sqlite3" in parts["files.json"]
    assert f"runs/{RUN}/2/alpha/rank-0.log" in parts

    home.chmod(0o000)
    try:
        if os.geteuid():  # root may read it all the same
            parts = {part.name: part.text for part in asyncio.run(collect_report(home))}
            assert "not available" in parts["store.txt"]
    finally:
        home.chmod(0o700)


def test_a_fresh_pc_has_a_report_and_a_missing_node_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "new"
    parts = asyncio.run(collect_report(home))
    names = [part.name for part in parts]
    assert {"README.txt", "versions.json", "system.json", "settings.json"} <= set(names)
    # Nothing stored yet is no fault, which `not available` would sound like.
    known = {part.name: part.what for part in parts}
    assert known["settings.json"] == "settings: none stored yet"
    assert known["last-check.json"] == "rows of the last check: none stored yet"
    with pytest.raises(UserError, match="no node zeta"):
        asyncio.run(collect_report(home, node="zeta"))
    file = tmp_path / "r.zip"
    save_report(parts, file)
    with pytest.raises(UserError, match="is there already"):
        save_report(parts, file)
    with pytest.raises(UserError, match="cannot be written"):
        save_report(parts, tmp_path / "absent" / "r.zip")


def test_names_of_people_stay_if_wanted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "NODE_TIMEOUT_S", 0.1)
    kept = asyncio.run(collect_report(home, node="beta", keep_names=True))
    text = "".join(part.text for part in kept)
    assert PERSON in text
    assert not any(secret in text for secret in SECRETS if secret != PERSON)
    assert not any("/gamma/" in part.name or "/alpha/" in part.name for part in kept)


@pytest.mark.parametrize(
    "kept",
    [
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "/usr/lib/python3/dist-packages/Some_Package-1.0/module2/File3.py",
        "GPU-5f1c1a2e-0a4e-7d3c-9b4e-3d1f2a5b6c7d",
        "root@10.0.0.2 said hello",
    ],
)
def test_what_helps_is_kept(kept: str) -> None:
    assert scrub(kept, ("root", "me")) == kept
