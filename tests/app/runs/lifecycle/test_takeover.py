"""A second master only watches a run until it is asked to take it over; then the first one does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.errors import UserError
from app.runs.lifecycle.reconcile import reconcile_run, search_nodes
from app.runs.lifecycle.resume import Automatic
from app.runs.lifecycle.takeover import take_over_run
from app.runs.services import Services
from tests.fakes.adopting import adopt, lose_store
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.resuming import resume_run


@pytest.fixture
def second(tmp_path: Path, cluster: FakeCluster, run_id: str) -> Services:
    """Another master, whose user has adopted the run."""
    made = make_services(tmp_path / "second", cluster)
    asyncio.run(adopt(made, run_id))
    return made


def texts(services: Services, run_id: str) -> list[str]:
    return [event.text for event in services.runs.store.events(run_id)]


def resumes(services: Services, run_id: str) -> bool:
    """Return whether this master would resume the run after a loss."""
    asyncio.run(reconcile_run(services, run_id))
    return services.recoveries.is_pending(run_id)


def test_only_the_master_that_took_the_run_over_resumes_it(
    services: Services, second: Services, cluster: FakeCluster, run_id: str
) -> None:
    assert not second.runs.is_ours(second.runs.get(run_id))
    assert "only watched here" in " ".join(texts(second, run_id))
    asyncio.run(take_over_run(second, run_id))
    assert second.runs.is_ours(second.runs.get(run_id))
    assert any(f"from your home {services.paths.home}" in text for text in texts(second, run_id))

    cluster["gamma"].set_state(run_id, 1, "lost")
    assert not resumes(services, run_id)
    (told,) = [text for text in texts(services, run_id) if "taken over by" in text]
    assert str(second.paths.home) in told
    assert resumes(second, run_id)
    with pytest.raises(UserError, match="was taken over by your home"):
        asyncio.run(resume_run(services, run_id))
    assert all(len(node.intents) <= 1 for node in cluster.nodes.values()), "nothing was launched"


def test_a_loss_that_was_to_be_recovered_is_left_to_the_new_master(
    services: Services, second: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["gamma"].set_state(run_id, 1, "lost")
    assert resumes(services, run_id)
    asyncio.run(take_over_run(second, run_id))
    with pytest.raises(UserError, match="was taken over by"):
        asyncio.run(resume_run(services, run_id, automatic=Automatic()))
    assert not services.recoveries.is_pending(run_id)


def test_a_run_can_be_taken_back(
    services: Services, second: Services, cluster: FakeCluster, run_id: str
) -> None:
    asyncio.run(take_over_run(second, run_id))
    asyncio.run(take_over_run(services, run_id))
    assert services.runs.is_ours(services.runs.get(run_id))
    cluster["gamma"].set_state(run_id, 1, "lost")
    assert not resumes(second, run_id)
    assert resumes(services, run_id)
    with pytest.raises(UserError, match="this master's own"):
        asyncio.run(take_over_run(services, run_id))


def test_most_nodes_have_to_know_of_it(
    services: Services, second: Services, cluster: FakeCluster, run_id: str
) -> None:
    for name in ("beta", "gamma"):
        cluster[name].reachable = False
    with pytest.raises(UserError, match="alpha can be told, and its first master may still"):
        asyncio.run(take_over_run(second, run_id))
    assert resumes(services, run_id) is False
    assert services.runs.is_ours(services.runs.get(run_id)), "nobody was told"
    cluster["beta"].reachable = True
    asyncio.run(take_over_run(second, run_id))
    assert "gamma could not be told that the run was taken over" in texts(second, run_id)


def test_a_master_that_lost_its_database_still_owns_its_runs(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    home = services.paths.home
    for path in home.glob("rackless.sqlite3*"):
        path.unlink()
    again = make_services(home, cluster)
    asyncio.run(search_nodes(again, cluster.names()))
    assert again.runs.is_ours(again.runs.get(run_id))
    cluster["gamma"].set_state(run_id, 1, "lost")
    assert resumes(again, run_id)


def test_a_run_that_is_found_again_ended_when_its_nodes_say(
    tmp_path: Path, services: Services, cluster: FakeCluster, run_id: str
) -> None:
    for number, node in enumerate(cluster.nodes.values()):
        node.set_state(run_id, 1, "done", ended_s=2000.0 + number)
    again = lose_store(services, tmp_path / "again", cluster)
    asyncio.run(search_nodes(again, cluster.names()))
    run = again.runs.get(run_id)
    assert (run.state, run.ended_s) == ("done", 2002.0)
