"""Plans compared: what to buy for a run, and which models fit the PCs."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from agents.contract.spec import DataSpec, RunSpec
from app.cli.kit.output import Output, plain
from app.core.action import CoreApi
from app.core.library import ReadRunFile
from app.core.plans import FindFittingModels, RankUpgrades
from app.errors import UsageError
from app.planning.best import BestLimits, FittingModel
from app.planning.candidate import Candidate
from app.planning.upgrades import Upgrade, Upgrades
from app.presentation import plan_text
from app.text import DASH, show_duration, show_moment, show_rate, show_share

_MOST_SHOWN = 12
_BEST_ONLY = ("data", "by", "budget", "price_per_kwh")
_MAX_PRICE = 1e6
_ALL = "all"
_DULL = ("", DASH, _ALL)


def add_comparisons(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rackless plan` that compare plans."""
    upgrade = parser.add_argument_group("what to buy")
    upgrade.add_argument(
        "--upgrade",
        action="store_true",
        help="rank single purchases (a GPU, RAM, a faster network, another PC) by the speed that"
        " they add for their price",
    )
    upgrade.add_argument(
        "--prices",
        metavar="FILE",
        type=Path,
        help="CSV file with the columns kind, name and price, instead of the shipped guesses",
    )
    best = parser.add_argument_group("models for these PCs")
    best.add_argument(
        "--best",
        action="store_true",
        help="list the models that fit, with hours and cost for the data; RUN.yaml is optional",
    )
    best.add_argument("--data", metavar="FILE", type=Path, help="training data for --best")
    best.add_argument(
        "--by",
        metavar="TIME",
        type=read_deadline,
        help="time by which the run has to end, such as 07:00 or 2027-01-31T07:00",
    )
    best.add_argument(
        "--budget", metavar="AMOUNT", type=_amount, help="most that the run's energy may cost"
    )
    best.add_argument(
        "--price-per-kwh",
        metavar="AMOUNT",
        type=_amount,
        help="price of a kilowatt-hour instead of that in the settings",
    )


def _amount(text: str) -> float:
    """Argument type of an amount of money.

    >>> _amount("3,50")
    3.5
    """
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_PRICE:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount above 0, such as 3.50")
    return value


def read_deadline(text: str, now: datetime | None = None) -> float:
    """Argument type of a moment: the next time of day, or a date with a time.

    >>> noon = datetime(2026, 11, 28, 12)
    >>> [datetime.fromtimestamp(read_deadline(t, noon)).isoformat(" ") for t in ("07:00", "13:30")]
    ['2026-11-29 07:00:00', '2026-11-28 13:30:00']
    """
    now = now or datetime.now()
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            clock = datetime.strptime(text.strip(), "%H:%M").time()
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a time, such as 07:00 or 2027-01-31T07:00"
            ) from None
        found = datetime.combine(now.date(), clock)
        if found <= now:
            found += timedelta(days=1)
    if found.timestamp() <= now.timestamp():
        raise argparse.ArgumentTypeError(f"{text!r} is in the past")
    return found.timestamp()


def require_matching(args: argparse.Namespace) -> None:
    """Check that options were given that belong together.

    Raises:
        UsageError: they do not.
    """
    hint = "See: rackless plan --help"
    if args.best and args.upgrade:
        raise UsageError("--best and --upgrade are different questions", "Give one of them.")
    if args.prices is not None and not args.upgrade:
        raise UsageError("--prices belongs to --upgrade", hint)
    for name in _BEST_ONLY:
        if getattr(args, name) is not None and not args.best:
            raise UsageError(f"--{name.replace('_', '-')} belongs to --best", hint)
    if args.run_file is None and not args.best:
        raise UsageError("the run file is missing", "Write: rackless plan RUN.yaml")
    if (args.best or args.upgrade) and len(args.cluster) > 1:
        raise UsageError(
            "several clusters can only be compared by their plans",
            "Give one --cluster with --best or --upgrade.",
        )
    if args.best:
        _require_data(args)


def _require_data(args: argparse.Namespace) -> None:
    if args.data is None and args.run_file is None:
        raise UsageError("the data is missing", "Write: rackless plan --best --data FILE")
    if args.run_file is None and args.set:
        raise UsageError("--set changes a run file", "Write: rackless plan RUN.yaml --best")


# ---------------------------------------------------------------- what to buy


async def print_upgrades(
    core: CoreApi, spec: RunSpec, args: argparse.Namespace, out: Output
) -> int:
    """Print purchases for a run, the most speed for the price first."""
    cluster = args.cluster[0] if args.cluster else None
    found = await core.do(RankUpgrades(spec=spec, cluster=cluster, prices=args.prices))
    out.document(upgrades_document(found))
    out.text(plan_text.describe_base(found))
    rows = [
        [
            one.text,
            plan_text.show_price(one.price, found.currency),
            f"+{show_rate(one.gain_tokens_per_s)}",
            show_rate(one.tokens_per_s),
            DASH if one.gain_per_100 is None else f"{one.gain_per_100:,.0f}",
            ", ".join(one.caveats),
        ]
        for one in found.best_places[:_MOST_SHOWN]
    ]
    head = ["BUY", "PRICE", "GAIN", "THEN", "GAIN PER 100", "CHECK"]
    out.table(head, rows, "\nNo single purchase of the price list makes it faster.")
    useless = [one.text for one in found.found if one not in found.useful]
    if useless:
        _print_list("No faster with", useless, out)
    _print_list("Assumed", found.notes, out)
    return 0 if found.useful else 1


def upgrades_document(found: Upgrades) -> dict[str, object]:
    """Return purchases as --json prints them."""
    return {
        "tokens_per_s": found.base.tokens_per_s if found.base is not None else None,
        "currency": found.currency,
        "upgrades": [_upgrade(one) for one in found.found],
        "assumptions": list(found.notes),
    }


def _upgrade(one: Upgrade) -> dict[str, object]:
    return {
        "kind": one.kind,
        "name": one.name,
        "text": one.text,
        "price": one.price,
        "tokens_per_s": one.tokens_per_s,
        "gain_tokens_per_s": one.gain_tokens_per_s,
        "gain_per_100": one.gain_per_100,
        "fits": one.candidate is not None,
        **_candidate(one.candidate),
        "caveats": list(one.caveats),
    }


def _candidate(one: Candidate | None) -> dict[str, object]:
    return {
        "mode": one.mode if one is not None else None,
        "nodes": list(one.nodes) if one is not None else [],
    }


# ---------------------------------------------------------------- models for these PCs


async def print_fitting(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    """Print the models that fit the PCs, the largest that keep the limits first."""
    if args.run_file is not None:
        spec = await core.do(ReadRunFile(path=args.run_file, settings=args.set))
        if args.data is not None:
            spec = _with_data(spec, args.data)
    else:
        spec = RunSpec(model="-", data=DataSpec(train=str(args.data.absolute())))
    now_s = time.time()
    limits = BestLimits(
        seconds=None if args.by is None else args.by - now_s,
        budget=args.budget,
        price_per_kwh=args.price_per_kwh,
    )
    cluster = args.cluster[0] if args.cluster else None
    answer = await core.do(FindFittingModels(spec=spec, limits=limits, cluster=cluster))
    out.document(
        {
            "models": [_model(one, now_s) for one in answer.found],
            "num_tried": answer.num_tried,
            "assumptions": list(answer.assumptions),
        }
    )
    head = ["MODEL", "METHOD", "PCS", "SPEED", "TIME", "READY", "ENERGY", "COST", "DATA", "SET"]
    rows = [_fitting_row(one, now_s) for one in answer.found]
    # A column that says nothing in any row would only take width.
    dull = {place for place in range(len(head)) if all(row[place] in _DULL for row in rows)}
    head, *rows = [
        [cell for place, cell in enumerate(row) if place not in dull] for row in (head, *rows)
    ]
    out.table(head, rows, f"None of {answer.num_tried} models fits these PCs and limits.")
    _print_list("Assumed", answer.assumptions, out)
    return 0 if answer.found else 1


def _fitting_row(one: FittingModel, now_s: float) -> list[str]:
    # The method has a column of its own.
    change = [(key, value) for key, value in one.change.items() if key != "adapter.kind"]
    return [
        one.model,
        plan_text.name_method(one.adapter),
        ", ".join(one.candidate.nodes),
        show_rate(one.candidate.tokens_per_s),
        show_duration(one.total_s),
        DASH if one.total_s is None else show_moment(now_s + one.total_s, now_s),
        plan_text.show_energy(one.energy_wh),
        plan_text.show_price(one.cost),
        _ALL if one.is_whole else show_share(one.share),
        " ".join(f"{key}={plan_text.show_value(value)}" for key, value in change),
    ]


def _with_data(spec: RunSpec, data: Path) -> RunSpec:
    return replace(spec, data=replace(spec.data, train=str(data.absolute()), sources=()))


def _model(one: FittingModel, now_s: float) -> dict[str, object]:
    return {
        "model": one.model,
        "num_parameters": one.num_parameters,
        "adapter": one.adapter,
        **_candidate(one.candidate),
        "tokens_per_s": one.candidate.tokens_per_s,
        "total_s": one.total_s,
        "ends_at": None if one.total_s is None else now_s + one.total_s,
        "energy_wh": one.energy_wh,
        "cost": one.cost,
        "share": one.share,
        "change": plain(dict(one.change)),
    }


def _print_list(title: str, lines: Sequence[str], out: Output) -> None:
    if lines:
        out.text("\n".join(["", title, *(f"  {line}" for line in lines)]))
