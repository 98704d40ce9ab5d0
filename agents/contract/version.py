"""Version of the protocol, in its own module so that `hello` need not import the messages."""

from __future__ import annotations

PROTOCOL_VERSION = 1
