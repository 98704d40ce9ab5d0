"""What the master makes of a node's answers during a repair, and of passwords that are none."""

from __future__ import annotations

import json

import pytest

from agents.contract.repair import Change, RepairPreview, StepPreview
from agents.contract.wire import to_wire
from app.errors import AdminRefused, AgentBug, BadAnswer, NodeUnreachable, UserError
from app.nodes.client import NodeClient
from app.nodes.link import Link
from app.nodes.transport.process import Process
from app.provisioning import changes
from app.provisioning.changes import MAX_PASSWORD_BYTES, apply_repair, undo_changes
from app.provisioning.system_repairs import synchronise_clock

REPAIR = synchronise_clock()
SHOWN = RepairPreview(steps=(StepPreview(state="needed", sha256="5" * 64),), admin="password")
CHANGE = Change(number=1, repair="time-sync", title="T", by="me", began_s=1.0, ended_s=2.0)


class PlayedNode(NodeClient):
    """A node whose `repair` command says `said` and takes down what it is told."""

    def __init__(self, said: bytes = b"", *, lost: bool = False) -> None:
        super().__init__("pc", self._no_link)
        self._said, self._lost = said, lost
        self.told = b""
        self.is_closed = False

    async def _no_link(self) -> Link:
        raise AssertionError("a repair has a channel of its own")

    async def open_command(self, *arguments: str) -> Process:
        assert arguments == ("repair",), "a password is in no argument"
        process = Process(lambda reason: NodeUnreachable(f"lost: {reason}"))
        process.attach(self)
        process.feed(self._said)
        process.feed_stderr(b"sh: out of memory\n")
        process.closed("the network is down" if self._lost else None)
        process._ended.clear()  # what is written before it ends is taken
        return process

    def write(self, data: bytes) -> None:
        self.told += data

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def line(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


async def test_the_work_goes_first_and_the_password_after_it() -> None:
    node = PlayedNode(b"Welcome!\n" + line(said="a\nb") + line(changes=[to_wire(CHANGE)]))
    heard: list[str] = []
    change = await apply_repair(
        node, REPAIR, SHOWN, by="anna@desk", password="pass w\u00f6rd", progress=heard.append
    )
    assert change == CHANGE
    assert heard == ["a b"]
    work, password, rest = node.told.split(b"\n")
    assert json.loads(work)["apply"]["expected"] == ["5" * 64]
    assert b"pass" not in work
    assert (password, rest) == ("pass w\u00f6rd".encode(), b"")
    assert node.is_closed


@pytest.mark.parametrize(
    ("said", "error", "says"),
    [
        (b"", UserError, "without a result: sh: out of memory"),
        (line(failed={"message": "The disk is full.", "hint": "Free"}), UserError, "disk is full"),
        (line(failed={"message": 5}), BadAnswer, "wrong form"),
        (line(changes=[{"number": -1}]), BadAnswer, "wrong form"),
        (line(bug="Traceback"), AgentBug, "error in Rackless"),
        (b"x" * 2000, BadAnswer, "sent a line of more than"),
    ],
)
async def test_what_a_node_may_say_instead(
    said: bytes, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_MAX_LINE_BYTES", 1000)
    with pytest.raises(error, match=says):
        await undo_changes(PlayedNode(said), (1,))


async def test_a_lost_connection_is_said() -> None:
    with pytest.raises(NodeUnreachable, match="the network is down"):
        await undo_changes(PlayedNode(lost=True))


@pytest.mark.parametrize(
    ("reason", "again", "hint"),
    [
        ("password", True, "Type it again"),
        ("sudo", False, "Ask an administrator of that PC to do this: sudo timedatectl"),
    ],
)
async def test_why_sudo_refuses_decides_what_to_do_next(
    reason: str, again: bool, hint: str
) -> None:
    node = PlayedNode(line(failed={"message": "No.", "reason": reason}))
    with pytest.raises(AdminRefused) as caught:
        await apply_repair(node, REPAIR, SHOWN, by="me", password="x")
    assert caught.value.again == again
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("password", ["two\nlines", "\u00e4" * MAX_PASSWORD_BYTES])
async def test_what_can_be_no_password_goes_nowhere(password: str) -> None:
    node = PlayedNode()
    with pytest.raises(UserError, match="one line"):
        await apply_repair(node, REPAIR, SHOWN, by="me", password=password)
    assert node.told == b""
