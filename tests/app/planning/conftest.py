"""What tests of plans share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.parallel import PARALLEL


@pytest.fixture
def resident_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose only modes in which every GPU holds the model, as tests of its memory want."""
    for mode in ("pipeline", "streamed"):
        monkeypatch.setitem(PARALLEL, mode, replace(PARALLEL[mode], refusal="not available yet"))
