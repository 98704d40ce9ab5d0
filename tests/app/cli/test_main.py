"""The command line: what is written wrongly, what is printed where, and how fast it answers."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.spec import RunSpec
from app.cli import nodes, preview, runs
from app.cli.kit.output import Output
from app.cli.kit.watching import Watching
from app.cli.main import build_parser, run
from app.core.action import Report
from app.core.library import ReadRunFile
from app.errors import UsageError, UserError
from app.events import RunChanged
from app.hub.node_tokens import NodeToken
from app.library.recipes import list_recipes
from app.presentation.data_text import spell_out
from app.runfile.run_file import parse_run
from tests.fakes.core import SPEC, FakeCore, make_run
from tests.fakes.plans import make_plan_of_mixture

ROOT = Path(__file__).resolve().parents[3]
PRODUCT_COMMANDS = [
    "gui",
    "demo",
    "demo --headless --nodes 4",
    "nodes add pc --ssh anna@10.0.0.2:2222 --key k --accept-host-key SHA256:x",
    "nodes add pc --local",
    "nodes add pc --wsl Ubuntu",
    "nodes list",
    "nodes show pc",
    "nodes remove pc",
    "nodes setup pc",
    "nodes prune pc",
    "nodes prune pc --yes",
    "nodes storage pc",
    "nodes storage pc --free cache models/a-1 --yes",
    "nodes token",
    "nodes token alpha beta --give",
    "nodes token alpha --take-back",
    "check",
    "check alpha beta",
    "monitor",
    "plan run.yaml",
    "plan run.yaml --upgrade --prices prices.csv",
    "plan --best --data chats.jsonl --by 07:00 --budget 3.50 --price-per-kwh 0.35",
    "plan run.yaml --cluster a.yaml --cluster b.yaml",
    "nodes export-cluster pcs.yaml",
    "preview run.yaml",
    "preview run.yaml --node alpha --quick",
    "start run.yaml",
    "start run.yaml --watch",
    "models find qwen 8b --limit 50 --no-fit",
    "models fetch org/name --node alpha --revision v1.0",
    "models list --node alpha --node beta",
    "data find",
    "data fetch org/name:part",
    "data list",
    "data show rows.jsonl --filter longest --search word",
    "recipes list",
    "recipes show NAME",
    "recipes save run.yaml --title TEXT",
    "recipes delete NAME",
    "settings list",
    "settings set KEY VALUE",
    "runs list",
    "runs show ID",
    "runs show ID --run-file run.yaml",
    "runs show ID --data",
    "runs logs ID --rank 2 --follow",
    "runs logs ID --attempt 1",
    "runs save ID",
    "runs trace ID --steps 5",
    "runs stop ID",
    "runs stop ID --node alpha",
    "runs resume ID --checkpoint 100 --nodes a,b",
    "runs resume ID --verify 12",
    "runs delete ID",
    "doctor",
    "doctor NODE --out r.zip --keep-names",
    "checkpoints",
    "checkpoints ID",
    "export ID --to merged --out DIR",
    "export ID --to gguf --type Q4_K_M --out DIR",
    "artifacts",
    "artifacts list --run ID",
    "artifacts show NAME",
    "artifacts add DIR --name NAME",
    "artifacts copy NAME --to alpha",
    "artifacts push NAME --to anna/poems --public",
    "artifacts check NAME",
    "artifacts serve-command NAME --with vllm",
    "artifacts delete NAME --copy alpha --yes",
    "chat ID --prompt hello",
    "chat ID --checkpoint 40 --top-p 0.9",
    "compare ID ./folder --base --prompts prompts.txt --out answers.md",
    "chat ./folder --prompt hello --system be-kind --type Q8_0 --node alpha",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("line", PRODUCT_COMMANDS)
@pytest.mark.parametrize("where", ["before", "after"])
def test_every_promised_command_is_read_with_json_in_both_places(line: str, where: str) -> None:
    words = line.split()
    args = build_parser().parse_args(
        ["--json", *words] if where == "before" else [*words, "--json"]
    )
    assert args.json is True
    assert callable(args.handler)


@pytest.mark.parametrize("line", PRODUCT_COMMANDS)
def test_every_command_has_help(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in line.split() if not word.startswith("-")][:2]
    verbs = words[:2] if words[0] in ("nodes", "runs", "artifacts") else words[:1]
    assert run([*verbs, "--help"]) == 0
    assert f"usage: rackless {' '.join(verbs)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nods list", "unknown command or choice 'nods'; did you mean nodes?"),
        ("runs lsit", "unknown command or choice 'lsit'; did you mean list?"),
        ("runs", "VERB"),
        ("nodes add pc", "one of the arguments --ssh --local --from --wsl is required"),
        ("nodes add pc --local --wsl x", "not allowed with argument"),
        ("nodes add pc --ssh anna@", "names no PC to log in to"),
        ("nodes add --ssh anna@pc", "nodes add needs a NAME"),
        ("nodes add pc --from list", "takes no NAME with --from"),
        ("nodes add --from absent.txt", "the list absent.txt cannot be read"),
        ("nodes add all --local", "the name 'all' is reserved"),
        ("start", "the following arguments are required: RUN.yaml"),
        ("start a.yaml --wach", "unrecognized arguments: --wach"),
        ("runs logs x --rank one", "invalid int value: 'one'"),
        ("runs resume x --nodes ,", "name at least one node"),
        ("demo --nodes 1", "'1' is not a number from 2 to 8"),
        ("demo --nodes nine", "'nine' is not a number from 2 to 8"),
        ("export x --to zip --out d", "unknown command or choice 'zip'"),
        ("compare x --max-tokens 0", "--max-tokens is at least 1"),
        ("chat x --prompt a --temperature nan", "--temperature a number from 0 up"),
        ("chat x --prompt a --temperature inf", "--temperature a number from 0 up"),
        ("chat x --prompt a\udcff", "--prompt is not text in UTF-8"),
        ("chat x --prompt a --system a\udcff", "--system is not text in UTF-8"),
        ("start absent.yaml", "the run file absent.yaml cannot be read"),
        ("plan absent.yaml", "the run file absent.yaml cannot be read"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert "what to do:" in printed.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chat ID --prompt hello", "there is no run ID"),
        ("compare ID", "there is no run ID"),
        ("chat ./nothing --prompt hello", "is no artifact"),
        ("runs show ID", "there is no run ID"),
        ("runs save ID", "there is no run ID"),
        ("runs trace ID", "there is no run ID"),
        ("runs stop ID", "there is no run ID"),
        ("runs resume ID", "there is no run ID"),
        ("runs delete ID", "there is no run ID"),
        ("runs logs ID", "there is no run ID"),
        ("export ID --to merged --out d", "there is no run ID"),
        ("artifacts --run ID", "there is no run ID"),
        ("artifacts show NAME", "there is no artifact NAME"),
        ("artifacts copy NAME --to x", "there is no artifact NAME"),
        ("artifacts check NAME", "there is no artifact NAME"),
        ("artifacts push NAME --to a/b", "there is no artifact NAME"),
        ("artifacts serve-command NAME", "there is no artifact NAME"),
        ("artifacts delete NAME", "there is no artifact NAME"),
        ("artifacts add DIR", "is no artifact"),
        ("nodes show pc", "There is no node called 'pc'"),
        ("nodes remove pc", "There is no node called 'pc'"),
        ("nodes setup pc", "There is no node called 'pc'"),
        ("check pc", "There is no node called 'pc'"),
        ("monitor", "there are no nodes yet"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_cannot_be_done_exits_with_1_and_an_empty_stdout(
    line: str, message: str, form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*line.split(), *form]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert "Traceback" not in printed.err


def test_plan_reads_the_run_file_before_it_asks_for_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: org/m\ndata: {trian: x}\n")
    assert run(["plan", str(path)]) == 2
    assert "did you mean data.train?" in capsys.readouterr().err
    path.write_text("model: org/m\ndata: {train: org/x}\n")
    assert run(["plan", str(path)]) == 1
    assert "there are no nodes yet" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["nodes list", "runs list", "checkpoints", "check"])
def test_empty_lists_are_empty_documents(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run(command.split()) == 0
    assert capsys.readouterr().out.startswith(("There are no", "No "))


def test_window_without_a_display_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    for line in ([], ["gui"]):
        assert run(line) == 1
        assert "no display" in capsys.readouterr().err


def test_newer_store_is_refused_in_words(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "list"]) == 0
    import sqlite3

    connection = sqlite3.connect(home / "rackless.sqlite3")
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    capsys.readouterr()
    assert run(["runs", "list", "--json"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, "newer Rackless" in printed.err) == ("", True)


def test_damaged_store_is_told_and_the_command_goes_on(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    (home / "rackless.sqlite3").write_bytes(b"not a database" * 400)
    assert run(["runs", "list", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == []
    assert "was damaged" in printed.err


def test_a_bug_of_ours_is_told_with_its_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("app.core.core.open_database", break_down)
    assert run(["runs", "list", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "internal error: ZeroDivisionError" in printed.err
    assert "Traceback" in Path(json.loads(printed.err)["where"]).read_text()
    assert run(["runs", "list"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_output_keeps_json_and_human_form_apart() -> None:
    for as_json, expected in ((True, '{\n "a": null\n}\n'), (False, "text\nA   B\nxx\n")):
        stream, notes = io.StringIO(), io.StringIO()
        out = Output(as_json, stream, notes)
        out.document({"a": float("inf")})
        out.text("text")
        out.table(["A", "B"], [["xx", ""]])
        out.note("a note")
        assert stream.getvalue() == expected
        assert notes.getvalue() == ("" if as_json else "a note\n")


def test_terminal_without_unicode_does_not_break_a_table() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Output(False, stream).text("\u2013 12 \u00b0C")
    stream.seek(0)
    assert stream.read() == "? 12 ?C\n"


def loaded(code: str) -> set[str]:
    """Return the modules that a fresh Python has after running `code`."""
    told = f"{code}\nimport sys\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stderr.splitlines()[-1].split())


def test_a_recipe_that_is_shown_is_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "list", "--json"]) == 0
    names = [recipe["name"] for recipe in json.loads(capsys.readouterr().out)]
    assert run(["recipes", "show", names[0]]) == 0
    assert parse_run(capsys.readouterr().out) == list_recipes()[0].spec
    assert run(["recipes", "show", "nothing"]) == 2


def test_settings_are_kept_as_a_recipe_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = tmp_path / "run.yaml"
    shown.write_text(list_recipes()[0].text)
    assert run(["recipes", "save", str(shown), "--title", "Evening runs"]) == 0
    assert run(["recipes", "save", str(shown), "--title", "evening Runs"]) == 2
    capsys.readouterr()
    assert run(["recipes", "list", "--json"]) == 0
    *_, own = json.loads(capsys.readouterr().out)
    assert (own["name"], own["title"], own["is_own"]) == ("evening-runs", "Evening runs", True)
    assert run(["recipes", "delete", list_recipes()[0].name]) == 2
    assert run(["recipes", "delete", "evening-runs"]) == 0
    assert run(["recipes", "show", "evening-runs"]) == 2


def test_the_run_file_of_a_run_can_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    core = FakeCore(run_map={"r-1": make_run("r-1", "r", "done")})
    args = build_parser().parse_args(["runs", "show", "r-1", "--run-file", "again.yaml"])
    assert asyncio.run(runs._show(core, args, Output(False))) == 0  # type: ignore[arg-type]
    assert core.calls == [("library.write_run_file", core.run_map["r-1"].spec, Path("again.yaml"))]


def test_a_key_is_taken_back_only_after_a_yes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, asked = FakeCore(), list[str]()

    def ask(*words: str, as_json: bool = False) -> tuple[int, str]:
        args = build_parser().parse_args(["nodes", "key", "alpha", "--take-back", *words])
        code = asyncio.run(nodes._key(core, args, Output(as_json)))  # type: ignore[arg-type]
        return code, capsys.readouterr().out

    assert ask()[0] == 1  # there is no terminal to ask at
    with pytest.raises(UsageError, match="with --json needs --yes"):
        ask(as_json=True)
    assert core.calls == []
    monkeypatch.setattr(nodes, "confirm", lambda question: asked.append(question) or True)
    assert "is removed" in ask()[1]
    assert "Without another key, alpha can no longer be reached." in asked[0]
    assert json.loads(ask("--yes", as_json=True)[1]) == {"node": "alpha", "removed": True}
    assert core.calls == [("nodes.take_back_key", "alpha")] * 2


def test_the_hubs_token_is_given_to_nodes_and_taken_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    core = FakeCore()
    core.node_token_map["alpha"] = NodeToken(node="alpha", place="none")

    def ask(*words: str) -> tuple[int, str]:
        args = build_parser().parse_args(["nodes", "token", *words])
        code = asyncio.run(nodes._token(core, args, Output(False)))  # type: ignore[arg-type]
        return code, capsys.readouterr().out.strip()

    assert ask() == (0, "Not on alpha.")
    assert ask("alpha", "--give") == (0, "On alpha.")
    assert ask("--take-back") == (0, "Not on alpha.")
    assert [call[0] for call in core.calls] == ["hub.send_token", "hub.remove_token"]
    away = NodeToken(node="beta", place="unknown", problem="beta cannot be reached: it is off")
    core.node_token_map["beta"] = away
    assert ask() == (1, "Not on alpha. beta cannot be asked.")


def test_what_nothing_needs_is_deleted_from_a_node_after_asking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FakeCore()

    def ask(*words: str, as_json: bool = False) -> str:
        args = build_parser().parse_args(["nodes", "prune", "alpha", *words])
        core.calls.clear()
        assert asyncio.run(nodes._prune(core, args, Output(as_json))) == 0  # type: ignore[arg-type]
        return capsys.readouterr().out

    deleted = ("nodes.prune", "alpha", "wheels-2")
    monkeypatch.setattr(nodes, "confirm", lambda question: "1 of 2 on alpha, 3.0 GiB" in question)
    said = ask()
    assert deleted in core.calls
    assert "environment-1  6.0 GiB  training" in said
    assert "3.0 GiB are free again on alpha" in said
    monkeypatch.setattr(nodes, "confirm", lambda question: False)
    ask()
    assert deleted not in core.calls
    assert json.loads(ask(as_json=True))["freed_bytes"] == 0
    assert deleted not in core.calls
    assert json.loads(ask("--yes", as_json=True))["freed_bytes"] == 3 << 30


def test_help_and_lists_load_little() -> None:
    """Beside what any program with a loop and a database loads: that is the time they take."""
    bare = loaded("import argparse, asyncio, json, sqlite3")
    start = "from app.cli.main import run\nassert run({}) == 0"
    shown, listed = (loaded(start.format(words)) for words in (["--help"], ["runs", "list"]))
    assert len(shown) < 1.5 * len(bare)
    assert len(listed) < 2.2 * len(bare)
    own = {"app", "agents", "platformdirs"}
    foreign = {name.split(".")[0] for name in listed - bare} - sys.stdlib_module_names - own
    assert foreign == set(), "a list needs neither SSH nor pydantic"


def test_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        f"{sys.executable} -m app --help | head -c 1",
        shell=True,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    _, errors = process.communicate(timeout=30)
    assert errors == b""


def test_usage_error_is_raised_not_printed() -> None:
    with pytest.raises(UsageError):
        build_parser().parse_args(["runs", "nothing"])


def test_a_preview_shows_figures_samples_and_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = FakeCore()
    core.plan_answer = make_plan_of_mixture()
    args = build_parser().parse_args(["preview", str(tmp_path / "again.yaml"), "--quick"])
    both = replace(SPEC, data=replace(SPEC.data, eval="held-out.jsonl"))

    async def read_run_file(action: ReadRunFile, report: Report) -> RunSpec:
        return both

    core.answers[ReadRunFile] = read_run_file
    assert asyncio.run(preview._preview(core, args, Output(False))) == 0  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "left out      row 2: not valid JSON" in told
    assert "--- row 1: 5 tokens, 2 of them learned\nHi\n[[Ho]]" in told
    assert told.index("evaluation: held-out.jsonl") > told.index("[[Ho]]")
    assert "Left as it is\n  Experts (128 in each of 48 layers) get no adapter" in told
    assert "Check first\n  beta: layers are not compiled, since no C compiler" in told
    asked = [call[2:] for call in core.calls if call[0] == "library.preview"]
    assert asked == [(None, False, "train"), (None, False, "eval")]
    asyncio.run(preview._preview(core, args, Output(True)))  # type: ignore[arg-type]
    document = json.loads(capsys.readouterr().out)
    assert document["evaluation"]["format"] == document["format"] == "alpaca"
    assert document["parts"][0]["names"] == ["experts"]
    core.plan_answer = UserError("the sizes of m are not known here", "")
    asyncio.run(preview._preview(core, args, Output(False)))  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "Left as it is\n  Not known: the sizes of m are not known here" in told


def test_text_of_a_terminal_is_spelled_out() -> None:
    assert spell_out("a\x1b[31m\u202eb\tc\n") == "a\\x1b[31m\\u202eb\tc\n"


def test_settings_are_listed_and_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["settings", "set", "notify_hot", "off"]) == 0
    assert run(["settings", "set", "lost_after_s", "30"]) == 0
    capsys.readouterr()
    assert run(["settings", "list", "--json"]) == 0
    values = {row["key"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert values["notify_hot"] is False
    assert values["lost_after_s"] == 30.0
    assert run(["settings", "set", "theme", "pink"]) == 1
    assert "one of system" in capsys.readouterr().err
    assert run(["settings", "set", "colour", "pink"]) == 2
    assert run(["settings", "set", "when_hot", "wait", "--node", "nobody"]) == 1
    assert "nobody" in capsys.readouterr().err
    for key, value in (("notify_hot", "on"), ("lost_after_s", "15")):
        assert run(["settings", "set", key, value]) == 0


def test_the_bar_of_a_run_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    screen = Terminal()
    snapshot = replace(make_run("r-1", "r", "running"), step=3, total_steps=1200, loss=2.5)
    core = FakeCore(run_map={"r-1": snapshot})

    async def watch() -> None:
        with Watching(core, Output(False, screen), "r-1"):  # type: ignore[arg-type]
            core.events.publish(RunChanged(run=snapshot))

    asyncio.run(watch())
    shown = [piece for piece in screen.getvalue().split("\r\x1b[K") if piece]
    assert [(len(piece), piece[:14]) for piece in shown] == [(29, "step 3 of 1200")]


def test_watching_that_nobody_reads_is_broken_off_and_fails_no_watcher() -> None:
    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    snapshot = replace(make_run("r-1", "r", "running"), step=3, total_steps=1200, loss=2.5)
    core = FakeCore(run_map={"r-1": snapshot})

    async def publish() -> None:
        core.events.publish(RunChanged(run=snapshot))

    async def watch() -> None:
        with Watching(core, Output(False, Unread()), "r-1"):  # type: ignore[arg-type]
            await asyncio.create_task(publish())
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch())
