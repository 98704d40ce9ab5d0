"""Run files of strangers that name the user's private files as model or data."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli.main import run
from app.errors import UserError
from app.library.data import explain_missing_data, find_data
from app.library.models import find_model, find_tokenizer
from app.library.private_places import explain_private
from app.runfile.run_file import read_run_file
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.models import write_model

Attack = Callable[..., None]
REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = '{"text": "a private text"}\n'


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return make_services(tmp_path / "home", FakeCluster("alpha"))


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home of a person with private files, which is that of this test."""
    home = tmp_path / "anna"
    for name in PRIVATE:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(ROWS)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RACKLESS_HOME", str(home / "rackless"))
    monkeypatch.delenv("HF_HOME", raising=False)
    return home


PRIVATE = (
    ".ssh/id_rsa.json",
    ".ssh/config.txt",
    ".gnupg/keys.txt",
    ".aws/credentials.json",
    ".docker/config.json",
    ".config/google-chrome/Default/history.json",
    ".mozilla/firefox/abc.default/logins.json",
    ".local/share/keyrings/login.txt",
    ".cache/huggingface/token.txt",
    ".netrc.txt",
    "snap/firefox/common/.mozilla/logins.json",
    "project/.env.txt",
    "project/.git/config.txt",
    "rackless/nodes.json",
    "rackless/runs/r-1/attempts/1/alpha/rank-0.txt",
    "project/secrets.json",
    "project/client_secret_12.json",
    "project/hf-token.txt",
    "Downloads/Chrome Passwords.csv",
    "project/myApiKeys.json",
    "project/service-account.json",
)


def refuse(services: Services, run_file: Path) -> str:
    """Return the words with which the data of a run file is refused."""
    spec = read_run_file(run_file)
    with pytest.raises(UserError) as caught:
        find_data(spec.data.train, "data.train", services.hashes)
    assert caught.value.hint
    return caught.value.message


def write_run(folder: Path, train: str, model: str = "org/tiny") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(f"model: {json.dumps(model)}\ndata:\n  train: {json.dumps(train)}\n")
    return path


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("spelling", ["absolute", "tilde", "climbing", "a link beside the run"])
def test_a_run_file_cannot_send_private_files(
    services: Services, user: Path, name: str, spelling: str, attack: Attack
) -> None:
    folder = user / "downloads"
    spelled = {
        "absolute": str(user / name),
        "tilde": f"~/{name}",
        "climbing": f"../downloads/../{name}",
        "a link beside the run": f"rows{Path(name).suffix}",
    }[spelling]
    run_file = write_run(folder, spelled)
    if spelling.startswith("a link"):
        (folder / spelled).symlink_to(user / name)
    said = refuse(services, run_file)
    attack(given=f"data.train: {spelled}", tried="start the run of a stranger", happened=said)
    assert "so it is not sent" in said
    assert explain_missing_data(read_run_file(run_file).data.train)


@pytest.mark.parametrize("name", [".ssh", ".config", "rackless", ".local/share/keyrings"])
def test_a_run_file_cannot_send_private_folders(services: Services, user: Path, name: str) -> None:
    assert "so it is not sent" in refuse(services, write_run(user / "downloads", f"~/{name}"))


@pytest.mark.parametrize(
    "name",
    ["/proc/self/environ", "/proc/self/root/etc/passwd", "/dev/zero", "/dev/stdin", "/etc/shadow",
     "/etc", "/proc", "/sys/kernel", "/dev/fd/0", "/var",
     "/var/log/syslog", "/var/lib/x/rows.jsonl"],
)  # fmt: skip
def test_a_run_file_cannot_send_files_of_the_system(
    services: Services, tmp_path: Path, name: str, attack: Attack
) -> None:
    said = refuse(services, write_run(tmp_path / "downloads", name))
    attack(given=f"data.train: {name}", tried="start the run of a stranger", happened=said)
    assert "is a file of the operating system" in said or "does not exist" in said


@pytest.mark.parametrize(
    "start", ["-----BEGIN OPENSSH PRIVATE KEY-----", "\n-----BEGIN RSA PRIVATE KEY-----",
              "-----BEGIN PRIVATE KEY-----", "-----BEGIN PGP PRIVATE KEY BLOCK-----",
              "PuTTY-User-Key-File-3: ssh-ed25519"],
)  # fmt: skip
def test_a_private_key_is_no_data_wherever_it_lies(
    services: Services, tmp_path: Path, start: str
) -> None:
    (tmp_path / "notes.txt").write_text(f"{start}\nb3BlbnNzaC1rZXk\n")
    assert "is a private key" in refuse(services, write_run(tmp_path, "notes.txt"))


@pytest.mark.parametrize("name", ["/var/home/anna/rows.jsonl", "/var/tmp/rows.jsonl"])
def test_folders_of_users_below_a_folder_of_the_system_are_theirs(name: str) -> None:
    assert explain_private(name) == ""


@pytest.mark.parametrize(
    "name", ["secrets.jsonl", "token-counts.csv", "tokens.json", "the-secret-garden-by-burnett.txt"]
)
def test_data_that_is_about_secrets_is_data(services: Services, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "x"}\n' if "json" in name else "text\nx\n")
    assert find_data(str(tmp_path / name), "data.train", services.hashes).member == name


def test_a_folder_of_data_is_not_sent_with_a_file_of_secrets(
    services: Services, tmp_path: Path
) -> None:
    for name in ("rows.jsonl", "secrets.json"):
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_text(ROWS)
    with pytest.raises(UserError, match=r"secrets\.json is named like .* is not sent"):
        find_data(str(tmp_path / "data"), "data.train", services.hashes)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = {
    "a pipe": make_pipe,
    "a socket": make_socket,
    "a folder": Path.mkdir,
    "a device": make_link_to_device,
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_refused_wherever_a_file_is_named(
    services: Services,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    attack: Attack,
) -> None:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    odd = tmp_path / "odd.yaml"
    ODD[kind](odd)
    good = write_run(tmp_path / "good", "rows.jsonl")
    (tmp_path / "good" / "rows.jsonl").write_text(ROWS)
    for words in (
        ("plan", "odd.yaml"),
        ("preview", "odd.yaml"),
        ("start", "odd.yaml"),
        ("recipes", "save", "odd.yaml", "--title", "x"),
        ("plan", str(good), "--cluster", "odd.yaml"),
        ("nodes", "add", "--from", "odd.yaml"),
        ("nodes", "add", "x", "--ssh", "anna@127.0.0.1:1", "--key", "odd.yaml"),
        ("nodes", "windows-script", "x", "--public-key", "odd.yaml"),
    ):
        code = run(words)
        said = "".join(capsys.readouterr())
        attack(given=f"{kind} as a file", tried=f"rackless {' '.join(words)}", happened=said)
        assert code in (1, 2), words
        assert "internal error" not in said
        assert f"is {kind}, not a file" in said, (words, said)


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
def test_what_is_no_folder_is_refused_as_a_model(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ODD[kind](tmp_path / "odd")
    for find in (find_model, find_tokenizer):
        with pytest.raises(UserError, match=rf"is {kind}, not a folder"):
            find(str(tmp_path / "odd"), services.hashes)


def test_a_pipe_as_data_is_refused_at_once(tmp_path: Path, attack: Attack) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    run_file = write_run(tmp_path, "rows.jsonl")
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RACKLESS_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "app", "preview", str(run_file)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
    )
    attack(given="data.train: a pipe", tried="rackless preview", happened=done.stderr)
    assert done.returncode == 1
    assert "is a pipe, not a file" in done.stderr


@pytest.mark.parametrize("name", ["/dev/zero", "/proc/self/mem"])
def test_a_device_as_run_file_is_refused_at_once(tmp_path: Path, name: str, attack: Attack) -> None:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RACKLESS_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v 4000000; exec {sys.executable} -m app plan {name}"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
    )
    attack(given=f"the run file {name}", tried="rackless plan", happened=done.stderr)
    assert done.returncode == 2
    assert name in done.stderr


def test_settings_of_programs_are_never_taken_for_a_model(services: Services, user: Path) -> None:
    for find in (find_model, find_tokenizer):
        with pytest.raises(UserError):
            find(str(user / ".docker"), services.hashes)
    with pytest.raises(UserError, match="so it is not sent"):
        find_tokenizer(str(user / ".docker"), services.hashes)


def test_data_of_a_hidden_cache_of_data_is_data(services: Services, user: Path) -> None:
    for place in ("poems/.git/annex/objects/x1", ".cache/huggingface/hub/datasets--a--b/blobs"):
        (user / place).mkdir(parents=True)
        (user / place / "rows.jsonl").write_text(ROWS)
        found = find_data(str(user / place / "rows.jsonl"), "data.train", services.hashes)
        assert found.member == "rows.jsonl"


def test_a_model_that_another_program_keeps_hidden_is_a_model(
    services: Services, user: Path
) -> None:
    folder = write_model(user / ".lmstudio" / "models" / "tiny")
    assert len(find_model(str(folder), services.hashes).files) == 3


def test_what_leaves_this_pc_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the place where a link leads to, by `plan` in words and in JSON."""
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "all.jsonl").write_text(ROWS)
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "letters" / "all.jsonl")
    model = REPOSITORY / "resources" / "demo" / "model"
    run_file = write_run(tmp_path, "rows.jsonl", str(model))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes:\n  - {name: a, gpus: [RTX 3090]}\n")
    run(["plan", str(run_file), "--cluster", str(cluster)])
    said = capsys.readouterr()
    assert f"data.train: {tmp_path}/letters/all.jsonl" in said.out, said
    assert f"model: {model}" in said.out
    run(["plan", str(run_file), "--cluster", str(cluster), "--json"])
    sent = json.loads(capsys.readouterr().out)["sent"]
    assert [one["path"] for one in sent] == [f"{tmp_path}/letters/all.jsonl", str(model)]
