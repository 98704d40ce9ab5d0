"""Purchases ranked by the speed that they add for their price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.library.cluster_file import parse_cluster
from app.library.configs import read_known
from app.planning.candidate import DataSize, PlanRequest
from app.planning.hardware.cluster import Cluster
from app.planning.plan import make_plan
from app.planning.quick import plan_quickly
from app.planning.shape.model_shape import read_shape
from app.planning.upgrades import PricedPart, PriceList, Upgrade, Upgrades, rank_upgrades

CONFIGS = {name: entry["config"] for entry in read_known() for name in entry["names"]}
PRICES = PriceList(
    offers=(
        PricedPart(kind="gpu", name="RTX 3060", price=260),
        PricedPart(kind="gpu", name="RTX 4090", price=1900, slots=4),
        PricedPart(kind="ram", name="32", price=120),
        PricedPart(kind="nic", name="2.5", price=25),
        PricedPart(kind="nic", name="10", price=90),
        PricedPart(kind="switch", name="2.5", price=70),
        PricedPart(kind="pc", name="32", price=500),
    ),
    currency="EUR",
    note="prices are guesses",
)


def pcs(*cards: str, gbit: float = 1.0) -> Cluster:
    nodes = "".join(
        f"  - {{name: pc{place}, gpus: [{card}], ram_gib: 32}}\n"
        for place, card in enumerate(cards)
    )
    return parse_cluster(f"nodes:\n{nodes}links: {{default: {{gbit_per_s: {gbit}}}}}\n")


def request(model: str, cluster: Cluster, **changes: object) -> PlanRequest:
    spec = RunSpec(model="m", data=DataSpec(train="t"), adapter=AdapterSpec(kind="qlora"))
    return PlanRequest(
        spec=replace(spec, **changes),  # type: ignore[arg-type]
        shape=read_shape(CONFIGS[model]),
        data=DataSize(num_rows=1000, mean_tokens=345.0),
        cluster=cluster,
    )


def rank(asked: PlanRequest, prices: PriceList = PRICES) -> Upgrades:
    return rank_upgrades(asked, prices, make_plan(asked).chosen)


def named(found: Upgrades, text: str) -> Upgrade:
    return next(one for one in found.found if one.text == text)


def test_each_kind_of_purchase_is_ranked_by_gain_for_its_price() -> None:
    found = rank(request("meta-llama/Llama-3.1-8B", pcs("RTX 3060", "RTX 4070", "RTX 3060")))

    assert {one.kind for one in found.found} == {"gpu", "ram", "nic", "pc"}
    gains = [one.gain_per_100 or 0.0 for one in found.found]
    assert gains == sorted(gains, reverse=True)
    assert found.base is not None
    for one in found.found:
        assert one.tokens_per_s == pytest.approx(found.base.tokens_per_s + one.gain_tokens_per_s)
        assert one.gain_per_100 == pytest.approx(100 * one.gain_tokens_per_s / one.price)
    assert {(one.kind, one.name) for one in found.best_places} == {
        (one.kind, one.name) for one in found.useful
    }


def test_a_purchase_names_its_place_power_and_slots() -> None:
    found = rank(request("meta-llama/Llama-3.1-8B", pcs("RTX 3060", "RTX 4070", "RTX 3060")))

    added = named(found, "RTX 4090 in a free slot of pc1")
    assert added.caveats == ("needs 4 slots and 450 W more",)
    assert named(found, "RTX 4090 instead of RTX 3060 in pc0").caveats == (
        "needs 4 slots and 280 W more",
    )
    # Of equal PCs only one is named, and no card is replaced by one that is worse in all.
    assert not any("pc2" in one.text and one.kind == "gpu" for one in found.found)
    assert not any("RTX 3060 instead of" in one.text for one in found.found)
    network = named(found, "2.5 Gb/s: 3 network cards and a switch")
    assert network.price == 3 * 25 + 70
    # The list has no switch for 10 Gb/s, which three PCs would need.
    assert not any("10 Gb/s" in one.text for one in found.found)


def test_two_pcs_need_a_cable_and_a_laptop_takes_no_card() -> None:
    found = rank(request("Qwen/Qwen2.5-0.5B", pcs("RTX 4070 Laptop GPU", "RTX 4070 Laptop GPU")))

    assert named(found, "10 Gb/s: 2 network cards and a cable").price == 180
    assert all(one.kind != "gpu" for one in found.found)
    # One PC has no network to improve.
    assert all(one.kind != "nic" for one in rank(request("Qwen/Qwen2.5-0.5B", pcs("L40S"))).found)


def test_a_purchase_that_makes_a_run_fit_gains_all_its_speed() -> None:
    asked = request("Qwen/Qwen2.5-7B", pcs("RTX 3050 Laptop GPU"), parallel="single")
    assert make_plan(asked).chosen is None

    found = rank(asked)

    assert found.base is None
    best = found.useful[0]
    assert best.candidate is not None
    assert best.gain_tokens_per_s == best.tokens_per_s == best.candidate.tokens_per_s
    assert best.text == "another PC with RTX 4090 and 32 GiB of RAM"


def test_listed_nodes_and_shares_do_not_exclude_what_is_bought() -> None:
    cluster = pcs("RTX 3060", "RTX 3060")
    listed = request("Qwen/Qwen2.5-0.5B", cluster, nodes=("pc0:0", "pc1"), shares=(0.9, 0.1))

    best = rank(listed).useful[0]

    assert best.gain_tokens_per_s > 0
    # A PC that the run does not list is not changed.
    only = rank(request("Qwen/Qwen2.5-0.5B", cluster, nodes=("pc0",)))
    assert not any("pc1" in one.text for one in only.found)


def test_a_card_that_costs_nothing_comes_first() -> None:
    free = PriceList(offers=(PricedPart(kind="gpu", name="RTX 3060", price=0), *PRICES.offers[1:]))

    best = rank(request("meta-llama/Llama-3.1-8B", pcs("RTX 3060")), free).found[0]

    assert (best.name, best.gain_per_100) == ("RTX 3060", None)


def test_many_pcs_are_bounded() -> None:
    cards = ("RTX 3060", "RTX 3070", "RTX 3080", "RTX 3090", "RTX 4070", "RTX 4080")
    found = rank(request("Qwen/Qwen2.5-0.5B", pcs(*cards)))

    assert len(found.found) == 12
    assert any("less promising changes were not planned" in note for note in found.notes)


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B"])
def test_a_quick_plan_is_one_that_fits_and_close_to_the_whole_search(model: str) -> None:
    asked = request(model, pcs("RTX 3060", "RTX 3090", "RTX 4070", "RTX 4080", gbit=10.0))

    quick, whole = plan_quickly(asked), make_plan(asked).chosen

    assert quick is not None
    assert whole is not None
    assert quick.fits
    assert quick.tokens_per_s >= 0.8 * whole.tokens_per_s
