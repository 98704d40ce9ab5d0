"""A program that hangs is named and ended, slow work is not: on a clock of the test's own."""

from __future__ import annotations

import pytest

from agents.errors import ExpectedError
from agents.serve import program_watch
from agents.serve.program_watch import ProgramWatch
from agents.supervisor.process_signs import Usage


class Program:
    """A program that the kernel describes as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.state, self.threads, self.cpu_s, self.per_look_s = "S", "S", 0.0, 0.0
        self.told: list[str] = []
        self.watch = ProgramWatch("Making awq", self.told.append, lambda: self.now_s)
        monkeypatch.setattr(program_watch, "read_process_state", lambda pid: self.state)
        monkeypatch.setattr(program_watch, "read_usage", self._read)

    def _read(self, pid: int) -> Usage:
        self.cpu_s += self.per_look_s
        return Usage(cpu_s=self.cpu_s, states=frozenset(self.threads))

    def go_on(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.watch.look(5)
            self.now_s += 0.5


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


@pytest.mark.parametrize(
    ("state", "threads", "cause"),
    [
        ("T", "T", "The process was stopped (SIGSTOP)."),
        ("F", "D", "The process is frozen: its control group was paused."),
        ("S", "DS", "The process is stuck in the kernel: the disk or the GPU driver does not "
         "answer."),
        ("S", "S", "It neither computes nor reads or writes."),
    ],
)  # fmt: skip
def test_a_program_that_hangs_is_named_and_then_ended(
    program: Program, state: str, threads: str, cause: str
) -> None:
    program.per_look_s = 1.0
    program.go_on(100.0)
    program.state, program.threads, program.per_look_s = state, threads, 0.0
    program.go_on(15.0)
    (told,) = program.told
    assert told.startswith("Making awq has stood still for 1")
    assert told.endswith(f" s. {cause}")
    with pytest.raises(ExpectedError) as ended:
        program.go_on(60.0)
    assert ended.value.message.startswith("Making awq was ended, since it stood still for 6")
    assert ended.value.message.endswith(cause)


def test_a_program_that_continues_says_so_and_slow_work_is_no_hang(program: Program) -> None:
    program.go_on(20.0)
    program.per_look_s = 0.1
    program.go_on(500.0)
    assert [text.partition(" for ")[0] for text in program.told] == [
        "Making awq has stood still",
        "Making awq continues.",
    ]


def test_a_line_is_a_sign_of_work(program: Program) -> None:
    for _ in range(50):
        program.go_on(9.0)
        program.watch.note_line()
    assert not program.told
