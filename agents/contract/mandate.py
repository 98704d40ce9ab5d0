"""Proof of who started an attempt: the signature of its master, or the consents of its nodes.

A master signs one mandate per attempt and sends it with every intent. Its private key never leaves
its home, so a node can neither alter a mandate nor invent one. If nodes recover an attempt without
a master, each of them consents once with its own key, and the consents of a majority replace the
signature; see `agents.contract.election`.

A signature covers the exact text that was signed. So a later version, which adds fields, still
verifies the mandates of earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.contract.json_text import parse_json
from agents.contract.names import MAX_ATTEMPT, check_name, check_number
from agents.contract.signatures import verify
from agents.contract.spec import RunSpec
from agents.contract.wire import WireError, from_wire, to_wire

MIN_NODES = 3
"""Minimum number of nodes for recovery without a master. Of two nodes, the one without rank 0 can
never be sure that the other has stopped, so only the master recovers their attempt."""
MAX_TEXT_CHARACTERS = 1 << 20
"""Maximum length of a mandate, beyond any run file's."""
MAX_HANDOVERS = 1000
"""Maximum number of attempts in a row that nodes started, far beyond the limit of recoveries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mandate:
    """An attempt as its master allows it."""

    run_id: str
    attempt: int
    spec: RunSpec
    places: tuple[tuple[str, str], ...]
    """Node and device id of each rank, in rank order."""
    node_keys: dict[str, str]
    """Public key of each node for this attempt and those that recover it."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes in rank order."""
        return tuple(dict.fromkeys(node for node, _ in self.places))


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedMandate:
    text: str
    """JSON of the `Mandate`, exactly as it was signed."""
    key: str
    """Public key of the master."""
    signature: str

    def check_foreign(self) -> None:
        if len(self.text) > MAX_TEXT_CHARACTERS:
            raise ValueError("a mandate is too long")

    def read(self) -> Mandate | None:
        """Return the mandate, or None if its signature is not that of `key`."""
        if not verify(self.key, _mandate_bytes(self.text), self.signature):
            return None
        try:
            return from_wire(Mandate, parse_json(self.text), "mandate")
        except WireError:
            return None


def sign_mandate(
    mandate: Mandate, key: str, sign_with_key: Callable[[bytes], str]
) -> SignedMandate:
    """Return the mandate signed by the master whose public key is `key`."""
    text = json.dumps(to_wire(mandate))
    return SignedMandate(text=text, key=key, signature=sign_with_key(_mandate_bytes(text)))


def _mandate_bytes(text: str) -> bytes:
    # Prefixed, so that no signature of another kind of message is one of a mandate.
    return b"rackless mandate\n" + text.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """Start of an attempt by nodes: the consent of each node that takes part."""

    attempt: int
    replaces: int
    consents: dict[str, str]
    """Signature of `consent_bytes` by each node."""

    def check_foreign(self) -> None:
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)
        check_number("replaces", self.replaces, 1, MAX_ATTEMPT)
        for node in self.consents:
            check_name("consents", node)


def consent_bytes(run_id: str, attempt: int, replaces: int, node: str) -> bytes:
    """Return the bytes that `node` signs to consent to an attempt."""
    return f"rackless consent\n{run_id}\n{attempt}\n{replaces}\n{node}".encode("ascii")


def closing_bytes(run_id: str, attempt: int) -> bytes:
    """Return the bytes that a master signs so that nodes never recover an attempt."""
    return f"rackless closing\n{run_id}\n{attempt}".encode("ascii")


def checkpoint_bytes(
    run_id: str, attempt: int, step: int, manifest_sha256: str, node: str
) -> bytes:
    """Return the bytes that `node` signs when an attempt's ranks on it write a checkpoint."""
    about = f"{run_id}\n{attempt}\n{step}\n{manifest_sha256}\n{node}"
    return f"rackless checkpoint\n{about}".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptProof:
    """Proof that an attempt may run; travels in its intent and in each status."""

    mandate: SignedMandate
    handovers: tuple[Handover, ...] = ()
    """Recoveries by nodes since the mandate's attempt, oldest first."""

    def check_foreign(self) -> None:
        check_number("handovers", len(self.handovers), 0, MAX_HANDOVERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvedAttempt:
    """Verified content of an `AttemptProof`."""

    mandate: Mandate
    attempt: int
    nodes: tuple[str, ...]
    """Nodes of the attempt, in rank order."""
    master_key: str


def prove(
    proof: AttemptProof, is_majority: Callable[[Sequence[str], Sequence[str]], bool]
) -> ProvedAttempt | None:
    """Verify a proof; return None if any signature or consent is missing or false.

    Args:
        proof: what a node or a master presents.
        is_majority: `agents.contract.election.is_majority`.
    """
    mandate = proof.mandate.read()
    if mandate is None:
        return None
    attempt, nodes = mandate.attempt, mandate.nodes
    if proof.handovers and len(nodes) < MIN_NODES:
        return None  # one node alone would be the majority
    for handover in proof.handovers:
        if handover.replaces != attempt or handover.attempt <= attempt:
            return None
        for node, signature in handover.consents.items():
            message = consent_bytes(mandate.run_id, handover.attempt, attempt, node)
            if node not in nodes or not verify(mandate.node_keys.get(node, ""), message, signature):
                return None
        if not is_majority(tuple(handover.consents), nodes):
            return None
        attempt, nodes = handover.attempt, tuple(n for n in nodes if n in handover.consents)
    return ProvedAttempt(
        mandate=mandate, attempt=attempt, nodes=nodes, master_key=proof.mandate.key
    )
