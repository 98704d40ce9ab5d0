"""Where layers are streamed from a disk that is too slow, a person is told what it costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agents.trainer import streamed_store
from agents.trainer.streamed_store import warning_of_slow_disk


@pytest.mark.parametrize(("waited_s", "is_warned"), [(0.5, False), (3.0, True)])
def test_a_slow_disk_is_named_with_its_rate_and_its_cost(monkeypatch, waited_s, is_warned):
    written = []
    journal = SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields)))
    times = iter((100.0, 110.0))
    monkeypatch.setattr(streamed_store, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    reader = SimpleNamespace(waited_s=7.0, bytes_per_s=5e8)
    with warning_of_slow_disk(SimpleNamespace(journal=journal), reader):
        reader.waited_s += waited_s
    assert bool(written) == is_warned
    if is_warned:
        ((kind, fields),) = written
        assert kind == "warning"
        assert "at 0.5 GB/s, and this GPU waits for them 30% of the time" in fields["message"]
        assert "faster SSD" in fields["hint"]


def test_without_a_disk_nothing_is_said():
    with warning_of_slow_disk(SimpleNamespace(), None):
        pass
