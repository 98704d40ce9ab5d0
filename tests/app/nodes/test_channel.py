"""Requests over a real pipe to a fake agent: each has exactly one outcome, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from agents.contract.messages import MAX_LINE_BYTES
from agents.contract.requests.connection import Ping
from app.errors import AgentBug, NodeUnreachable, UserError
from app.nodes.bootstrap import start_agent
from app.nodes.channel import MasterChannel
from app.nodes.client import decoded_size
from app.nodes.link import Link
from app.nodes.node import LocalAddress, Node
from app.nodes.transport.local import LocalConnection
from tests.fakes.agent import fake_archive
from tests.fakes.ssh import client_of


@contextlib.asynccontextmanager
async def link_to_fake(home: Path) -> AsyncIterator[Link]:
    connection = LocalConnection({"HOME": str(home), "PATH": os.environ["PATH"]})
    agent = await start_agent(connection, fake_archive(), "pc")

    async def again() -> LocalConnection:
        raise NodeUnreachable("not in this test")

    link = Link(
        Node(name="pc", address=LocalAddress()), connection, MasterChannel(agent, "pc"), again
    )
    try:
        yield link
    finally:
        await link.close()


def with_channel(home: Path, work: Callable[[MasterChannel], Awaitable[None]]) -> None:
    async def run() -> None:
        async with link_to_fake(home) as link, asyncio.timeout(30):
            await work(link.channel)

    asyncio.run(run())


def test_an_answer_is_the_result(tmp_path: Path) -> None:
    async def work(channel: MasterChannel) -> None:
        value = {"text": "a\u00e9\n\u2028b", "n": 1.5, "none": None, "big": "x" * 500_000}
        assert await channel.request("echo", value) == value
        answers = await asyncio.gather(*(channel.request("echo", {"n": n}) for n in range(500)))
        assert [answer["n"] for answer in answers] == list(range(500))

    with_channel(tmp_path, work)


def test_errors_keep_their_kind(tmp_path: Path) -> None:
    async def work(channel: MasterChannel) -> None:
        with pytest.raises(UserError, match="pc: it went wrong") as user:
            await channel.request("user")
        assert user.value.hint == "do this"
        for kind in ("bug", "bad_request"):
            with pytest.raises(AgentBug) as bug:
                await channel.request(kind)
            assert bug.value.traceback == "line 1"

    with_channel(tmp_path, work)


def test_a_second_answer_is_ignored(tmp_path: Path) -> None:
    async def work(channel: MasterChannel) -> None:
        assert await channel.request("twice") == {"n": 1}
        assert await channel.request("echo", {"still": "here"}) == {"still": "here"}

    with_channel(tmp_path, work)


def test_no_answer_in_time(tmp_path: Path) -> None:
    async def work(channel: MasterChannel) -> None:
        with pytest.raises(NodeUnreachable, match="pc did not answer 'hang' within 0 s"):
            await channel.request("hang", timeout_s=0.1)
        assert not channel.is_lost
        assert await channel.request("echo", {"n": 1}) == {"n": 1}

    with_channel(tmp_path, work)


def test_a_cancelled_request_disturbs_no_other(tmp_path: Path) -> None:
    async def work(channel: MasterChannel) -> None:
        task = asyncio.create_task(channel.request("events", {"count": 1000, "size": 100}))
        await asyncio.sleep(0)
        task.cancel()
        assert await channel.request("echo", {"n": 1}) == {"n": 1}
        assert not channel._pending
        assert not channel._callbacks

    with_channel(tmp_path, work)


def test_only_cancelled_long_work_is_cancelled_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(channel: MasterChannel) -> None:
        posted: list[tuple[str, dict[str, int]]] = []
        monkeypatch.setattr(channel, "post", lambda kind, args: posted.append((kind, args)))
        for timeout_s in (None, 30.0):
            task = asyncio.create_task(channel.request("events", {}, timeout_s=timeout_s))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert posted == [("cancel", {"request": 1})]

    with_channel(tmp_path, work)


def test_events_come_in_order_and_only_to_who_asked(tmp_path: Path) -> None:
    async def work(channel: MasterChannel) -> None:
        first: list[int] = []
        second: list[int] = []
        await asyncio.gather(
            channel.request("events", {"count": 300}, on_event=lambda _, d: first.append(d["n"])),
            channel.request("events", {"count": 200}, on_event=lambda _, d: second.append(d["n"])),
        )
        assert first == list(range(300))
        assert second == list(range(200))

    with_channel(tmp_path, work)


@pytest.mark.parametrize("kill", [True, False])
def test_when_the_agent_dies_everyone_who_waits_is_told(tmp_path: Path, kill: bool) -> None:
    async def work(channel: MasterChannel) -> None:
        waiting = [asyncio.create_task(channel.request("hang")) for _ in range(5)]
        await channel.request("ping")
        if kill:
            os.kill(channel.hello.pid, signal.SIGKILL)
        else:
            channel.post("die", {})
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, NodeUnreachable) for outcome in outcomes)
        assert channel.is_lost
        said = "the agent ended" if kill else "the fake agent gives up"
        assert said in (await channel.wait_lost()).message
        with pytest.raises(NodeUnreachable, match="was lost"):
            await channel.request("ping")

    with_channel(tmp_path, work)


def test_lines_that_are_no_messages_are_passed_over(tmp_path: Path, caplog) -> None:
    async def work(channel: MasterChannel) -> None:
        with caplog.at_level(logging.WARNING):
            assert await channel.request("garbage") == {}
        assert "this is no message" in caplog.text

    with_channel(tmp_path, work)


def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    async def work(channel: MasterChannel) -> None:
        with pytest.raises(NodeUnreachable, match=f"more than {MAX_LINE_BYTES} bytes"):
            await channel.request("endless")

    with_channel(tmp_path, work)


def test_a_callback_that_fails_loses_the_channel_and_is_logged(tmp_path: Path, caplog) -> None:
    def fail(kind: str, data: dict[str, object]) -> None:
        raise ZeroDivisionError(kind)

    async def work(channel: MasterChannel) -> None:
        with pytest.raises(NodeUnreachable, match="could not be handled"):
            await channel.request("events", {"count": 1}, on_event=fail)
        assert "ZeroDivisionError" in caplog.text

    with_channel(tmp_path, work)


async def test_closing_ends_the_agent_even_when_it_is_stopped(tmp_path: Path) -> None:
    async with link_to_fake(tmp_path) as link:
        os.kill(link.hello.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        await link.channel.close(grace_s=0.2)
    assert time.monotonic() - began_s < 4
    with pytest.raises(ProcessLookupError):
        os.kill(link.hello.pid, 0)


def test_many_small_events_pass_quickly(tmp_path: Path) -> None:
    """A flood of 40,000 lines; the bound is far above what it takes, yet far below a hang."""

    async def work(channel: MasterChannel) -> None:
        seen: list[int] = []
        began_s = time.monotonic()
        await channel.request("events", {"count": 40_000}, on_event=lambda _, d: seen.append(1))
        assert len(seen) == 40_000
        assert time.monotonic() - began_s < 15

    with_channel(tmp_path, work)


async def test_streams_are_followed_and_let_go(tmp_path: Path) -> None:
    async with link_to_fake(tmp_path) as link:
        stream = client_of(link).follow_streams("r", 1, {"rank-0.log": 0})
        offsets = [(await anext(stream)).offset for _ in range(3)]
        assert offsets == [0, 3, 6]
        await stream.aclose()
        assert not link.channel._callbacks


async def test_a_lost_link_ends_following(tmp_path: Path) -> None:
    async with link_to_fake(tmp_path) as link:
        stream = client_of(link).follow_streams("r", 1, {})
        for _ in range(3):
            await anext(stream)
        os.kill(link.hello.pid, signal.SIGKILL)
        with pytest.raises(NodeUnreachable):
            await asyncio.wait_for(anext(stream), 5)


def test_a_reader_who_falls_behind_asks_again_where_it_stopped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("app.nodes.client.MAX_BACKLOG_BYTES", 3)
    asked: list[dict[str, int]] = []

    async def run() -> None:
        async with link_to_fake(tmp_path) as link:
            follow = link.channel.follow

            async def note(kind, args, on_event, *, timeout_s):
                asked.append(dict(args["offsets"]))
                return await follow(kind, args, on_event, timeout_s=timeout_s)

            monkeypatch.setattr(link.channel, "follow", note)
            stream = client_of(link).follow_streams("r", 1, {"rank-0.log": 0})
            await anext(stream)
            await anext(stream)
            await stream.aclose()

    asyncio.run(run())
    assert asked[0] == {"rank-0.log": 0}
    assert asked[1] == {"rank-0.log": 3}


async def test_an_answer_in_a_wrong_form_is_a_bug_that_names_the_field(tmp_path: Path) -> None:
    async with link_to_fake(tmp_path) as link:
        link.channel.request = _answer_with({"wall_s": "late"})  # type: ignore[method-assign]
        with pytest.raises(AgentBug, match=r"pc answered ping in a wrong form: Clock\.wall_s"):
            await client_of(link).ask(Ping())


def _answer_with(result: dict[str, object]) -> Callable[..., Awaitable[dict[str, object]]]:
    async def answer(*_: object, **__: object) -> dict[str, object]:
        return result

    return answer


@pytest.mark.parametrize("size", range(8))
def test_the_size_of_base64_text(size: int) -> None:
    import base64

    assert decoded_size(base64.b64encode(b"x" * size).decode()) == size
