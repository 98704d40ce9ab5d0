"""Signatures equal those of `cryptography`, and nothing else verifies."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from agents.contract.signatures import make_seed, public_key, sign, verify
from tests.draws import random_bytes


@pytest.mark.parametrize("size", [0, 1, 63, 1000])
def test_keys_and_signatures_are_those_of_the_library(size: int) -> None:
    seed, message = random_bytes(32, of=f"seed {size}").hex(), random_bytes(size, of="message")
    known = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))
    public = known.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    assert public_key(seed) == public
    assert sign(seed, message) == known.sign(message).hex()
    assert verify(public, message, known.sign(message).hex())


def test_another_message_key_or_signature_does_not_verify() -> None:
    seed = make_seed()
    key, signature = public_key(seed), sign(seed, b"resume")
    assert verify(key, b"resume", signature)
    assert not verify(key, b"resumed", signature)
    assert not verify(public_key(make_seed()), b"resume", signature)
    for position in (0, 63, 64, 127):
        digit = "0" if signature[position] != "0" else "1"
        assert not verify(key, b"resume", signature[:position] + digit + signature[position + 1 :])


@pytest.mark.parametrize(
    "wrong", ["", "xyz", "00" * 31, "ff" * 32, "00" * 63, "ff" * 64, "\u0660" * 64]
)
def test_what_is_no_key_or_signature_verifies_nothing(wrong: str) -> None:
    seed = make_seed()
    assert not verify(wrong, b"", sign(seed, b""))
    assert not verify(public_key(seed), b"", wrong)


def test_a_signature_beyond_the_order_is_refused() -> None:
    # Otherwise a second signature of the same message could be made without the key.
    seed = make_seed()
    signature = bytes.fromhex(sign(seed, b"once"))
    order = 2**252 + 27742317777372353535851937790883648493
    answer = int.from_bytes(signature[32:], "little") + order
    assert not verify(
        public_key(seed), b"once", (signature[:32] + answer.to_bytes(32, "little")).hex()
    )
