"""Check on a node that an attempt is the one that its proof allows."""

from __future__ import annotations

from dataclasses import replace

from agents.contract.election import is_majority
from agents.contract.mandate import prove
from agents.contract.run import AttemptIntent
from agents.contract.signatures import public_key
from agents.errors import ExpectedError


def require_proved(intent: AttemptIntent) -> None:
    """Refuse an intent that differs from its proof; masters of earlier versions send no proof.

    Raises:
        ExpectedError: the proof is invalid, or allows another attempt, run, node or setting.
    """
    if intent.proof is None:
        return
    proved = prove(intent.proof, is_majority)
    if proved is None:
        raise _refuse(intent, "its signature is not valid")
    mandate = proved.mandate
    # Shares are stored by rank, so nodes that recover an attempt with fewer ranks drop them.
    specs = [mandate.spec]
    if intent.proof.handovers:
        specs.append(replace(mandate.spec, shares=None))
    places = tuple(place for place in mandate.places if place[0] in proved.nodes)
    checks = {
        "run": intent.run_id == mandate.run_id,
        "attempt": intent.attempt == proved.attempt,
        "settings": intent.spec in specs,
        "ranks": tuple((r.node, r.device_id) for r in intent.ranks) == places,
        "node": intent.node in proved.nodes,
        "key of the node": _owns(intent.node_seed, mandate.node_keys.get(intent.node)),
    }
    for what, fits in checks.items():
        if not fits:
            raise _refuse(intent, f"its {what} is not what the master signed")


def _owns(seed: str, key: str | None) -> bool:
    try:
        return public_key(seed) == key
    except ValueError:
        return False


def _refuse(intent: AttemptIntent, why: str) -> ExpectedError:
    return ExpectedError(
        f"Attempt {intent.attempt} of run {intent.run_id} is not started on node {intent.node}: "
        f"{why}.",
        f"Resume it on the PC that started it: rackless runs resume {intent.run_id}",
    )
