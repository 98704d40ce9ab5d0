"""An export is foretold for every node, says why not, and learns from what was measured."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.formats import Engine
from agents.contract.node import GpuFacts, GpuUse
from agents.contract.spec import RunSpec
from app.artifacts.estimates.plan import ExportPlan, PlacePlan, describe_place, describe_plan
from app.artifacts.exports.export import export_run, forecast_export
from app.errors import UsageError, UserError
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster
from tests.fakes.exports import ask_export

LLAMA_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_7B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
GIB = 1 << 30


@pytest.fixture
def two_unlike(services: Services, cluster: FakeCluster, spec: RunSpec) -> FakeCluster:
    Path(spec.model, "config.json").write_text(json.dumps(LLAMA_7B))
    card = GpuFacts(index=0, name="NVIDIA GeForce RTX 3090", uuid="g", memory_bytes=24 * GIB)
    for name, gpus in (("alpha", ()), ("beta", (card,))):
        cluster[name].facts_now = replace(
            cluster[name].facts_now,
            memory_bytes=64 * GIB,
            disk_free_bytes=200 * GIB,
            num_cores=8,
            gpus=gpus,
        )
    return cluster


def plan(services: Services, run_id: str, to: str, *types: str) -> ExportPlan:
    return asyncio.run(forecast_export(services, ask_export(run_id, to, types=types)))


def test_the_quickest_node_comes_first_and_each_has_all_phases(
    services: Services, interrupted: str, two_unlike: FakeCluster
) -> None:
    found = plan(services, interrupted, "awq")
    assert found.step == 10
    assert found.left_wide == ""
    beta, alpha, gamma = found.places
    assert (beta.node, alpha.node) == ("beta", "alpha")
    assert gamma.problems == ("does not answer: gamma cannot be reached",)
    assert beta is found.best
    names = ["check", "load", "merge", "texts", "original", "control", "quantize", "proof"]
    assert [phase.name for phase in beta.phases] == names
    assert beta.seconds is not None
    assert alpha.seconds is not None
    assert beta.seconds < alpha.seconds
    assert (alpha.vram_bytes, (beta.vram_bytes or 0) > GIB) == (None, True)
    lines = describe_plan(found)
    assert lines[0].startswith("awq 3.6 GiB")
    assert lines[1].startswith("on beta: about ")
    assert lines[-2].startswith("or on alpha: about ")
    assert lines[-1] == "not on gamma: it does not answer: gamma cannot be reached"


def test_a_model_that_a_format_is_not_made_of_is_told(
    services: Services, interrupted: str, two_unlike: FakeCluster, spec: RunSpec, tmp_path: Path
) -> None:
    Path(spec.model, "config.json").write_text(json.dumps({**LLAMA_7B, "num_key_value_heads": 1}))
    assert plan(services, interrupted, "awq").best is not None
    reason = "cannot make it: a layer of this model has 96 outputs; awq needs multiples of 64"
    Path(spec.model, "config.json").write_text(
        json.dumps({**LLAMA_7B, "head_dim": 96, "num_key_value_heads": 1})
    )
    found = plan(services, interrupted, "awq")
    assert (found.best, {one.problems for one in found.places}) == (None, {(reason,)})
    assert plan(services, interrupted, "gptq", "4-bit").best is not None
    with pytest.raises(UserError, match="this export cannot be made: alpha cannot make it"):
        asyncio.run(export_run(services, ask_export(interrupted, "awq"), tmp_path / "out"))
    assert not two_unlike["alpha"].merges


def test_a_family_that_a_program_does_not_take_is_told_by_name(
    services: Services, interrupted: str, two_unlike: FakeCluster, spec: RunSpec
) -> None:
    config = {**LLAMA_7B, "model_type": "ministral"}
    Path(spec.model, "config.json").write_text(json.dumps(config))
    reason = "cannot make it: gguf cannot be made of Ministral models: llama.cpp's converter does "
    found = plan(services, interrupted, "gguf", "Q8_0")
    assert (found.best, {one.problems for one in found.places}) == (
        None,
        {(f"{reason}not know them",)},
    )
    assert plan(services, interrupted, "nf4").best is not None


def test_a_plan_is_of_what_is_asked_for(
    services: Services, interrupted: str, two_unlike: FakeCluster, tmp_path: Path
) -> None:
    found = asyncio.run(forecast_export(services, ask_export(interrupted, "awq", node="alpha")))
    assert [one.node for one in found.places] == ["alpha"]
    del two_unlike["alpha"].checkpoints[interrupted, 10]
    found = asyncio.run(forecast_export(services, ask_export(interrupted, "awq", node="alpha")))
    assert (found.step, found.places[0].problems) == (5, ()), "an export there takes what it has"
    with pytest.raises(UsageError, match="there is no node delta"):
        asyncio.run(forecast_export(services, ask_export(interrupted, "awq", node="delta")))
    with pytest.raises(UsageError, match="autoawq does not make gptq"):
        asyncio.run(forecast_export(services, ask_export(interrupted, "gptq", engine="autoawq")))
    with pytest.raises(UserError, match=r"none\.jsonl .* does not exist"):
        asyncio.run(
            forecast_export(
                services, ask_export(interrupted, "awq", calibration=str(tmp_path / "none.jsonl"))
            )
        )


def test_a_gpu_that_a_run_uses_is_left_alone(
    services: Services, interrupted: str, two_unlike: FakeCluster
) -> None:
    beta = two_unlike["beta"]
    small = GpuFacts(index=1, name="NVIDIA GeForce RTX 3060", uuid="s", memory_bytes=12 * GIB)
    use = GpuUse(uuid="g", name="run poems-2", run_id="poems-2")

    def look(to: str = "awq", **changes: object) -> PlacePlan:
        beta.facts_now = replace(beta.facts_now, **changes)  # type: ignore[arg-type]
        found = plan(services, interrupted, to)
        return next(place for place in found.places if place.node == "beta")

    alone = look()
    assert (alone.note, (alone.vram_bytes or 0) > GIB) == ("", True)
    busy = look(gpu_uses=(use,))
    assert busy.note == "run poems-2 uses its GPU, so its CPU does the work"
    assert busy.vram_bytes is None
    assert (busy.seconds or 0.0) > 2 * (alone.seconds or 0.0)
    assert describe_place(busy).endswith(f"; {busy.note}")
    assert look("merged").note == "", "which is the CPU's work anyway"
    other = look(gpus=(*beta.facts_now.gpus, small))
    assert (other.note, other.vram_bytes is not None) == ("", True)


def test_experts_that_nf4_leaves_in_16_bits_are_named(
    services: Services, interrupted: str, two_unlike: FakeCluster, spec: RunSpec
) -> None:
    config = {**LLAMA_7B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    Path(spec.model, "config.json").write_text(json.dumps(config))
    found = plan(services, interrupted, "nf4")
    assert "The experts stay in 16 bits" in describe_plan(found)[1]
    assert plan(services, interrupted, "gguf", "Q8_0").left_wide == ""


def test_why_not_is_said_of_every_node(
    services: Services, interrupted: str, two_unlike: FakeCluster
) -> None:
    two_unlike["alpha"].reachable = False
    beta = two_unlike["beta"]
    beta.facts_now = replace(beta.facts_now, memory_bytes=2 * GIB, disk_free_bytes=9 * GIB)
    found = plan(services, interrupted, "gguf", "Q4_K_M")
    assert found.best is None
    why = {one.node: " ".join(one.problems) for one in found.places}
    assert why["alpha"].startswith("does not answer")
    assert "C++ compiler" in why["beta"]
    found = plan(services, interrupted, "gguf", "Q8_0")
    why = {one.node: " ".join(one.problems) for one in found.places}
    assert "on its disk, and 9.0 GiB are free" in why["beta"]
    assert "of memory, and 1.0 GiB are free" in why["beta"]
    beta.facts_now = replace(beta.facts_now, memory_available_bytes=GIB // 2)  # a run has the rest
    found = plan(services, interrupted, "gguf", "Q8_0")
    why = {one.node: " ".join(one.problems) for one in found.places}
    assert "of memory, and 512 MiB are free" in why["beta"]


def test_what_an_export_measured_corrects_the_next_forecast(
    services: Services, interrupted: str, two_unlike: FakeCluster, tmp_path: Path
) -> None:
    before = plan(services, interrupted, "merged")
    assert before.best is not None
    assert before.best.seconds is not None
    asyncio.run(export_run(services, ask_export(interrupted), tmp_path / "x"))
    (made,) = services.artifacts.all()
    assert made.measured is not None
    done = [{**one, "seconds": one["seconds"] / 2} for one in made.measured["forecast"][1:]]
    half = {"phases": [*done, {"name": "of another version", "seconds": 1e6, "ram_bytes": 1}]}
    services.artifacts.forget(made)
    services.artifacts.add(replace(made, measured={**made.measured, **half}, copies=()))
    after = plan(services, interrupted, "merged")
    where = next(one for one in after.places if one.node == made.measured["node"])
    assert where.learned == f"1 past run of merged on {where.node}"
    assert where.seconds == pytest.approx(before.best.seconds * (0.5 + 0.5) / 1.5, rel=0.01)


def test_each_engine_learns_from_its_own_exports(
    services: Services, interrupted: str, two_unlike: FakeCluster, tmp_path: Path
) -> None:
    def foretell(engine: Engine) -> PlacePlan:
        found = asyncio.run(
            forecast_export(services, ask_export(interrupted, "awq", engine=engine))
        ).best
        assert found is not None
        return found

    before = foretell("autoawq")
    asyncio.run(
        export_run(services, ask_export(interrupted, "awq", engine="autoawq"), tmp_path / "x")
    )
    (made,) = services.artifacts.all()
    assert made.measured is not None
    assert made.measured["maker"] == "autoawq"
    phases = [{**one, "seconds": one["seconds"] * 2} for one in made.measured["forecast"]]
    services.artifacts.forget(made)
    services.artifacts.add(replace(made, measured={**made.measured, "phases": phases}, copies=()))
    after, other = foretell("autoawq"), foretell("gptqmodel")
    assert after.learned == f"1 past run of autoawq on {after.node}"
    assert (after.seconds or 0) > 1.2 * (before.seconds or 0)
    assert "autoawq" not in other.learned


def test_a_base_of_wide_values_takes_twice_the_disk(
    services: Services, interrupted: str, two_unlike: FakeCluster, spec: RunSpec
) -> None:
    def merged_bytes() -> int:
        found = plan(services, interrupted, "awq").made
        assert found is not None
        return found.merged_bytes

    usual, config = merged_bytes(), Path(spec.model, "config.json")
    assert usual == 2 * 6_738_415_616
    for said in ({"dtype": "float32"}, {"torch_dtype": "float32"}):
        config.write_text(json.dumps({**LLAMA_7B, **said}))
        assert merged_bytes() == 2 * usual
    config.write_text(json.dumps({**LLAMA_7B, "torch_dtype": "bfloat16"}))
    assert merged_bytes() == usual
    config.write_text(json.dumps(LLAMA_7B))
    with Path(spec.model, "model.safetensors").open("wb") as file:
        file.truncate(2 * usual)  # with nothing in it
    assert merged_bytes() == 2 * usual


@pytest.mark.parametrize("to", ["nf4", "awq", "gptq"])
def test_a_result_that_memory_does_not_hold_is_proved_from_the_disk(
    services: Services, interrupted: str, two_unlike: FakeCluster, spec: RunSpec, to: str
) -> None:
    Path(spec.model, "config.json").write_text(json.dumps(LLAMA_70B))
    card = GpuFacts(index=0, name="NVIDIA GeForce RTX 4070", uuid="g", memory_bytes=12 * GIB)
    two_unlike["alpha"].reachable = False
    beta = two_unlike["beta"]
    beta.facts_now = replace(
        beta.facts_now, gpus=(card,), memory_bytes=32 * GIB, disk_free_bytes=400 * GIB
    )
    place = plan(services, interrupted, to).best
    assert place is not None
    assert place.is_unpacked
    assert max(place.ram_bytes or 0, place.vram_bytes or 0) < 32 * GIB
    said = describe_place(place)
    assert said.endswith("measured from the disk, and its speed is not measured")
    merged, packed = 2 * 69e9, 35e9
    assert place.node_bytes is not None
    assert place.node_bytes > 2 * merged + packed
    beta.facts_now = replace(beta.facts_now, disk_free_bytes=250 * GIB)
    (found,) = (one for one in plan(services, interrupted, to).places if one.node == "beta")
    assert len(found.problems) == 1
    assert "on its disk, and 250 GiB are free" in found.problems[0]
    # A card that holds the result needs no disk for it.
    large = replace(card, name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB)
    beta.facts_now = replace(beta.facts_now, gpus=(large,), memory_bytes=64 * GIB)
    place = plan(services, interrupted, to).best
    assert place is not None
    assert not place.is_unpacked
