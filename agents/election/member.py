"""Signatures of requests between nodes of an attempt, and of their answers.

All nodes of an attempt share its credential, so TLS proves only that a caller is one of them. Which
one it is, is proved by a signature with the key that its master made for each node. It covers the
sender, the receiver, run and attempt, and a number that is used once, so a request to one node is
worth nothing at another one, or a second time.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from agents.contract.signatures import sign, verify
from agents.contract.wire import WireError

MAX_SEEN = 10_000
"""Maximum number of requests of one node to another, beyond those of any attempt."""
_OWN_FIELDS = ("sender", "nonce", "seal")


class ElectionMember:
    """One node of an attempt: it signs as itself, and knows the public keys of all nodes."""

    def __init__(
        self, run_id: str, attempt: int, node: str, seed: str, keys: Mapping[str, str]
    ) -> None:
        self.node = node
        self._about = (run_id, attempt)
        self._seed = seed
        self._keys = keys
        self._seen: dict[str, set[str]] = {name: set() for name in keys}
        self._lock = threading.Lock()

    def sign_request(self, receiver: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the request to `receiver` with this node's name and its signature, the seal."""
        named = {**request, "sender": self.node, "nonce": secrets.token_hex(16)}
        return {**named, "seal": sign(self._seed, self._bytes("request", receiver, named))}

    def check_request(self, request: dict[str, Any]) -> str:
        """Return the node that signed a request to this one.

        Raises:
            WireError: no node of the attempt has signed it for this node, or it is repeated.
        """
        sender, seal = str(request.get("sender")), str(request.get("seal"))
        unsigned = {name: value for name, value in request.items() if name != "seal"}
        is_named = isinstance(request.get("nonce"), str)
        if not is_named or not self._verify(sender, "request", self.node, unsigned, seal):
            raise WireError("a request must be signed by a node of this attempt")
        if request.get("kind") != "state":  # a poll changes nothing, and there are many
            with self._lock:
                seen = self._seen[sender]
                if request["nonce"] in seen or len(seen) >= MAX_SEEN:
                    raise WireError("a request must not be repeated")
                seen.add(request["nonce"])
        return sender

    def sign_answer(self, request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request with this node's signature."""
        named = {**answer, "nonce": request.get("nonce")}
        receiver = str(request.get("sender"))
        return {**named, "seal": sign(self._seed, self._bytes("answer", receiver, named))}

    def check_answer(
        self, sender: str, request: dict[str, Any], answer: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the answer that `sender` gave to a request of this node.

        Raises:
            WireError: it is not signed by `sender`, or answers another request.
        """
        unsigned = {name: value for name, value in answer.items() if name != "seal"}
        seal = str(answer.get("seal"))
        is_fitting = answer.get("nonce") == request["nonce"]
        if not is_fitting or not self._verify(sender, "answer", self.node, unsigned, seal):
            raise WireError(f"the answer is not signed by {sender}")
        return {name: value for name, value in answer.items() if name not in _OWN_FIELDS}

    def _verify(
        self, sender: str, what: str, receiver: str, body: dict[str, Any], seal: str
    ) -> bool:
        key = self._keys.get(sender, "")
        # The sender of an answer is known, and not part of it.
        return verify(key, self._bytes(what, receiver, body, sender), seal)

    def _bytes(
        self, what: str, receiver: str, body: dict[str, Any], sender: str | None = None
    ) -> bytes:
        about = [*self._about, sender or self.node, receiver, body]
        # One spelling, whatever the order in which the fields arrive.
        text = json.dumps(about, sort_keys=True, separators=(",", ":"))
        return f"rackless {what}\n{text}".encode("ascii")
