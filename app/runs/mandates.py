"""The key of this master, the mandates that it signs, and the proofs of attempts that it verifies.

Each launch gets a mandate (`agents.contract.mandate`), which every node repeats in its status. What
a node says about attempts counts only with it: a node can neither invent a run of this home nor
alter one. The private key is a file of this home and never leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.contract.election import is_majority
from agents.contract.mandate import (
    AttemptProof,
    Mandate,
    ProvedAttempt,
    closing_bytes,
    prove,
    sign_mandate,
)
from agents.contract.run import AttemptStatus, RankPlacement
from agents.contract.signatures import make_seed, public_key
from app.errors import UserError
from app.filelock import locked
from app.paths import replace_text
from app.storage.runs import RunRecord

MAX_REMEMBERED = 1000
"""Maximum number of verified proofs that are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchKeys:
    """Proof of an attempt, and the private key of each of its nodes."""

    proof: AttemptProof
    seeds: Mapping[str, str]


class MasterKey:
    """Key of a home, made at its first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pair: tuple[str, Callable[[bytes], bytes]] | None = None
        self._proved: dict[str, ProvedAttempt | None] = {}

    @property
    def public(self) -> str:
        """Public key, in hexadecimal.

        Raises:
            UserError: the file of the key is damaged, or cannot be read or made.
        """
        return self._load()[0]

    def sign_launch(self, run: RunRecord, ranks: tuple[RankPlacement, ...]) -> LaunchKeys:
        """Sign attempt `run.attempt` on these ranks, with a new key for each of their nodes.

        Raises:
            UserError: as `public`.
        """
        public, sign = self._load()
        seeds = {node: make_seed() for node in dict.fromkeys(place.node for place in ranks)}
        mandate = Mandate(
            run_id=run.run_id,
            attempt=run.attempt,
            spec=run.spec,
            places=tuple((place.node, place.device_id) for place in ranks),
            node_keys={node: public_key(seed) for node, seed in seeds.items()},
        )
        signed = sign_mandate(mandate, public, lambda message: sign(message).hex())
        return LaunchKeys(proof=AttemptProof(mandate=signed), seeds=seeds)

    def sign_closing(self, run_id: str, attempt: int) -> str:
        """Sign that nodes never recover an attempt, so that those who miss a stop respect it.

        Empty without a usable key, which must not keep the user from stopping a run.
        """
        try:
            _, sign = self._load()
        except UserError:
            return ""
        return sign(closing_bytes(run_id, attempt)).hex()

    def prove(self, status: AttemptStatus, trusted: str = "") -> ProvedAttempt | None:
        """Return the attempt that this home has allowed, or None without a valid proof of it.

        The proof has to be about the run and attempt of the status, and to include its node.

        Args:
            status: what a node lists, with the node's name here.
            trusted: public key of another master whose signature counts as well; empty: none.
        """
        proof = status.proof
        if proof is None or proof.mandate.key not in (self._find_public(), trusted):
            return None
        # A verification takes milliseconds, and a watched node repeats its proof each second.
        text = repr(proof)
        if text not in self._proved:
            if len(self._proved) >= MAX_REMEMBERED:
                self._proved.clear()
            self._proved[text] = prove(proof, is_majority)
        found = self._proved[text]
        if found is None or (found.mandate.run_id, found.attempt) != (
            status.run_id,
            status.attempt,
        ):
            return None
        return found if status.node in found.nodes else None

    def _find_public(self) -> str:
        """Return the public key; empty if there is no usable key, which then has signed nothing."""
        # Not made here: a full disk must not end the watch of runs.
        if self._pair is None and not self._path.exists():
            return ""
        try:
            return self.public
        except UserError:
            return ""

    def _load(self) -> tuple[str, Callable[[bytes], bytes]]:
        if self._pair is None:
            # On use: lists of runs need neither.
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

            private = Ed25519PrivateKey.from_private_bytes(self._read_seed())
            self._pair = private.public_key().public_bytes_raw().hex(), private.sign
        return self._pair

    def _read_seed(self) -> bytes:
        try:
            # Two processes must not make two keys, of which one would sign and be lost.
            with locked(self._path.with_name(f"{self._path.name}.lock")):
                if not self._path.exists():
                    replace_text(self._path, make_seed(), is_synced=True)
                seed = bytes.fromhex(self._path.read_text("ascii"))
        except ValueError:
            seed = b""
        except OSError as error:
            raise UserError(
                f"the key of this home cannot be read or made: {error}",
                "Free space or repair its permissions.",
                where=str(self._path),
            ) from error
        if len(seed) != 32:
            raise UserError(
                "the key of this home is damaged, so its runs cannot be told from those of others",
                f"Restore {self._path} from a backup, or delete it: a new key is made, and runs "
                "that only their nodes remember are then found as not yours.",
                where=str(self._path),
            )
        return seed
