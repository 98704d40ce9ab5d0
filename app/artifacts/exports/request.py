"""Request for an export, shared by the window, the command line and the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contract.formats import ENGINES, EXPORTS, FORMATS, Engine
from app.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """An export of one run, without its destination, which a forecast does not have."""

    run_id: str
    to: str = "merged"
    """Format, one of `agents.contract.formats.FORMATS`."""
    types: tuple[str, ...] = ()
    """Types of the format, such as Q4_K_M; empty: the usual one."""
    checkpoint: int | None = None
    """Step of the checkpoint; None: the newest complete one."""
    node: str | None = None
    """Node that does the work; None: the fastest that has the checkpoint and enough room."""
    calibration: str | None = None
    """Path of the data file that calibrates AWQ and GPTQ; None: the run's own data."""
    engine: Engine = ENGINES[0]
    """Package that makes AWQ."""
    asked_s: float | None = None
    """Time at which the user asked for it, in seconds since the epoch; a later stop of the run ends
    it. None: now."""


def check_request(request: ExportRequest) -> ExportRequest:
    """Validate a request; return it with its types as the format spells them.

    Raises:
        UsageError: there is no such format or type, or an option does not apply to the format.
    """
    types = choose_types(request.to, request.types)
    row = EXPORTS[request.to]
    if request.engine not in row.engines:
        raise UsageError(f"{request.engine} does not make {row.name}", "Leave --engine out.")
    if request.calibration is not None and not row.calibrated:
        raise UsageError(f"{request.to} is not calibrated", "Leave --calibration out.")
    return replace(request, types=types)


def choose_types(to: str, types: Sequence[str]) -> tuple[str, ...]:
    """Return the types as the format spells them, by default the usual one.

    Raises:
        UsageError: there is no such format or type.
    """
    if to not in FORMATS:
        raise UsageError(f"{to} is no export format", f"Use one of {', '.join(FORMATS)}.")
    row = EXPORTS[to]
    known = {kind.lower(): kind for kind in row.types}
    unknown = [kind for kind in types if kind.lower() not in known]
    if unknown:
        hint = f"Use one of {', '.join(row.types)}." if row.types else "Leave --type out."
        raise UsageError(f"{to} has no type {unknown[0]}", hint)
    chosen = tuple(dict.fromkeys(known[kind.lower()] for kind in types))
    if len(chosen) > 1 and not row.joins_types:
        raise UsageError(f"{to} makes one type at a time", "Export twice, to two folders.")
    return chosen or row.usual_types
