"""Starts on loopback nodes with played speeds do what the plan said: subset, mode and order.

Run by hand, two minutes: `pytest -m campaign tests/app/test_planned_starts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agents.contract.node import Calibration
from app.paths import Paths
from app.storage.database import open_database
from app.storage.planning import LinkRecord, PlanningStore
from tests.fakes.site import Site, open_site

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]
NODES = ("alpha", "beta", "gamma")
FAST, SLOW = 4e11, 2e10
"""Played rates of matrix products, in FLOP per second."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("planned"), NODES) as opened:
        yield opened


def play(site: Site, rates: dict[str, float], bytes_per_s: float) -> None:
    """Store measurements as if the nodes were PCs of these speeds on links of that speed."""
    store = PlanningStore(open_database(Paths(home=site.home).database))
    for node, rate in rates.items():
        found = Calibration(card="CPU", matrix_flops_per_s=rate)
        store.save_calibration(node, "cpu", found)
    store.save_links([
        LinkRecord(node=one, peer=other, round_trip_s=0.0003, bytes_per_s=bytes_per_s,
                   measured_s=0.0)
        for one in NODES for other in NODES if one != other
    ])  # fmt: skip


def test_a_start_trains_on_the_gpus_of_the_plan_in_their_order(site: Site) -> None:
    run_file = str(site.write_run_file(2, batch_sequences=12, nodes="all"))
    kinds = (
        ({"alpha": SLOW, "beta": FAST, "gamma": SLOW}, 1e4),  # one fast PC and slow links
        ({"alpha": SLOW, "beta": SLOW, "gamma": SLOW}, 1e9),
        ({"alpha": SLOW, "beta": FAST, "gamma": FAST}, 1e9),
    )
    seen = set()
    for rates, bytes_per_s in kinds:
        play(site, rates, bytes_per_s)
        chosen = site.answer("plan", run_file)["chosen"]
        planned = [gpu["node"] for gpu in chosen["gpus"]]
        watched = site.rackless("start", run_file, "--watch", "--json")
        assert watched.code == 0, watched.problem
        run = watched.lines[-1]["run"]
        assert list(run["nodes"]) == list(dict.fromkeys(planned))
        texts = [line["text"] for line in watched.lines if line["kind"] == "event"]
        assert not any(text.startswith("plan: since plan") for text in texts)
        assert all(site.ranks_of(node, run["run_id"]) == [] for node in NODES)
        attempt = {node: site.attempt(node, run["run_id"], 1).exists() for node in NODES}
        assert {node for node, is_used in attempt.items() if is_used} == set(planned)
        seen.add(tuple(planned))
    assert {("beta",), NODES} <= seen
