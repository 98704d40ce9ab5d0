"""A hostile node in this process: it answers every request and stream with lies of a valid shape.

The lies come from the fields of the contract's own classes, so a new request or event joins by
itself. A seed decides all of them. The zoo performs the core's real actions against the node, and
watches that nothing outside the home changes, no program starts and every error is a declared one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import sqlite3
import subprocess
import time
import traceback
import types
import typing
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from agents.contract.messages import PROTOCOL_VERSION, to_wire
from agents.contract.node import Sample
from agents.contract.requests import ROOMS, NodeRequest, find_request
from agents.contract.requests.streams import ReadStream
from agents.contract.run import StreamChunk
from agents.contract.wire import WireError
from app.artifacts.exports.request import ExportRequest
from app.core.action import Action, list_actions
from app.core.core import Core
from app.core.library import ReadRunFile
from app.errors import NodeUnreachable, RacklessError
from app.nodes import bootstrap, link
from app.nodes.files import member, remote_files
from app.nodes.transport.process import Process
from app.provisioning import changes
from app.runs.lifecycle import confirmation, control_requests, stop
from tests.fakes.cluster import ENVIRONMENT, make_facts
from tests.hostile.planted import write_run_file
from tests.hostile.targets.messages import contract_types

RECORDED = Path(__file__).parents[1] / "recorded" / "master"
NODE = "alpha"
OTHER = "beta"
NODES = (NODE, OTHER, "gamma")
RUN = "20261124-172351-3y4"
MOST_S = 10.0
"""Time in which every action has to end, in seconds."""
SILENCE_S = 0.2
"""Deadline of a request in the zoo, in seconds: that of the product would only take longer."""
TAME_WORDS = ("a", NODE, OTHER, "cpu", "cuda:0", RUN, "rank-0.log", "rank-0.jsonl", "0" * 64)
WORDS = (
    *("", "a", NODE, OTHER, "cpu", "cuda:0", RUN, "r-2", "rank-0.log", "rank-0.jsonl"),
    *("supervisor.jsonl", "../../victim", "VICTIM/letter.txt", "/etc/passwd", ".", "..", "a/../b"),
    *("~/.ssh/id", "C:\\x", "\\\\host\\share", "\x1b[2J\x07", "a\nb", "\x00", "\u202egnp.exe"),
    *("<img src='file:///dev/zero'>", "$(touch VICTIM/pwned)", "`id`", "%n%s", "x" * 3000),
    *("0" * 64, "9" * 400, "YWJj", "====", "\u0663", "-rf", "--help", "done", "running"),
)
NUMBERS = (0, 1, -1, 2, 7, 40, 2**31, 2**63, -(2**63), 10**30)
REALS = (0.0, 1.0, -1.0, 1.7e9, 1e300, -1e300, 5e-324)
NO_JSON = (math.nan, math.inf, -math.inf, "\ud800")
LEFT_OUT = {
    "nodes.copy_key": "logs in by SSH itself",
    "nodes.take_back_key": "logs in by SSH itself",
    "nodes.discover": "looks through the network",
    "nodes.wake": "waits for a PC to start",
    "nodes.remove": "would end the zoo",
    "library.find_missing": "reads this PC alone",
    "runs.watch": "follows a run until it ends",
    "runs.certificate": "waits for a run's certificate",
}
"""Actions that the zoo does not perform, and why."""


_RANK = {"rank": 0, "local_rank": 0, "node": NODE, "device": "cpu"}
_STATUS = {
    **{"run_id": RUN, "attempt": 1, "node": NODE, "state": "running", "started_s": 1.7e9},
    **{"spec": {"model": "m", "name": "poems", "data": {"train": "x.jsonl"}}, "all_ranks": [_RANK]},
}
_CHECKPOINT = {
    **{
        "run_id": RUN,
        "step": 5,
        "attempt": 1,
        "path": f"runs/{RUN}/checkpoints/5",
        "size_bytes": 4,
    },
    **{"manifest_sha256": "0" * 64, "created_s": 1.7e9, "is_complete": True},
}
HONEST: dict[str, dict[str, Any]] = {
    "facts": to_wire(make_facts()),
    "environment.find": to_wire(ENVIRONMENT),
    "attempt.list": {"attempts": [_STATUS]},
    "attempt.status": _STATUS,
    "attempt.stop": {**_STATUS, "state": "stopped"},
    "attempt.launch": _STATUS,
    "checkpoint.list": {"checkpoints": [_CHECKPOINT]},
    "stream.list": {"streams": {"rank-0.log": 4, "rank-0.jsonl": 400}},
}
"""Answers of an honest node, which lead to the requests behind them."""


# ---------------------------------------------------------------- lies


class Lies:
    """Values of the contract's classes, of a valid shape and with hostile content."""

    def __init__(self, seed: int, victim: Path) -> None:
        self.random = random.Random(seed)
        self._victim = str(victim)
        self.wildness = 1.0
        """Share of hostile values; the others are plain, or no answer would pass its checks."""

    @property
    def _is_wild(self) -> bool:
        return self.random.random() < self.wildness

    def word(self) -> str:
        words = WORDS if self._is_wild else TAME_WORDS
        return self.random.choice(words).replace("VICTIM", self._victim)

    def make(self, hint: Any, depth: int = 0) -> Any:
        """Return a plain value for a type."""
        draw = self.random
        if self._is_wild and draw.random() < 0.02:
            return draw.choice([None, [], {}, "x", 5, True])
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.make(args[0], depth)
        if origin in (typing.Union, types.UnionType):
            return self.make(draw.choice(args), depth)
        if origin is typing.Literal:
            return draw.choice(args)
        if origin in (tuple, list, frozenset, set):
            if origin is tuple and len(args) != 2:
                return [self.make(arg, depth + 1) for arg in args]
            some = [self.make(args[0], depth + 1) for _ in range(draw.randrange(4))]
            return some + some[:1]  # the same one twice
        if origin is dict:
            keys = [self.word() for _ in range(draw.randrange(4))]
            return {key: self.make(args[1], depth + 1) for key in keys}
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.fields(hint, depth)
        if hint is bool:
            return draw.random() < 0.5
        if hint is int:
            return draw.choice(NUMBERS if self._is_wild else (0, 1, 2, 5, 1 << 30))
        if hint is float:
            return draw.choice(REALS if self._is_wild else (0.5, 1.0, time.time()))
        return self.word() if hint is str else None

    def fields(self, cls: type, depth: int = 0) -> dict[str, Any]:
        """Return the fields of a class; optional ones are left out now and then."""
        made = {}
        hints = typing.get_type_hints(cls, include_extras=True)
        for one in dataclasses.fields(cls):
            is_must = one.default is one.default_factory is dataclasses.MISSING
            if is_must or (depth < 4 and self.random.random() < 0.7):
                made[one.name] = self.make(hints[one.name], depth + 1)
        return made

    def answer(
        self, request: type[NodeRequest[Any]] | None, args: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an answer to a request, which mostly repeats what it has to."""
        if request is None or not dataclasses.is_dataclass(request.answer):
            return {}
        self.wildness = self.random.choice((0.0, 0.02, 0.1, 0.7))
        made = self.fields(request.answer)
        if (honest := HONEST.get(request.kind)) and self.random.random() < 0.8:
            # As an honest node, but for a field: all else waits for these.
            odd = self.random.choice([*made, "", ""])
            made = {**honest, **{key: made[key] for key in made if key == odd}}
        if request is ReadStream and self.random.random() < 0.9:
            made = {**self.chunk(), **{key: args.get(key) for key in ("run_id", "attempt")}}
            made.update(stream=args.get("stream"), offset=args.get("offset", 0))
        for name in request.echoes:
            if name in args and self.random.random() < 0.9:
                made[name] = args[name]
        # Of a run that is known, so that more than its first check is reached.
        for inner in (made, *(v for many in made.values() if isinstance(many, list) for v in many)):
            if isinstance(inner, dict) and "run_id" in inner and self.random.random() < 0.6:
                inner.update(run_id=RUN, attempt=1)
                inner.update({"node": NODE} if "node" in inner else {})
        if self.random.random() < 0.02 and made:
            made[self.random.choice(sorted(made))] = self.random.choice(NO_JSON)
        return made

    def chunk(self) -> dict[str, Any]:
        """Return a piece of a journal or log whose lines are lies, one of them cut."""
        kinds = ("step", "phase", "failed", "finished", "checkpoint", "warning", "preview")
        lines = [
            {"kind": self.random.choice(kinds), **self.fields(self.random.choice(EVENTS))}
            for _ in range(self.random.randrange(1, 4))
        ]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        data = data[: self.random.choice((len(data), len(data), len(data) // 2))]
        return {
            **{"run_id": RUN, "attempt": 1, "offset": 0, "size_bytes": len(data)},
            **{"stream": self.random.choice(("rank-0.log", "rank-0.jsonl"))},
            **{"data_base64": base64.b64encode(data).decode()},
        }


EVENTS = tuple(sorted(contract_types(), key=lambda cls: cls.__name__))
"""Classes of which an event or a line of a journal may be."""


# ---------------------------------------------------------------- the node


class HostilePipe:
    """The stdin and stdout of the agent, or of a transfer, on the hostile node."""

    def __init__(self, process: Process, lies: Lies, argv: Sequence[str], home: str) -> None:
        self._process, self._lies, self._rest = process, lies, b""
        self._is_agent = argv[0] == "sh"
        self._argv = argv
        if self._is_agent:
            nonce, sha256 = argv[4], argv[5]
            hello = {
                **{"version": PROTOCOL_VERSION, "archive_sha256": sha256, "python": "3.12.0"},
                **{"hostname": NODE, "pid": 1, "boot_id": "b", "agent_home": home},
            }
            event = {"type": "event", "kind": "hello", "data": hello}
            self._say(f"RACKLESS {nonce}\n{json.dumps(event)}\n".encode())
        else:
            self._transfer()

    def write(self, data: bytes) -> None:
        if not self._is_agent:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):
                request = json.loads(line)
                self._reply(request["kind"], request["id"], request.get("args", {}))

    def write_eof(self) -> None:
        self._end()

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        self._process.exited(0)
        self._process.closed()

    def _say(self, data: bytes) -> None:
        self._process.feed(data)

    def _message(self, **about: Any) -> None:
        text = json.dumps(about)
        self._say(text.encode("ascii") + b"\n")

    def _reply(self, kind: str, number: int, args: dict[str, Any]) -> None:
        draw = self._lies.random
        if kind == "ping":
            self._message(type="response", id=number, result={"wall_s": time.time()})
            return
        for _ in range(draw.choice((0, 0, 0, 1, 3))):
            self._event(number)
        how = draw.random()
        if how < 0.78:
            answer = self._lies.answer(find_request(kind), args)
            self._message(type="response", id=number, result=answer)
            if draw.random() < 0.1:  # twice, and for a request that never was
                self._message(type="response", id=number, result=answer)
                self._message(type="response", id=draw.choice(NUMBERS), result=answer)
        elif how < 0.9:
            kinds = ("user", "bug", "unknown_request", "bad_request", self._lies.word())
            error = {"kind": draw.choice(kinds), "message": self._lies.word()}
            error.update(hint=self._lies.word(), traceback=self._lies.word())
            self._message(type="response", id=number, error=error)
        elif how < 0.94:
            self._say(draw.choice((b"\xff\xfe\n", b"{}\n", b"[" * 3000 + b"\n", b"null\n")))
        elif how < 0.96:
            self._say(b'{"type": "response", "id": ' + str(number).encode())
            self._process.closed("the line ended")
        elif how < 0.97:
            for _ in range(300):
                self._event(number)
        elif how < 0.98:
            self._say(b"x" * (2 << 20))
        # Else silence.

    def _event(self, number: int) -> None:
        draw = self._lies.random
        chunk = self._lies.fields(StreamChunk)
        if draw.random() < 0.7:
            chunk = self._lies.chunk()
        kind, data_of = draw.choice(
            (
                ("stream.data", chunk),
                ("telemetry.sample", self._lies.fields(Sample)),
                ("progress", {"message": self._lies.word(), "phase": self._lies.word()}),
                (self._lies.word(), self._lies.fields(draw.choice(EVENTS))),
            )
        )
        to = draw.choice((number, number, 0, -1, 10**9))
        self._message(type="event", kind=kind, request_id=to, data=data_of)

    def _transfer(self) -> None:
        """Say what a command of the archive would: entries and bytes of files, or an outcome."""
        lies, draw = self._lies, self._lies.random
        entry = {"path": lies.word(), "size_bytes": draw.choice((4, 10**15, -1))}
        entry.update(sha256="0" * 64, mode=0o777)
        header = {"files": [entry] * draw.randrange(3), "ok": True, "have": {lies.word(): 4}}
        self._say(json.dumps(header).encode() + b"\n")
        for _ in range(draw.choice((0, 1, 20))):
            self._say(b"y" * (64 << 10))
        if draw.random() < 0.8:
            self._end()


class HostileConnection:
    """A connection to the hostile node."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo

    async def open(self, argv: Sequence[str]) -> Process:
        process = Process(lambda why: NodeUnreachable(f"{NODE}: {why}", where=NODE))
        home = str(self._zoo.folder / "agent")
        process.attach(HostilePipe(process, self._zoo.lies, argv, home))
        return process

    async def close(self) -> None: ...


# ---------------------------------------------------------------- the zoo


@dataclass
class Zoo:
    """A master whose nodes are all hostile, in a folder of its own."""

    folder: Path
    lies: Lies = field(init=False)
    core: Core = field(init=False)
    started: list[str] = field(default_factory=list)
    """Programs that something tried to start."""
    asked: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def victim(self) -> Path:
        return self.folder / "victim"

    def prepare(self, patch: pytest.MonkeyPatch) -> None:
        """Make the folders, and lead connections to the hostile node."""
        for name in ("victim", "user", "agent", "tmp"):
            (self.folder / name).mkdir()
        (self.victim / "letter.txt").write_text("dear anna")
        write_run_file(self.folder / "run")
        patch.setenv("HOME", str(self.folder / "user"))
        patch.setenv("HF_HOME", str(self.folder / "user" / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("RACKLESS_HOME", str(self.home))
        patch.setenv("RACKLESS_AGENT_HOME", str(self.folder / "agent"))
        patch.chdir(self.victim)
        self.lies = Lies(0, self.victim)

        async def connect(*args: Any, **more: Any) -> HostileConnection:
            return HostileConnection(self)

        def deadline(request: NodeRequest[Any]) -> float:
            self.asked[request.kind] += 1
            return SILENCE_S

        def start(what: Any, *args: Any, **more: Any) -> None:
            # The user's own rows are read by a program of this PC, which no node names.
            if "agents.trainer.data." not in repr(args):
                self.started.append(repr(args)[:300])
            raise OSError("the zoo starts no program")

        # Its import starts programs that look for libraries.
        assert asyncssh.__version__
        patch.setattr(link, "connect", connect)
        patch.setattr(NodeRequest, "deadline_s", deadline)
        for cls in list_requests():
            if "deadline_s" in vars(cls):
                patch.setattr(cls, "deadline_s", deadline)
        for module in (
            bootstrap,
            member,
            remote_files,
            changes,
            confirmation,
            control_requests,
            stop,
        ):
            for name, value in vars(module).items():
                if name.endswith("_S") and isinstance(value, float):
                    patch.setattr(module, name, min(value, 2.0))
        patch.setattr(subprocess.Popen, "__init__", start)
        patch.setattr(os, "system", start)

    def restore(self, number: int) -> None:
        """Give the master its recorded home again, whose run is in another state each time."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(RECORDED, self.home)
        with contextlib.closing(sqlite3.connect(self.home / "rackless.sqlite3")) as store, store:
            state = ("running", "failed", "done", "unknown", "waiting")[number % 5]
            store.execute("UPDATE runs SET state = ?", (state,))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Zoo]:
        """Open a core that knows nodes and a run, all of whose nodes are hostile."""
        async with Core.open(self.home) as self.core:
            spec = await self.core.do(ReadRunFile(path=self.folder / "run" / "run.yaml"))
            self.values = {
                **{"name": NODE, "node": NODE, "names": (NODE,), "nodes": (NODE,)},
                **{"run_id": RUN, "spec": spec, "attempt": 1, "step": 5},
                **{"request": ExportRequest(run_id=RUN), "out": self.folder / "out"},
                **{"num_seconds": 1, "seconds": 1.0, "to": NODE, "kind": "model"},
            }
            yield self

    def actions(self) -> list[str]:
        """Return the names of all actions that the zoo knows to perform."""
        return [name for name, cls in sorted(list_actions().items()) if self._can(name, cls)]

    def _can(self, name: str, cls: type[Action[Any]]) -> bool:
        needed = {
            one.name
            for one in dataclasses.fields(cls)
            if one.default is one.default_factory is dataclasses.MISSING
        }
        reaches = {one.name for one in dataclasses.fields(cls)} & {
            *("name", "node", "names", "nodes", "run_id", "spec")
        }
        is_bare = not dataclasses.fields(cls)
        return name not in LEFT_OUT and needed <= set(self.values) and bool(reaches or is_bare)

    async def perform(self, name: str, seed: int) -> str:
        """Perform one action against lies of a seed; return what it broke, empty: nothing."""
        self.lies.random.seed(seed)
        cls = list_actions()[name]
        given = {
            f.name: self.values[f.name] for f in dataclasses.fields(cls) if f.name in self.values
        }
        began_s, task = time.monotonic(), asyncio.ensure_future(self.core.do(cls(**given)))
        done, _ = await asyncio.wait((task,), timeout=MOST_S)
        if not done:
            task.cancel()
            await asyncio.wait((task,), timeout=MOST_S)
            return f"{name} did not end in {time.monotonic() - began_s:.1f} s"
        error = task.exception()
        self.said[f"{name}: {str(error)[:160]}"] += 1
        self.outcomes["no error" if error is None else type(error).__name__] += 1
        return self._judge(name, error)

    async def ask(self, request: type[NodeRequest[Any]], seed: int) -> str:
        """Ask one node directly, also what no action of the zoo asks; return what it broke."""
        self.lies.random.seed(seed)
        self.lies.wildness = 0.0
        try:
            made = request.from_args(self.lies.fields(request))
        except (WireError, TypeError, KeyError):
            return ""  # not every request fits into the plain words
        client = self.core.fleet.client(NODE)
        try:
            async with asyncio.timeout(MOST_S):
                await client.ask(made)
        except TimeoutError:
            return f"{request.kind} was not answered in {MOST_S} s"
        except Exception as error:  # noqa: BLE001 - judged below
            return self._judge(request.kind, error)
        return ""

    async def follow(self, seed: int) -> str:
        """Follow the streams of an attempt for a moment; return what it broke."""
        self.lies.random.seed(seed)
        client = self.core.fleet.client(NODE)
        try:
            async with asyncio.timeout(SILENCE_S):
                async for _ in client.follow_streams(RUN, 1, {}):
                    pass
        except TimeoutError:
            return ""
        except Exception as error:  # noqa: BLE001 - judged below
            return self._judge("stream.follow", error)
        return ""

    def _judge(self, name: str, error: BaseException | None) -> str:
        if error is not None and not isinstance(error, RacklessError):
            where = traceback.extract_tb(error.__traceback__)[-4:]
            return f"{name} raised {error!r} in {[f'{f.filename}:{f.lineno}' for f in where]}"
        said = "" if error is None else str(error) + getattr(error, "hint", "")
        odd = [sign for sign in said if not (sign.isprintable() or sign == "\n")]
        if odd:
            return f"{name} says control characters: {said[:300]!a}"
        if isinstance(error, NodeUnreachable) and not any(name in said for name in NODES):
            return f"{name} names no node: {said[:300]}"
        if self.started:
            return f"{name} started {self.started.pop()}"
        return ""


def list_requests() -> Iterator[type[NodeRequest[Any]]]:
    """Yield every class of requests to a node."""
    for word in ROOMS:
        find_request(f"{word}.x")
    yield from _subclasses(NodeRequest)


def _subclasses(cls: type[NodeRequest[Any]]) -> Iterator[type[NodeRequest[Any]]]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


def snapshot(folder: Path, but: Path) -> dict[str, str]:
    """Return what lies in a folder outside `but`: the hash of each file, and where links lead."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path == but or but in path.parents:
            continue
        kind = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not kind:
            kind = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = kind
    return found
