"""A home signs what it launches with a key that never leaves it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import stat
import sys
from pathlib import Path

import pytest

from agents.contract.election import is_majority
from agents.contract.mandate import closing_bytes, prove
from agents.contract.messages import to_wire
from agents.contract.run import AttemptIntent
from agents.contract.signatures import public_key, verify
from agents.errors import ExpectedError
from agents.supervisor.proof import require_proved
from app.doctor.report import collect_report
from app.errors import UserError
from app.runs.lifecycle.stop import stop_run
from app.runs.mandates import MasterKey
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster


def intents(cluster: FakeCluster) -> list[AttemptIntent]:
    return [node.intents[0] for node in cluster.nodes.values()]


def test_each_node_gets_one_mandate_and_a_key_of_its_own(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    sent = intents(cluster)
    (proof,) = {repr(intent.proof): intent.proof for intent in sent}.values()
    assert proof is not None
    proved = prove(proof, is_majority)
    assert proved is not None
    assert proved.mandate.spec == services.runs.get(run_id).spec
    assert (proved.mandate.run_id, proved.attempt) == (run_id, 1)
    assert proved.master_key == services.key.public
    assert proved.nodes == cluster.names()
    assert len({intent.node_seed for intent in sent}) == len(sent)
    for intent in sent:
        assert public_key(intent.node_seed) == proved.mandate.node_keys[intent.node]
        require_proved(intent)


def test_a_status_repeats_the_proof_but_no_private_key(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    for node in cluster.nodes.values():
        status = node.attempts[run_id, 1]
        assert services.key.prove(status) is not None
        assert node.intents[0].node_seed not in json.dumps(to_wire(status))
        assert node.intents[0].node_seed not in repr(node.intents[0])


def test_a_node_refuses_an_intent_that_its_proof_does_not_allow(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    intent, other = intents(cluster)[:2]
    spec = dataclasses.replace(intent.spec, learning_rate=intent.spec.learning_rate / 2)
    ranks = tuple(dataclasses.replace(rank, device_id="GPU-other") for rank in intent.ranks)
    for change in (
        {"run_id": "20260101-000000-abc"},
        {"attempt": 7},
        {"spec": spec},
        {"ranks": ranks},
        {"node": "delta"},
        {"node_seed": other.node_seed},
        {"node_seed": "nothing"},
    ):
        with pytest.raises(ExpectedError, match="not what the master signed"):
            require_proved(dataclasses.replace(intent, **change))
    assert intent.proof is not None
    forged = dataclasses.replace(intent.proof.mandate, signature="00" * 64)
    proof = dataclasses.replace(intent.proof, mandate=forged)
    with pytest.raises(ExpectedError, match="signature is not valid"):
        require_proved(dataclasses.replace(intent, proof=proof))
    require_proved(dataclasses.replace(intent, proof=None))  # of a master of an earlier version


def test_the_key_is_private_and_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    public = MasterKey(path).public
    assert MasterKey(path).public == public
    assert public not in path.read_text("ascii")
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("no key", "ascii")
    with pytest.raises(UserError, match="the key of this home is damaged"):
        _ = MasterKey(path).public
    assert path.read_text("ascii") == "no key", "a damaged key is never replaced by itself"


def test_a_key_that_is_missing_or_damaged_proves_nothing_and_ends_nothing(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    status, path = cluster["alpha"].attempts[run_id, 1], services.paths.master_key
    path.write_text("no key", "ascii")
    assert MasterKey(path).prove(status) is None
    path.unlink()
    assert MasterKey(path).prove(status) is None
    assert not path.exists()


def test_two_processes_that_need_a_key_at_once_make_one(tmp_path: Path) -> None:
    async def both() -> list[str]:
        keys = [MasterKey(tmp_path / "master.key") for _ in range(8)]
        return await asyncio.gather(*(asyncio.to_thread(lambda k=k: k.public) for k in keys))

    assert len(set(asyncio.run(both()))) == 1


def test_a_report_has_no_key(services: Services, run_id: str) -> None:
    path = services.paths.master_key
    seed = path.read_text("ascii")
    parts = asyncio.run(collect_report(services.paths.home))
    assert any(path.name in part.text for part in parts), "the file is listed"
    assert not [part.name for part in parts if seed in part.text]


def test_a_stop_of_a_user_is_signed_for_nodes_that_miss_it(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    before = [*cluster["alpha"].closings]
    assert not any(before), "as long as the run may be recovered"
    asyncio.run(stop_run(services, run_id))
    closings = {closing for closing in cluster["alpha"].closings if closing}
    assert closings
    key = services.key.public
    assert all(verify(key, closing_bytes(run_id, 1), closing) for closing in closings)
    assert not any(verify(key, closing_bytes(run_id, 2), closing) for closing in closings)
