"""Forecasts of speed against whole steps that were measured, and what must hold of any of them."""

from __future__ import annotations

from typing import Any

import pytest

from agents.contract.node import Calibration
from agents.contract.spec import AdapterKind, AdapterSpec, DataSpec, RunSpec
from agents.shared.cards import find_card, list_cards
from app.planning.hardware.cluster import PlannedGpu
from app.planning.hardware.rates import find_rates
from app.planning.memory.forecast import MemorySetting
from app.planning.row_lengths import RowLengths
from app.planning.shape.model_shape import ModelShape, read_shape
from app.planning.throughput import make_pace, measure_work
from tests.bench.planning.measured_runs import forecast_run, read_runs
from tests.bench.planning.planning_table import read_table, step_error_of

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def llama_7b() -> ModelShape:
    return read_shape(
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        }
    )


def speed(kind: AdapterKind, setting: MemorySetting, gpu: PlannedGpu) -> float:
    adapter = AdapterSpec(kind=kind, targets=QKVO)
    spec = RunSpec(model="m", data=DataSpec(train="d"), adapter=adapter)
    pace = make_pace(measure_work(llama_7b(), spec, 2048), find_rates(gpu))
    return pace.tokens_per_s(setting, RowLengths(mean_tokens=2048))


def test_steps_take_as_long_as_measured_on_an_h200() -> None:
    table = read_runs()
    # Masks of dropout and the loss of large vocabularies took longer in the trainer of then.
    rows = [row for row in table["rows"] if not row["dropout"]]
    errors = step_errors({**table, "rows": rows})
    assert len(errors) >= 5
    assert max(map(abs, errors)) < 0.06


def test_passes_take_as_long_as_measured_on_an_h100() -> None:
    """Of rows that agree from turn to turn: models that loaded meanwhile slowed the others."""
    table = read_table()
    errors = [step_error_of(table, row) for row in table["rows"] if row["spread"] <= 0.1]
    assert len(errors) >= 40
    assert sum(map(abs, errors)) / len(errors) < 0.05
    assert max(map(abs, errors)) < 0.15


def test_a_calibration_makes_no_forecast_worse() -> None:
    table = read_runs()
    plain, calibrated = (step_errors(table, calibrated=one) for one in (False, True))
    assert sum(map(abs, calibrated)) <= sum(map(abs, plain)) * 1.01


@pytest.mark.parametrize("name", list_cards())
def test_a_calibration_counts_in_proportion_and_a_usual_one_changes_nothing(name: str) -> None:
    def rate(share: float | None) -> float:
        card = find_card(name)
        assert card is not None
        usual = 0.651 if card.capability == (9, 0) else 0.85  # of the peak, products alone
        measured = None if share is None else share * usual * card.flops_per_s
        found = Calibration(card=name, matrix_flops_per_s=measured)
        return find_rates(PlannedGpu(name=name, calibration=found)).matrix_flops_per_s

    plain = find_rates(PlannedGpu(name=name)).matrix_flops_per_s
    assert rate(1.0) == pytest.approx(plain) == rate(None)
    assert rate(0.5) == pytest.approx(plain / 2)
    assert rate(1.2) == pytest.approx(plain * 1.2)


def step_errors(table: dict[str, Any], *, calibrated: bool = False) -> list[float]:
    """Return by which share the seconds of a step are too high, of compiled and replayed rows."""
    found = [
        (forecast_run(table, row, calibrated=calibrated), row["step_s"])
        for row in table["rows"]
        if row["compiled"] and not row["launched"]
    ]
    return [one.step_s / measured - 1 for one, measured in found if one is not None]


def test_a_measurement_on_the_node_counts_more_than_the_data_sheet() -> None:
    slow = Calibration(
        card="NVIDIA GeForce RTX 4070", matrix_flops_per_s=25e12, memory_bytes_per_s=215e9
    )
    setting = MemorySetting(micro_tokens=4096)
    listed = speed("qlora", setting, PlannedGpu(name="NVIDIA GeForce RTX 4070"))
    measured = speed("qlora", setting, PlannedGpu(name="NVIDIA GeForce RTX 4070", calibration=slow))

    assert measured == pytest.approx(listed / 2, rel=0.05)


def test_asking_the_reference_costs_a_forward_pass() -> None:
    def seconds(**changes: Any) -> float:
        spec = RunSpec(model="m", data=DataSpec(train="d"), **changes)
        pace = make_pace(measure_work(llama_7b(), spec, 1024), find_rates(PlannedGpu(name="4090")))
        return pace.seconds(2048, MemorySetting(micro_tokens=2048), RowLengths(mean_tokens=2048))

    adapter = AdapterSpec(kind="qlora")
    ratio = seconds(adapter=adapter, objective="dpo") / seconds(adapter=adapter)
    assert 1.3 < ratio < 1.6
    full = AdapterSpec(kind="full")  # it was asked before the first step
    assert 1 < seconds(adapter=full, objective="dpo") / seconds(adapter=full) < 1.1


def test_an_unknown_card_has_some_speed() -> None:
    rates = find_rates(PlannedGpu(name="Mystery 9000"))

    assert rates.source == "assumed"
    assert speed("lora", MemorySetting(micro_tokens=2048), PlannedGpu(name="Mystery 9000")) > 0


def test_the_claim_of_150_tokens_per_s_of_a_5070_ti_is_far_too_low() -> None:
    for recomputed in (0, 32):
        setting = MemorySetting(micro_tokens=2048, num_recomputed=recomputed)
        assert speed("qlora", setting, PlannedGpu(name="RTX 5070 Ti")) > 6 * 150
