"""Read price lists, which say what can be bought for a cluster.

    kind,name,price,currency,slots,date,note
    gpu,RTX 3090,650,EUR,3,2026-11-28,used
    ram,32,120,EUR,,,GiB to add
    nic,2.5,25
    switch,2.5,70
    pc,32,500,EUR,,,a PC with 32 GiB of RAM and without GPU

Only kind, name and price are required. All problems are reported at once, each with its line.
"""

from __future__ import annotations

import csv
import difflib
import importlib.resources
import io
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from agents.shared.cards import find_card, list_cards
from agents.shared.files.folder_files import read_regular
from app.errors import UsageError
from app.planning.upgrades import OfferKind, PricedPart, PriceList
from app.runfile.run_file import MAX_FILE_BYTES

OWN_NAME = "prices.csv"
"""Name of the user's own list in the home of Rackless."""
_KINDS = get_args(OfferKind)
_REQUIRED = ("kind", "name", "price")
_COLUMNS = (*_REQUIRED, "currency", "slots", "date", "note")
_MAX_ROWS = 500
_MAX_PRICE = 1e7
_MAX_SLOTS = 8


def find_prices(path: Path | None, home: Path) -> PriceList:
    """Return a price list: the file given, else the user's own, else the shipped guesses.

    Raises:
        UsageError: the file is missing, is not CSV, or holds a value that is not allowed.
    """
    own = home / OWN_NAME
    if path is None and own.is_file():
        path = own
    if path is None:
        folder = importlib.resources.files("resources").joinpath("prices")
        text = folder.joinpath("guessed.csv").read_text(encoding="utf-8")
        shipped = parse_prices(text, "the shipped price list")
        note = shipped.note.replace("are from", "are guesses, from")
        return replace(shipped, note=f"{note}: your own list makes them exact")
    try:
        # Spreadsheets write a byte order mark.
        text = read_regular(path, limit=MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file in UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(
            f"the price list {path} cannot be read: {error.strerror}",
            f"Give the path of a CSV file with the columns {', '.join(_REQUIRED)}.",
        ) from error
    return parse_prices(text, str(path))


def parse_prices(text: str, source: str) -> PriceList:
    """Read the text of a price list; `source` is its name in errors.

    Raises:
        UsageError: the text has problems; it lists all of them with their lines.
    """
    # A spreadsheet in a country with decimal commas separates columns by semicolons.
    head = text.partition("\n")[0]
    delimiter = ";" if head.count(";") > head.count(",") else ","
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    try:
        columns = [name.strip().lower() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        missing = [name for name in _REQUIRED if name not in columns]
        if missing:
            raise UsageError(
                f"{source}, line 1: the column {missing[0]} is missing",
                f"The first line names the columns: {', '.join(_COLUMNS)}.",
            )
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UsageError(f"{source}, line {reader.line_num}: this is not CSV: {error}") from error
    problems, offers, seen = [], [], set[tuple[str, str]]()
    for line, row in rows[:_MAX_ROWS]:
        cells = {name: (row.get(name) or "").strip() for name in _COLUMNS}
        problem = _find_problem(cells)
        if not problem and (cells["kind"], cells["name"].lower()) in seen:
            problem = f"{cells['kind']} {cells['name']} stands twice"
        if problem:
            problems.append(f"{source}, line {line}: {problem}")
            continue
        seen.add((cells["kind"], cells["name"].lower()))
        offers.append(_make_offer(cells))
    currencies = sorted({cell for _, row in rows if (cell := (row.get("currency") or "").strip())})
    if len(currencies) > 1:
        problems.append(f"{source}: prices are in {' and '.join(currencies)}; use one currency")
    if len(rows) > _MAX_ROWS:
        problems.append(f"{source} has {len(rows)} rows; at most {_MAX_ROWS} are allowed")
    if not rows:
        problems.append(f"{source} has no rows")
    if problems:
        raise UsageError("\n".join(problems), "Correct the price list; nothing was planned.")
    dates = sorted({cell for _, row in rows if (cell := (row.get("date") or "").strip())})
    when = f" of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
    return PriceList(
        offers=tuple(offers),
        currency=currencies[0] if currencies else "",
        note=f"prices are from {source}{when}",
    )


def _find_problem(cells: Mapping[str, str]) -> str:
    """Return the problem of a row; empty: it has none."""
    kind, name = cells["kind"], cells["name"]
    if kind not in _KINDS:
        return f"kind is {kind!r}; it must be one of {', '.join(_KINDS)}"
    if kind == "gpu" and find_card(name) is None:
        near = difflib.get_close_matches(name, list_cards(), n=1, cutoff=0.5)
        return f"the card {name} is not known" + (f"; did you mean {near[0]}?" if near else "")
    if kind != "gpu" and not 0 < _read_number(name) <= 65536:
        unit = "Gb/s" if kind in ("nic", "switch") else "GiB"
        return f"the name of {kind} is {name!r}; it must be a number of {unit}, such as 32 or 2.5"
    if not 0 <= _read_number(cells["price"]) <= _MAX_PRICE:
        return f"the price of {name} is {cells['price']!r}; it must be a number from 0 on"
    slots = cells["slots"]
    if slots and not (slots.isdecimal() and 1 <= int(slots) <= _MAX_SLOTS):
        return f"slots of {name} is {slots!r}; it must be a number from 1 to {_MAX_SLOTS}"
    return ""


def _make_offer(cells: Mapping[str, str]) -> PricedPart:
    kind = cast(OfferKind, cells["kind"])
    return PricedPart(
        kind=kind,
        name=cells["name"] if kind == "gpu" else f"{_read_number(cells['name']):g}",
        price=_read_number(cells["price"]),
        slots=int(cells["slots"] or 2),
    )


def _read_number(text: str) -> float:
    """Return a number with a decimal point or comma; NaN, which no limit allows, for other text.

    >>> _read_number("2,5"), _read_number("x")
    (2.5, nan)
    """
    try:
        found = float(text.replace(",", "."))
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan
