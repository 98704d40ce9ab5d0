"""Ed25519 signatures with the standard library alone, because nodes have no `cryptography`.

From RFC 8032, section 6, in extended coordinates. A signature or its verification takes a few
milliseconds. The arithmetic is not in constant time: sign only with keys whose other holders could
not measure it, such as a node's key of one attempt. The master signs with `cryptography`.

Keys and signatures are written in hexadecimal: a seed or a public key has 64 digits, a signature
128.
"""

from __future__ import annotations

import hashlib
import secrets

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)

_Point = tuple[int, int, int, int]
"""X, Y, Z and T with x = X/Z, y = Y/Z and x*y = T/Z."""


def _add(p: _Point, q: _Point) -> _Point:
    a = (p[1] - p[0]) * (q[1] - q[0]) % _P
    b = (p[1] + p[0]) * (q[1] + q[0]) % _P
    c, d = 2 * p[3] * q[3] * _D % _P, 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _multiply(scalar: int, point: _Point) -> _Point:
    total: _Point = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            total = _add(total, point)
        point, scalar = _add(point, point), scalar >> 1
    return total


def _are_equal(p: _Point, q: _Point) -> bool:
    return (p[0] * q[2] - q[0] * p[2]) % _P == 0 == (p[1] * q[2] - q[1] * p[2]) % _P


def _find_x(y: int, sign: int) -> int | None:
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    return _P - x if x & 1 != sign else x


def _base() -> _Point:
    y = 4 * pow(5, -1, _P) % _P
    x = _find_x(y, 0)
    assert x is not None
    return x, y, 1, x * y % _P


_BASE = _base()


def _compress(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _expand(data: bytes) -> _Point | None:
    number = int.from_bytes(data, "little")
    y, sign = number & ((1 << 255) - 1), number >> 255
    x = _find_x(y, sign) if y < _P else None
    return None if x is None else (x, y, 1, x * y % _P)


def _hash(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little")


def _split(seed: str) -> tuple[int, bytes]:
    digest = hashlib.sha512(bytes.fromhex(seed)).digest()
    scalar = int.from_bytes(digest[:32], "little")
    return scalar & ((1 << 254) - 8) | 1 << 254, digest[32:]


def make_seed() -> str:
    """Return a new private key."""
    return secrets.token_hex(32)


def public_key(seed: str) -> str:
    """Return the public key that belongs to the private key `seed`."""
    return _compress(_multiply(_split(seed)[0], _BASE)).hex()


def sign(seed: str, message: bytes) -> str:
    """Return the signature of `message` by the private key `seed`."""
    scalar, prefix = _split(seed)
    key = _compress(_multiply(scalar, _BASE))
    nonce = _hash(prefix, message) % _ORDER
    commitment = _compress(_multiply(nonce, _BASE))
    challenge = _hash(commitment, key, message) % _ORDER
    answer = (nonce + challenge * scalar) % _ORDER
    return (commitment + answer.to_bytes(32, "little")).hex()


def verify(key: str, message: bytes, signature: str) -> bool:
    """Return whether `signature` is that of `message` by the owner of the public key `key`.

    Text that is not a key or not a signature verifies nothing.
    """
    try:
        point, given = bytes.fromhex(key), bytes.fromhex(signature)
    except (ValueError, TypeError):
        return False
    if len(point) != 32 or len(given) != 64:
        return False
    owner, commitment = _expand(point), _expand(given[:32])
    answer = int.from_bytes(given[32:], "little")
    if owner is None or commitment is None or answer >= _ORDER:
        return False
    challenge = _hash(given[:32], point, message) % _ORDER
    return _are_equal(_multiply(answer, _BASE), _add(commitment, _multiply(challenge, owner)))
