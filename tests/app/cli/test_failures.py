"""Errors of commands under `--json`, options on either side of a verb, and progress in a log."""

from __future__ import annotations

import argparse
import asyncio
import errno
import io
import itertools
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app import errors
from app.cli import chat, runs
from app.cli.kit import watching
from app.cli.kit.command import with_core
from app.cli.kit.output import Output
from app.cli.main import build_parser, run
from app.core.action import Report
from app.core.runs import WatchRun
from app.errors import RacklessError, UserError
from app.events import FoundRun, PhaseProgress, RunChanged, RunSnapshot
from tests.app.cli.test_main import PRODUCT_COMMANDS
from tests.fakes.core import FakeCore, make_node, make_run, running_run

KEYS = ["what", "where", "next", "code"]
DOCS = Path(__file__).parents[3] / "docs" / "automation.md"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def read_failure(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    printed = capsys.readouterr()
    assert printed.out == ""
    found: dict[str, str] = json.loads(printed.err)
    assert list(found) == KEYS
    assert all(isinstance(value, str) and value for value in found.values())
    return found


@pytest.mark.parametrize(
    ("line", "where", "code", "exit_code"),
    [
        ("runs show r-1 --json", "run r-1", "refused", 1),
        ("--json runs lsit", "rackless runs", "usage", 2),
        ("runs --json", "rackless runs", "usage", 2),
        ("nodes add pc --json", "rackless nodes add", "usage", 2),
        ("nodes show pc --json", "pc", "refused", 1),
        ("start absent.yaml --json", "absent.yaml", "usage", 2),
        ("start absent.yaml --watch --json", "absent.yaml", "usage", 2),
        ("monitor --json", "rackless monitor", "refused", 1),
        ("chat x --prompt a --top-p 9 --json", "rackless chat", "usage", 2),
        ("--json --nothing", "rackless", "usage", 2),
    ],
)
def test_an_error_under_json_is_one_document_with_what_where_next_and_code(
    line: str, where: str, code: str, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == exit_code
    found = read_failure(capsys)
    assert (found["where"], found["code"]) == (where, code)


@pytest.mark.parametrize("line", PRODUCT_COMMANDS)
@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
def test_any_end_of_any_command_under_json_is_one_document(
    line: str,
    fault: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise fault("bad\x1b[31m luck")

    for place in ("core.core.Core.open", "demo.Demo", "cli.gui.has_display"):
        monkeypatch.setattr(f"app.{place}", fail)
    is_interrupt = fault is KeyboardInterrupt
    assert run([*line.split(), "--json"]) == (130 if is_interrupt else 1)
    found = read_failure(capsys)
    assert found["code"] == ("interrupted" if is_interrupt else "fault")
    if not is_interrupt:
        assert fault.__name__ in found["what"]
        assert "in fail" in Path(found["where"]).read_text()


def test_a_warning_under_json_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # a command has none, but pytest has

    async def warn(*_: object) -> int:
        logging.getLogger("anything").warning("the disk is slow")
        raise UserError("no")

    args, out = argparse.Namespace(), Output(as_json=True)
    with pytest.raises(UserError):
        with_core(warn)(args, out)
    assert json.loads(capsys.readouterr().err) == {
        "what": "the disk is slow", "where": "rackless", "next": "", "code": "notice",
    }  # fmt: skip


def test_a_question_without_an_answer_is_told_under_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["Hello?", None])
    monkeypatch.setattr(chat, "_read_line", lambda out: next(lines))

    async def ask(*_: object) -> None:
        raise errors.NodeUnreachable("alpha is off", "Turn it on.", where="alpha")

    monkeypatch.setattr(chat, "_ask", ask)
    asyncio.run(chat._converse(FakeCore(), 1, argparse.Namespace(), Output(True)))  # type: ignore[arg-type]
    assert read_failure(capsys) == dict(
        zip(KEYS, ["alpha is off", "alpha", "Turn it on.", "node-unreachable"], strict=True)
    )


def kinds_of_errors() -> Iterator[type[RacklessError]]:
    waiting: list[type[RacklessError]] = [RacklessError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.startswith("app."):
            yield kind
        waiting += kind.__subclasses__()


def test_every_kind_of_error_has_a_code_that_the_documentation_explains() -> None:
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(), re.MULTILINE))
    assert {kind.code for kind in kinds_of_errors()} | {"notice"} == documented
    own = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = [kind.code for kind in own if issubclass(kind, RacklessError)]
    assert len(codes) == len(set(codes))


# ---------------------------------------------------------------- options


def parsers(
    parser: argparse.ArgumentParser, above: tuple[argparse.ArgumentParser, ...] = ()
) -> Iterator[tuple[argparse.ArgumentParser, tuple[argparse.ArgumentParser, ...]]]:
    yield parser, above
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child, (*above, parser))


def test_no_verb_overwrites_an_option_given_before_it() -> None:
    for parser, above in parsers(build_parser()):
        own = {action.dest: action for action in parser._actions}
        for noun in above:
            for action in noun._actions:
                shared = own.get(action.dest)
                if shared is not None and action.option_strings and action.dest != "help":
                    assert shared.default is argparse.SUPPRESS, (parser.prog, action.dest)


def test_artifacts_of_a_run_are_listed_wherever_the_run_is_named() -> None:
    for line in ("artifacts --run r-1 list", "artifacts list --run r-1", "artifacts --run r-1"):
        assert build_parser().parse_args(line.split()).run == "r-1", line


def test_an_option_that_a_verb_would_ignore_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["artifacts", "--run", "r-1", "show", "poems"]) == 2
    assert "rackless artifacts list --run r-1" in capsys.readouterr().err


# ---------------------------------------------------------------- progress


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_150_lines_of_progress_become_a_few_without_a_terminal() -> None:
    from app.cli.kit.output import SparseLines

    clock = Clock()
    lines = SparseLines(clock)
    printed = []
    for number in range(150):
        clock.now_s += 0.5
        text = f"sending the model to alpha: {number} / 150 MiB"
        if lines.allows(text):
            printed.append(text)
    assert 5 <= len(printed) <= 11
    assert printed[0] == "sending the model to alpha: 0 / 150 MiB"


def test_a_long_silence_and_every_new_phase_are_told_but_never_a_flood() -> None:
    from app.cli.kit.output import SparseLines

    clock = Clock()
    lines = SparseLines(clock)
    assert lines.allows("checking alpha and beta")
    assert lines.allows("launching on pc-1")
    assert lines.allows("launching on pc-2")
    assert not lines.allows("launching on pc-2")
    clock.now_s += 31
    assert lines.allows("launching on pc-2")
    flood = [
        lines.allows(f"Collecting package{letter * 3}") for letter in "abcdefghijklmnopqrstuvwx"
    ]
    assert sum(flood) < 12
    # An export begins more than a dozen unlike phases, of which a late one takes longest.
    unlike = [f"{letter * 5} the weights" for letter in "abcdefghijkl"]
    assert all(map(lines.allows, unlike))
    assert lines.allows("Building llama.cpp's quantizer; this happens once and takes some minutes")


def test_watching_a_run_without_a_terminal_prints_few_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    core = FakeCore(run_map={"r-1": make_run("r-1", "r", "running")})

    async def watch() -> None:
        with watching.Watching(core, Output(False), "r-1"):  # type: ignore[arg-type]
            starting = PhaseProgress(phase="compiling", expected_s=8.0)
            core.events.publish(RunChanged(run=make_run("r-1", "r", "running", starting=starting)))
            for step in range(150):
                shown = replace(make_run("r-1", "r", "running"), step=step, total_steps=150)
                core.events.publish(RunChanged(run=shown))

    asyncio.run(watch())
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "Compiling layers: about 8 s left"
    assert 1 <= len(others) <= 3


def test_a_terminal_counts_a_start_down(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_TICK_S", 0.01)
    times = itertools.chain([102.0], itertools.repeat(111.5))
    monkeypatch.setattr(watching, "time", SimpleNamespace(time=lambda: next(times)))
    core = FakeCore(run_map={"r-1": make_run("r-1", "r", "running")})
    out = Output(False)
    monkeypatch.setattr(Output, "is_terminal", True)

    async def watch_until_end(action: WatchRun, report: Report) -> RunSnapshot:
        # Reported once, and then no more.
        late = PhaseProgress(phase="compiling", expected_s=8.0, time_s=100.0)
        core.events.publish(RunChanged(run=make_run("r-1", "r", "running", starting=late)))
        await asyncio.sleep(0.3)
        return make_run("r-1", "r", "done")

    core.answers[WatchRun] = watch_until_end

    async def watch() -> None:
        with watching.Watching(core, out, "r-1") as shown:  # type: ignore[arg-type]
            assert await shown.until_end("r-1") == 0

    asyncio.run(watch())
    said = capsys.readouterr().out
    assert said.index("about 6 s left") < said.index("12 s so far, longer than the 8 s expected")


def test_output_that_cannot_be_written_is_no_fault_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert run(["runs", "list", "--json"]) == 1
    found = json.loads(capsys.readouterr().err)
    assert found["what"] == "the output cannot be written: No space left on device"
    assert found["code"] == "refused"


# ---------------------------------------------------------------- runs


def ask(core: FakeCore, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    args = build_parser().parse_args(line.split())
    verbs = {
        "logs": runs._logs,
        "stop": runs._stop,
        "found": runs._found,
        "adopt": runs._adopt,
        "take-over": runs._take_over,
        "ignore": runs._ignore,
    }
    assert asyncio.run(verbs[line.split()[1]](core, args, Output(False))) == 0  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_the_log_of_one_attempt_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = FakeCore(log_folder=tmp_path)
    core.run_map["r-1"] = replace(make_run("r-1", "r", "done"), attempt=2)
    core.old_logs_map["r-1", 1, 0, "gamma"] = b"an earlier line\n"
    assert ask(core, "runs logs r-1 --attempt 1", capsys) == "an earlier line\n"
    with pytest.raises(UserError, match="there is no log of attempt 7 of run r-1"):
        ask(core, "runs logs r-1 --attempt 7", capsys)
    with pytest.raises(UserError, match="only the newest attempt can be followed"):
        ask(core, "runs logs r-1 --attempt 1 --follow", capsys)


def test_a_run_that_this_home_does_not_know_is_stopped_on_its_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    core = FakeCore()
    assert ask(core, "runs stop r-9 --node alpha", capsys) == "r-9 is stopped on alpha\n"
    assert core.calls == [("runs.stop_on", "r-9", "alpha")]


def test_a_run_that_is_not_ours_is_adopted_after_a_yes_that_names_its_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("/home/me/diary.txt", "me/model")
    found = FoundRun(
        run_id="r-9",
        attempt=7,
        name="diary",
        node="beta",
        state="running",
        is_active=True,
        started_s=None,
        master=None,
        files=files,
    )
    core = FakeCore(found=(found,), run_map={"r-9": make_run("r-9", "diary", "running")})
    listed = ask(core, "runs found", capsys)
    assert "/home/me/diary.txt" in listed
    assert "runs stop" in listed
    core.found = (replace(found, state="done", is_active=False),)
    listed = ask(core, "runs found", capsys)
    assert "runs stop" not in listed
    assert "runs take-over" not in listed
    core.found = (found,)
    for command in ("adopt", "take-over"):
        with pytest.raises(UserError, match=r"/home/me/diary\.txt and me/model"):
            ask(core, f"runs {command} r-9", capsys)
    assert core.calls == [], "nothing happens without an answer"
    asked: list[str] = []
    monkeypatch.setattr(runs, "confirm", lambda question: bool(asked.append(question)) or True)
    ask(core, "runs take-over r-9", capsys)
    assert "/home/me/diary.txt" in asked[0]
    assert core.calls == [("runs.adopt", "r-9", "beta", files), ("runs.take_over", "r-9")]
    core.calls.clear()
    core.found = (found,)
    ask(core, "runs adopt r-9 --yes", capsys)
    core.found = (found,)
    ask(core, "runs ignore r-9", capsys)
    assert core.calls == [
        ("runs.adopt", "r-9", "beta", files), ("runs.ignore", "r-9", "beta")
    ]  # fmt: skip
    with pytest.raises(UserError, match="no node that answers has a run r-9"):
        ask(core, "runs adopt r-9 --yes", capsys)


def test_a_lost_nodes_rank_is_not_training_on_the_command_line_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    core = FakeCore(run_map={(run := running_run()).run_id: run})
    for name in ("alpha", "beta", "gamma"):
        lost = name == "beta"
        core.node_map[name] = replace(
            make_node(name),
            state="unreachable" if lost else "connecting",
            last_seen_s=time.time() - 12 if lost else None,
        )
    args = build_parser().parse_args(["runs", "show", run.run_id, "--json"])
    assert asyncio.run(runs._show(core, args, Output(True))) == 0  # type: ignore[arg-type]
    shown = json.loads(capsys.readouterr().out)
    assert [(rank["node"], rank["state"]) for rank in shown["ranks"]] == [
        ("alpha", "running"),
        ("beta", "unreachable"),
        ("beta", "unreachable"),
        ("gamma", "running"),
    ]
    assert shown["phase"] == "beta unreachable"
