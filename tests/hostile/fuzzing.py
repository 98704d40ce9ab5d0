"""Feed a target with inputs until its time is up, and tell what each input made it raise.

A target is a reader of something foreign, with a strategy that makes its inputs and the errors that
it declares. Anything else that it raises is a finding, and so is an input that takes too long.
Targets lie in the modules of `tests/hostile/targets`, each with a tuple `TARGETS`; a new module is
found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import tests.hostile.targets

ROUND_INPUTS = 50
"""Inputs between two looks at the clock."""


@dataclass(frozen=True, kw_only=True)
class Target:
    name: str
    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], object]
    """Reader; what it returns is ignored."""
    allowed: tuple[type[BaseException], ...]
    """Errors that it declares."""
    limit_s: float = 5.0
    """Longest time that one input may take, on a busy machine."""


@dataclass(kw_only=True)
class Outcome:
    """What happened to one target."""

    inputs: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Declared errors by name."""
    finding: str = ""
    """The smallest input that broke the promise, and how; empty: none did."""


def find_targets() -> tuple[Target, ...]:
    """Return the targets of all modules, sorted by name."""
    found: list[Target] = []
    for module in pkgutil.iter_modules(tests.hostile.targets.__path__):
        loaded = importlib.import_module(f"{tests.hostile.targets.__name__}.{module.name}")
        found += loaded.TARGETS
    return tuple(sorted(found, key=lambda target: target.name))


def run_target(target: Target, seconds: float, number: int) -> Outcome:
    """Feed one target for about `seconds`; `number` seeds its inputs."""
    outcome = Outcome()
    end_s = time.monotonic() + seconds
    while not outcome.finding and (not outcome.inputs or time.monotonic() < end_s):
        _run_round(target, number, outcome, end_s)
        number += 1
    return outcome


def _run_round(target: Target, number: int, outcome: Outcome, end_s: float) -> None:
    broken: list[str] = []

    def one(value: Any) -> None:
        # A slow machine ends a round early; a smallest example is still looked for.
        if outcome.inputs and not broken and time.monotonic() > end_s:
            return
        outcome.inputs += 1
        began_s = time.monotonic()
        try:
            target.read(value)
        except target.allowed as error:
            outcome.errors[type(error).__name__] += 1
        except BaseException as error:
            broken.append(f"{error!r} for {value!r}")
            raise
        took_s = time.monotonic() - began_s
        if took_s > target.limit_s:
            broken.append(f"{took_s:.1f} s for {value!r}")
            raise AssertionError(broken[-1])

    feed = settings(
        max_examples=ROUND_INPUTS,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=tuple(HealthCheck),
    )(seed(number)(given(target.inputs)(one)))
    try:
        feed()
    except BaseException as error:
        if not broken or isinstance(error, KeyboardInterrupt):
            raise
        outcome.finding = broken[-1][:2000]


# ---------------------------------------------------------------- inputs


# What breaks readers of numbers, names and lengths, as bytes of a file or message.
AWKWARD = (
    b"1e400", b"-1", b"9" * 400, b"NaN", b"-Infinity", b"[" * 5000, b'{"a":' * 500, b"[]", b"null",
    b"\\ud800", b"\xed\xa0\x80", b"\xff\xfe", b"\x00", b"\n", b'"', b"../../x",
    b"18446744073709551615", b"9223372036854775808",
    b"\xff" * 8, b"\x00" * 8, b"true", b"\xef\xbb\xbf",
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, samples: Iterable[bytes]) -> bytes:
    """Bytes near a valid sample: cut, flipped, repeated, and with awkward pieces put in."""
    data = bytearray(draw(st.sampled_from(tuple(samples))))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            data[start:end] = draw(st.sampled_from(AWKWARD))
        elif kind == 1:
            data[start:end] = draw(st.binary(max_size=9))
        elif kind == 2:
            del data[start:]
        elif kind == 3:
            data[start:start] = data[start:end] * draw(st.integers(1, 50))
        elif data and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


def json_values() -> st.SearchStrategy[Any]:
    """Values as `json.loads` may return them, odd ones included."""
    numbers = st.one_of(
        st.integers(), st.floats(), st.sampled_from([10**400, -(10**400), 2**63, -1, 0, 1e300])
    )
    texts = st.one_of(
        st.text(max_size=8),
        st.sampled_from(["\ud800", "../x", "\x00", "\x1b[2J", "a" * 500, "\u202e", "\u00e9==", ""]),
    )
    leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)
        ),
        max_leaves=12,
    )
