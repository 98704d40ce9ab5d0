"""The forecasts in the docs are those that plans make now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.parallel import PARALLEL
from tests.app.planning.big_models import make_rows

PAGE = Path(__file__).parents[3] / "docs" / "big-models.md"


def test_the_table_of_forecasts_is_that_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("pipeline", "streamed"):
        monkeypatch.setitem(PARALLEL, mode, replace(PARALLEL[mode], refusal=""))
    text = PAGE.read_text(encoding="utf-8")
    missing = [row for row in make_rows() if row not in text]
    assert missing == [], "print it anew: python -m tests.app.planning.big_models"
