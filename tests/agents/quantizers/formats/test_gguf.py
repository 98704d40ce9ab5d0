"""llama.cpp's quantizer, which a node builds once."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.quantizers.formats import gguf


class Phases:
    """Progress that keeps the names of phases alone."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, phase: str, message: str) -> None:
        assert message
        self.names.append(phase)


def test_building_is_a_phase_that_no_forecast_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(argv: list[str], what: str) -> None:
        assert what
        if "--build" in argv:
            made = Path(argv[argv.index("--build") + 1]) / "bin"
            made.mkdir(parents=True)
            (made / gguf.QUANTIZER).write_bytes(b"tool")

    monkeypatch.setattr(gguf, "_call", build)
    monkeypatch.setattr(gguf, "_source", lambda: tmp_path)
    progress = Phases()
    found = [gguf.find_quantizer(tmp_path / "tools", progress) for _ in range(2)]  # type: ignore[arg-type]

    assert found == [tmp_path / "tools" / gguf.QUANTIZER] * 2
    assert found[0].read_bytes() == b"tool"
    assert progress.names == ["build"]
