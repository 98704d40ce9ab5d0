"""What a person asks of an export, as the window, the command line and the core pass it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contract.formats import ENGINES, FORMATS, TYPES, USUAL_TYPES, Engine
from app.errors import UsageError

CALIBRATED = ("awq", "gptq")
"""Formats whose rounding is fitted to data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """An export of one run; its destination folder is not part of it, as a forecast has none."""

    run_id: str
    to: str = "merged"
    """Format, one of `agents.contract.formats.FORMATS`."""
    types: tuple[str, ...] = ()
    """Types of the format, such as Q4_K_M; none: the usual one."""
    checkpoint: int | None = None
    """Step of the checkpoint; None: the newest whole one."""
    node: str | None = None
    """Node that does the work; None: the quickest with the checkpoint and the room."""
    calibration: str | None = None
    """Path of the data file that AWQ and GPTQ are fitted to; None: the run's own data."""
    engine: Engine = ENGINES[0]
    """Package that makes AWQ."""


def check_request(request: ExportRequest) -> ExportRequest:
    """Return the request with its types as the format spells them.

    Raises:
        UsageError: there is no such format or type, or an option does not apply to the format.
    """
    types = choose_types(request.to, request.types)
    if request.engine != ENGINES[0] and request.to != "awq":
        raise UsageError(f"{request.engine} makes awq, not {request.to}", "Leave --engine out.")
    if request.calibration is not None and request.to not in CALIBRATED:
        raise UsageError(f"{request.to} is not calibrated", "Leave --calibration out.")
    return replace(request, types=types)


def choose_types(to: str, types: Sequence[str]) -> tuple[str, ...]:
    """Return the types as the format spells them, the usual one where none is given.

    Raises:
        UsageError: there is no such format or type.
    """
    if to not in FORMATS:
        raise UsageError(f"{to} is no export format", f"Use one of {', '.join(FORMATS)}.")
    offered = TYPES.get(to, ())
    known = {kind.lower(): kind for kind in offered}
    unknown = [kind for kind in types if kind.lower() not in known]
    if unknown:
        hint = f"Use one of {', '.join(offered)}." if offered else "Leave --type out."
        raise UsageError(f"{to} has no type {unknown[0]}", hint)
    chosen = tuple(dict.fromkeys(known[kind.lower()] for kind in types))
    if to == "gptq" and len(chosen) > 1:
        raise UsageError("gptq makes one type at a time", "Export twice, to two folders.")
    return chosen or USUAL_TYPES.get(to, ())
