"""Price lists: what is right becomes offers, what is wrong is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import UsageError
from app.library.price_list import find_prices, parse_prices


def test_the_shipped_list_is_dated_and_called_a_guess(tmp_path: Path) -> None:
    prices = find_prices(None, tmp_path)

    assert {one.kind for one in prices.offers} == {"gpu", "ram", "nic", "switch", "pc"}
    assert prices.currency == "EUR"
    assert "guesses" in prices.note
    assert "2026-11-28" in prices.note


def test_the_users_own_list_comes_before_the_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("kind,name,price\ngpu,RTX 3090,500\n")
    (tmp_path / "other.csv").write_text("kind;name;price\nnic;2,5;19,90\n", encoding="utf-8-sig")

    assert [one.price for one in find_prices(None, tmp_path).offers] == [500.0]
    (only,) = find_prices(tmp_path / "other.csv", tmp_path).offers
    assert (only.kind, only.size, only.price) == ("nic", 2.5, 19.9)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("gpu,RTX 9999,1", "line 2: the card RTX 9999 is not known"),
        ("gpu,RTX 3090,-1", "line 2: the price of RTX 3090 is '-1'"),
        ("gpu,RTX 3090,", "the price of RTX 3090 is ''"),
        ("gpu,RTX 3090,nan", "the price of RTX 3090 is 'nan'"),
        ("cpu,x,1", "kind is 'cpu'; it must be one of gpu, ram"),
        ("ram,much,1", "the name of ram is 'much'; it must be a number of GiB"),
        ("nic,0,1", "it must be a number of Gb/s"),
        ("nic,2.5,1\nnic,2.5,2", "line 3: nic 2.5 stands twice"),
        ("nic,2.5,1,EUR\nnic,10,1,USD", "prices are in EUR and USD"),
        ("gpu,RTX 3090,1,EUR,99", "slots of RTX 3090 is '99'"),
        ("", "has no rows"),
    ],
)
def test_a_wrong_row_is_named(row: str, problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_prices(f"kind,name,price,currency,slots\n{row}\n", "my.csv")
    assert problem in refused.value.message


def test_a_file_that_is_no_price_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the column price is missing"):
        parse_prices("kind,name\ngpu,RTX 3090\n", "my.csv")
    with pytest.raises(UsageError, match="cannot be read"):
        find_prices(tmp_path / "no.csv", tmp_path)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        find_prices(tmp_path / "bytes.csv", tmp_path)
