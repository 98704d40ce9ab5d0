"""Messages of the wire, and every dataclass that is read from one."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import types
import typing
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

import agents.contract
from agents.contract.json_text import parse_json, read_said
from agents.contract.messages import Event, Request, Response, decode, encode
from agents.contract.wire import WireError, from_wire
from tests.hostile.fuzzing import Target, json_values, mutated

LINES = tuple(
    encode(message)
    for message in (
        Request(id=1, kind="attempt.launch", args={"run_id": "r-1", "attempt": 1}),
        Request(id=2, kind="cancel", args={"request": 1}),
        Response(id=1, result={"attempts": [{"run_id": "r-1", "attempt": 1, "node": "a"}]}),
        Event(kind="telemetry.sample", data={"time_s": 1.5, "seq": 3}, request_id=4),
        Event(kind="stream.data", data={"stream": "rank-0.log", "data_base64": "YWJj"}),
    )
)
TABLES = ("formats", "layer_plan", "model_files", "parallel")
"""Modules of the contract whose dataclasses are rows of tables and never cross the wire."""


def contract_types() -> Iterator[type]:
    """Yield every dataclass of the contract that crosses the wire."""
    for module in pkgutil.walk_packages(agents.contract.__path__, "agents.contract."):
        loaded = importlib.import_module(module.name)
        for value in vars(loaded).values():
            is_class = isinstance(value, type) and dataclasses.is_dataclass(value)
            is_own = is_class and value.__module__ == loaded.__name__
            if is_own and module.name.rpartition(".")[2] not in TABLES:
                yield value


def near(hint: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that almost fit a type: mostly of its form, now and then of any other."""
    return st.integers(0, 19).flatmap(lambda n: json_values() if n == 0 else _fitting(hint, depth))


def _fitting(hint: Any, depth: int) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(near(option, depth) for option in args))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return st.lists(near(args[0], depth + 1), max_size=2)
    if origin is tuple:
        return st.tuples(*(near(arg, depth + 1) for arg in args)).map(list)
    if origin in (list, dict):
        inner = near(args[-1], depth + 1)
        return (
            st.lists(inner, max_size=2)
            if origin is list
            else st.dictionaries(st.text(max_size=5), inner, max_size=2)
        )
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _fields(hint, depth + 1)
    plain = {int: st.integers(-2, 100), float: st.floats(), str: _words(), bool: st.booleans()}
    return plain.get(hint, st.none())


def _fields(cls: type, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    hints = typing.get_type_hints(cls)
    must = {
        field.name: near(hints[field.name], depth)
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    # Deep types would grow without end if their optional fields were always there.
    may = {name: near(hint, depth) for name, hint in hints.items() if depth < 4}
    return st.fixed_dictionaries(
        must, optional={name: near_ for name, near_ in may.items() if name not in must}
    )


def _words() -> st.SearchStrategy[str]:
    return st.one_of(
        st.sampled_from(
            ["r-1", "rank-0.log", "supervisor.jsonl", "a", "cpu", "cuda:0", "../a", "YWJj", "YWJ"]
        ),
        st.text(max_size=6),
    )


def _read(cls: type) -> Target:
    def read(value: Any) -> None:
        found = from_wire(cls, value)
        # What was accepted can be shown and stored.
        repr(found).encode("utf-8")

    return Target(
        name=f"from_wire {cls.__name__}",
        inputs=st.one_of(_fields(cls, 0), json_values()),
        read=read,
        allowed=(WireError,),
    )


def _decode(line: bytes) -> None:
    message = decode(line)
    assert decode(encode(message)) == message


TARGETS = (
    Target(
        name="decode: lines near valid ones",
        inputs=mutated(LINES),
        read=_decode,
        allowed=(WireError,),
    ),
    Target(
        name="decode: any JSON",
        inputs=json_values().map(lambda value: json.dumps(value).encode("ascii")),
        read=_decode,
        allowed=(WireError,),
    ),
    Target(name="decode: any bytes", inputs=st.binary(), read=_decode, allowed=(WireError,)),
    Target(name="parse_json", inputs=mutated(LINES), read=parse_json, allowed=(WireError,)),
    Target(name="lines of a job", inputs=mutated(LINES), read=read_said, allowed=()),
    *(_read(cls) for cls in contract_types()),
)
