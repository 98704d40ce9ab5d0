"""Spread files over nodes: each node forwards what it receives to the next one.

The first node of the chain gets the chunks from this PC (feed.py), or from the node that has the
files; all others fetch from the node before them, over direct connections. If a node is lost, its
successor fetches from its predecessor. A node that no other node can serve gets its chunks from
this PC, which costs time and is noted. Files arrive in the nodes' stores; `transfer.push` then
names them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agents.contract.chunks import ChunkedFile, from_bitmap, list_chunks
from agents.contract.spread import (
    ChunkHeader,
    FetchFrom,
    SourceLost,
    SpreadJob,
    SpreadProgress,
    SpreadReady,
)
from app.errors import NodeUnreachable, RacklessError
from app.events import NodeTransfer
from app.nodes.client import NodeClient
from app.nodes.credential import make_credential
from app.nodes.files.chunk_readers import (
    ChunkReader,
    LocalChunks,
    NodeChunks,
    Place,
)
from app.nodes.files.feed import feed
from app.nodes.files.local_files import in_thread
from app.nodes.files.member import Member
from app.nodes.files.route import LAG_BYTES, Link, choose_toward, next_supplier, plan_order
from app.nodes.files.spread_state import Giver, OnSpread, SpreadReport, TargetState
from app.text import show_list

SILENCE_S = 15.0
"""Time without a line after which a node counts as lost, in seconds; it sends four per second."""
MAX_RETURNS = 2
"""Maximum number of times that a node returns to a supplier that it passed."""
CHECK_S = 0.5
"""Time between two checks for silent and slow nodes, in seconds."""


async def spread_local(
    places: Sequence[Place],
    files: Sequence[ChunkedFile],
    targets: Sequence[NodeClient],
    rates: Mapping[Link, float],
    progress: OnSpread | None = None,
) -> SpreadReport:
    """Bring files of this PC into the stores of nodes.

    Args:
        places: positions of the files.
        files: their content, in the same order, without duplicates.
        targets: nodes to bring them to.
        rates: measured rates of links between nodes, in bytes/s.
        progress: gets the state of each node, a few times a second.

    Raises:
        UserError: a file cannot be read or has changed.
    """
    run = _Spread(targets, rates, progress)
    run.chunks = LocalChunks(places, files)
    return await run.run(tuple(files), None)


async def spread_from(
    giver: Giver,
    targets: Sequence[NodeClient],
    rates: Mapping[Link, float],
    progress: OnSpread | None = None,
) -> SpreadReport:
    """Bring files of one node into the stores of others; see `spread_local`.

    Raises:
        UserError: the node cannot read them.
        NodeUnreachable: it was lost.
    """
    return await _Spread(targets, rates, progress).run((), giver)


class _Spread:
    """One transfer."""

    def __init__(
        self,
        targets: Sequence[NodeClient],
        rates: Mapping[Link, float],
        progress: OnSpread | None,
    ) -> None:
        self.chunks: ChunkReader | None = None
        self._targets = targets
        self._rates = rates
        self._progress = progress
        self._report = SpreadReport()
        self._states: dict[str, TargetState] = {}
        self._chain: list[str] = []
        self._lost: set[Link] = set()
        # Links that a node left since its supplier was busy or slow, once for each time.
        self._passed: list[Link] = []
        # Initial lead of a supplier over its successor.
        self._leads: dict[Link, int] = {}
        self._failed: RacklessError | None = None
        self._ended = asyncio.Event()
        self._giver: Member | None = None
        self._credential = ""

    async def run(self, files: tuple[ChunkedFile, ...], giver: Giver | None) -> SpreadReport:
        async with contextlib.AsyncExitStack() as stack:
            clients = [*self._targets, *([giver.client] if giver else [])]
            members = await self._open_all(clients, stack)
            if len(clients) > 1 or any(member.peer for member in members.values()):
                self._credential = await in_thread(make_credential)
            if giver is not None:
                files = await self._start_giver(giver, members)
                await self._skip_complete(giver)
            self._report.files = files
            began_s = time.monotonic()
            await asyncio.gather(
                *(
                    self._start(members[client.name], members, files)
                    for client in self._targets
                    if client.name in members
                )
            )
            await self._work(began_s)
        if self._failed is not None:
            raise self._failed
        return self._report

    # ------------------------------------------------------------ start

    async def _open_all(
        self, clients: Sequence[NodeClient], stack: contextlib.AsyncExitStack
    ) -> dict[str, Member]:
        found = await asyncio.gather(
            *(Member.open(client) for client in clients), return_exceptions=True
        )
        members = {}
        for client, member in zip(clients, found, strict=True):
            if isinstance(member, Member):
                members[client.name] = member
                stack.push_async_callback(member.close)
            elif isinstance(member, RacklessError):
                self._report.problems[client.name] = member
        for problem in found:
            if isinstance(problem, BaseException) and not isinstance(problem, RacklessError):
                raise problem
        return members

    async def _start_giver(
        self, giver: Giver, members: Mapping[str, Member]
    ) -> tuple[ChunkedFile, ...]:
        name = giver.client.name
        if name not in members:
            raise self._report.problems.pop(name)
        self._giver = members[name]
        ready = await self._begin(
            self._giver,
            members,
            SpreadJob(root=giver.root, credential=self._credential),
        )
        self.chunks = NodeChunks(self._giver)
        if ready.port:
            self._chain.append(name)
        self._report.entries = ready.entries
        return ready.files

    async def _skip_complete(self, giver: Giver) -> None:
        answers = await asyncio.gather(
            *(giver.lacks(client, self._report.entries) for client in self._targets),
            return_exceptions=True,
        )
        for client, answer in zip(self._targets, answers, strict=True):
            if isinstance(answer, RacklessError):
                self._report.problems.setdefault(client.name, answer)
            elif isinstance(answer, BaseException):
                raise answer
        self._targets = [
            client for client, lacks in zip(self._targets, answers, strict=True) if lacks is True
        ]

    async def _begin(
        self, member: Member, members: Mapping[str, Member], job: SpreadJob
    ) -> SpreadReady:
        others = [other.address for other in members.values() if other is not member]
        toward = choose_toward(member.address, others) if job.credential else ""
        await member.say(replace(job, toward=toward))
        ready = await member.expect(SpreadReady)
        member.address, member.port = ready.address, ready.port
        return ready

    async def _start(
        self,
        member: Member,
        members: Mapping[str, Member],
        files: tuple[ChunkedFile, ...],
    ) -> None:
        try:
            ready = await self._begin(
                member, members, SpreadJob(files=files, credential=self._credential)
            )
            sizes = [chunk.size_bytes for chunk in list_chunks(files)]
            held = sum(sizes[n] for n in from_bitmap(ready.held))
            self._states[member.name] = TargetState(member=member, held=ready.held, held_bytes=held)
        except (ValueError, IndexError) as error:
            self._report.problems[member.name] = member.broken(f"it lists odd chunks ({error})")
        except RacklessError as error:
            self._report.problems[member.name] = error

    # ------------------------------------------------------------ work

    async def _work(self, began_s: float) -> None:
        held = {name: state.held_bytes for name, state in self._states.items()}
        # In the order of the request: the order of readiness differs each time.
        names = [client.name for client in self._targets if client.name in self._states]
        self._chain += plan_order(names, held, self._rates)
        hearing = [
            asyncio.create_task(self._hear(state, began_s)) for state in self._states.values()
        ]
        if self._giver is not None:
            hearing.append(asyncio.create_task(self._hear_giver(self._giver)))
        hearing.append(asyncio.create_task(self._watch()))
        try:
            for name in names:
                await self._supply(name)
            self._settle()
            await self._ended.wait()
        finally:
            tasks = [*hearing, *(s.feeding for s in self._states.values() if s.feeding)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _supply(self, name: str) -> None:
        """Give a node its next supplier: another node, or this PC."""
        state = self._states[name]
        supplier = next_supplier(name, self._chain, self._lost, self._gone())
        state.supplier = supplier
        if supplier is None:
            if state.feeding is None:
                state.feeding = asyncio.create_task(self._feed(state))
            return
        source = self._giver if supplier not in self._states else self._states[supplier].member
        assert source is not None
        with contextlib.suppress(OSError, RacklessError):  # `_hear` raises the reason
            await state.member.say(FetchFrom(address=source.address, port=source.port))

    def _gone(self) -> set[str]:
        silent = {name for name, state in self._states.items() if not state.member.port}
        return silent | self._report.problems.keys()

    async def _feed(self, state: TargetState) -> None:
        """Send a node the chunks that it lacks from this PC."""
        assert self.chunks is not None
        try:
            await feed(state, self.chunks, self._report.files, self._credential)
        except NodeUnreachable as error:
            await self._drop(state.member.name, error)
        except RacklessError as error:
            # The source cannot be read, so no node can get it.
            self._fail(error)
        except OSError:
            return  # its command has ended, and `_hear` raises the reason

    async def _hear(self, state: TargetState, began_s: float) -> None:
        name = state.member.name
        try:
            while True:
                message, _ = await state.member.hear()
                if isinstance(message, SpreadProgress):
                    self._note_progress(state, message, began_s)
                elif isinstance(message, SourceLost) and self._is_current(state, message):
                    state.held = message.held
                    if state.supplier is None:
                        await state.end_feeding()
                    self._note_lost(name, message)
                    await self._supply(name)
        except RacklessError as error:
            await self._drop(name, error)

    async def _hear_giver(self, giver: Member) -> None:
        assert isinstance(self.chunks, NodeChunks)
        try:
            while True:
                message, data = await giver.hear()
                if isinstance(message, ChunkHeader):
                    self.chunks.arrived(message.chunk, data)
        except RacklessError as error:
            self.chunks.fail(error)
            self._fail(error)

    def _note_progress(self, state: TargetState, said: SpreadProgress, began_s: float) -> None:
        now_s = time.monotonic()
        name = state.member.name
        state.note(said.held_bytes, now_s)
        self._report.received_bytes[name] = said.received_bytes
        if said.stored and not state.stored:
            state.stored = True
            self._report.seconds[name] = now_s - began_s
            self._settle()
        if self._progress is not None:
            total = sum(file.size_bytes for file in self._report.files)
            self._progress(
                [
                    NodeTransfer(
                        node=one,
                        held_bytes=min(each.held_bytes, total),
                        total_bytes=total,
                        bytes_per_s=each.rate(),
                    )
                    for one, each in self._states.items()
                ]
            )

    def _is_current(self, state: TargetState, said: SourceLost) -> bool:
        """Return True if the message is about the node's current supplier, not an earlier one."""
        if state.supplier is None:
            return state.is_direct and not said.address
        fetching = self._states.get(state.supplier or "")
        member = fetching.member if fetching is not None else self._giver
        return member is not None and (member.address, member.port) == (said.address, said.port)

    def _note_lost(self, name: str, said: SourceLost) -> None:
        supplier = self._states[name].supplier
        if supplier is None:
            return
        self._lost.add((name, supplier))
        if said.had_begun:
            self._passed.append((name, supplier))
        if next_supplier(name, self._chain, self._lost, self._gone()) is None:
            self._report.notes.append(
                f"{name} gets the files from this PC, since it could not fetch them from "
                f"{show_list(sorted(s for n, s in self._lost if n == name))}: {said.reason}. "
                "A firewall that lets nodes reach each other makes transfers faster: rackless check"
            )

    async def _watch(self) -> None:
        """Drop silent nodes, and let others pass the slow ones."""
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            for name, state in self._states.items():
                if self._is_silent(name, state, now_s):
                    await self._drop(
                        name,
                        NodeUnreachable(
                            f"{name} has not answered for {SILENCE_S:.0f} s during a transfer",
                            "Check that PC and its cable, then start again",
                        ),
                    )
            await self._pass_slow()
            await self._return()

    def _is_silent(self, name: str, state: TargetState, now_s: float) -> bool:
        is_over = state.stored or name in self._report.problems
        return not is_over and now_s - state.member.heard_s > SILENCE_S

    async def _pass_slow(self) -> None:
        """Let the successor of a slow node fetch from that node's supplier."""
        for name, state in self._states.items():
            slow = self._states.get(state.supplier or "")
            before = self._states.get(slow.supplier or "") if slow is not None else None
            if slow is None or before is None or state.stored:
                continue
            lead = before.held_bytes - slow.held_bytes
            link = (slow.member.name, before.member.name)
            if lead - self._leads.setdefault(link, lead) > LAG_BYTES:
                self._lost.add((name, slow.member.name))
                self._passed.append((name, slow.member.name))
                del self._leads[link]
                await self._supply(name)

    async def _return(self) -> None:
        """Let nodes fetch again from suppliers that they passed and that have caught up."""
        # Otherwise both would share the bandwidth of one supplier to the end.
        for link in self._passed:
            name, passed = link
            state, other = self._states[name], self._states.get(passed)
            if other is None or passed in self._report.problems or link not in self._lost:
                continue
            is_ahead = other.held_bytes >= state.held_bytes and other.supplier == state.supplier
            is_fed = state.feeding is not None or state.stored
            if is_ahead and not is_fed and self._passed.count(link) <= MAX_RETURNS:
                self._lost.discard(link)
                await self._supply(name)

    async def _drop(self, name: str, error: RacklessError) -> None:
        """Continue without a node: its successors fetch from another one."""
        if not self._states[name].stored:
            self._report.problems.setdefault(name, error)
        self._settle()
        for other, state in self._states.items():
            if state.supplier == name and not state.stored and other not in self._report.problems:
                self._lost.add((other, name))
                await self._supply(other)

    def _fail(self, error: RacklessError) -> None:
        self._failed = self._failed or error
        self._ended.set()

    def _settle(self) -> None:
        """End the transfer once each node has all files or is lost."""
        if all(
            state.stored or name in self._report.problems for name, state in self._states.items()
        ):
            self._ended.set()
