"""Which wheels an interpreter takes, and where a lock's markers hold: PEP 425, 508 and 600.

Only what a lock of ours can name is understood: CPython on Linux with glibc. So a node without pip
can choose its wheels, and one PC can choose them for another.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass

from agents.contract.names import check_text

SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
"""Pythons that the locks have wheels for."""
_LEGACY_GLIBC = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}
_MANYLINUX = re.compile(r"manylinux_2_(\d+)_(.+)")
_CPYTHON = re.compile(r"cp3(\d+)")
_PURE = re.compile(r"py3(\d*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelTarget:
    """The interpreter and PC that wheels are for."""

    python: str
    """Version of the interpreter, such as `3.12.3`."""
    machine: str
    """Kind of processor, such as `x86_64`."""
    glibc: str
    """Version of glibc, such as `2.39`; empty: another C library."""

    def check_foreign(self) -> None:
        for name in ("python", "machine", "glibc"):
            check_text(name, getattr(self, name))

    @property
    def minor(self) -> int:
        """Second number of the Python's version.

        >>> WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39").minor
        12
        """
        return int(self.python.split(".")[1])

    @property
    def key(self) -> str:
        """What decides which wheels are taken: equal for PCs that take the same ones."""
        return f"cp3{self.minor}-glibc{self.glibc or 'none'}-{self.machine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelName:
    """A wheel's file name, taken apart."""

    name: str
    """Name of the package in its normal form."""
    version: str
    tags: tuple[tuple[str, str, str], ...]
    """Each interpreter, ABI and platform that it is for."""


def this_target(python: str) -> WheelTarget:
    """Return the target of an interpreter of this PC, whose version is `python`."""
    import platform  # not for all who only name a target

    # Windows has no confstr, and other C libraries do not know the name.
    confstr = getattr(os, "confstr", lambda name: "")
    try:
        libc = (confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):
        libc = []
    glibc = libc[1] if len(libc) == 2 and libc[0] == "glibc" else ""
    return WheelTarget(python=python, machine=platform.machine(), glibc=glibc)


def normal_name(name: str) -> str:
    """Return the one spelling of a package's name.

    >>> normal_name("Tiny_Thing.x")
    'tiny-thing-x'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def read_wheel_name(file: str) -> WheelName | None:
    """Take the file name of a wheel apart; None: it is none.

    >>> read_wheel_name("tiny_thing-1.5-py2.py3-none-any.whl").tags
    (('py2', 'none', 'any'), ('py3', 'none', 'any'))
    """
    parts = file.removesuffix(".whl").split("-")
    if not file.endswith(".whl") or len(parts) not in (5, 6):
        return None
    pythons, abis, platforms = (part.split(".") for part in parts[-3:])
    tags = tuple((one, abi, place) for one in pythons for abi in abis for place in platforms)
    return WheelName(name=normal_name(parts[0]), version=parts[1].lower(), tags=tags)


def rank_wheel(wheel: WheelName, target: WheelTarget) -> tuple[int, int] | None:
    """Return how well a wheel suits a target, the best lowest; None: it does not fit.

    >>> pc = WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39")
    >>> [rank_wheel(read_wheel_name(f"a-1-{tag}.whl"), pc) for tag in
    ...  ("cp312-cp312-manylinux_2_28_x86_64", "cp39-abi3-linux_x86_64", "py3-none-any",
    ...   "cp311-none-any", "cp312-cp312-manylinux_2_40_x86_64", "cp312-cp312-win_amd64")]
    [(0, -28), (1, -1), (2, 0), None, None, None]
    """
    found = [
        (code, place)
        for python, abi, name in wheel.tags
        if (code := _rank_code(python, abi, target.minor)) is not None
        and (abi == "none" or name != "any")
        and (place := _rank_platform(name, target)) is not None
    ]
    return min(found, default=None)


def _rank_code(python: str, abi: str, minor: int) -> int | None:
    own = _CPYTHON.fullmatch(python)
    if own is not None:
        if int(own[1]) == minor and abi in (python, "none"):
            return 0
        return 1 if abi == "abi3" and int(own[1]) <= minor else None
    pure = _PURE.fullmatch(python)
    return 2 if pure is not None and abi == "none" and int(pure[1] or 0) <= minor else None


def _rank_platform(name: str, target: WheelTarget) -> int | None:
    """Return minus the glibc that a platform wants, since the newest suits best."""
    if name == "any":
        return 0
    if name == f"linux_{target.machine}":
        return -1
    major, _, minor = target.glibc.partition(".")
    if major != "2" or not minor.isdecimal():
        return None
    wanted = _MANYLINUX.fullmatch(name)
    if wanted is None:
        kind, _, machine = name.partition("_")
        needed = _LEGACY_GLIBC.get(kind)
    else:
        needed, machine = int(wanted[1]), wanted[2]
    fits = needed is not None and machine == target.machine and needed <= int(minor)
    return -needed if fits and needed is not None else None


def marker_holds(marker: str, target: WheelTarget) -> bool:
    """Return whether a package's environment marker holds for a target; an empty one does.

    Raises:
        ValueError: it is no marker that a lock may have.

    >>> pc = WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39")
    >>> marker_holds("python_version < '3.13' and platform_machine == 'x86_64'", pc)
    True
    >>> marker_holds("sys_platform == 'win32'", pc)
    False
    """
    if not marker:
        return True
    try:
        return _holds(ast.parse(marker, mode="eval").body, _variables(target))
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"the marker {marker[:80]!r} cannot be read") from error


def _variables(target: WheelTarget) -> dict[str, str]:
    return {
        "python_version": ".".join(target.python.split(".")[:2]),
        "python_full_version": target.python,
        "implementation_version": target.python,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": target.machine,
        "os_name": "posix",
    }


def _holds(node: ast.expr, variables: dict[str, str]) -> bool:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_holds(value, variables) for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_holds(value, variables) for value in values)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            is_version = "version" in ast.dump(left) + ast.dump(right)
            return _compare(_text(left, variables), op, _text(right, variables), is_version)
    raise TypeError("no comparison")


def _text(node: ast.expr, variables: dict[str, str]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in variables:
            return variables[name]
    raise TypeError("no text and no variable")


def _compare(left: str, op: ast.cmpop, right: str, is_version: bool) -> bool:
    if isinstance(op, ast.In):
        return left in right
    if isinstance(op, ast.NotIn):
        return left not in right
    one, other = (_numbers(left), _numbers(right)) if is_version else ((left,), (right,))
    match op:
        case ast.Eq():
            return one == other
        case ast.NotEq():
            return one != other
        case ast.Lt():
            return one < other
        case ast.LtE():
            return one <= other
        case ast.Gt():
            return one > other
        case ast.GtE():
            return one >= other
    raise TypeError("no comparison")


def _numbers(version: str) -> tuple[int | str, ...]:
    """Return a version's numbers, without zeros at the end: 3.12 and 3.12.0 are the same."""
    numbers = [int(part) for part in re.findall(r"\d+", version)]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
