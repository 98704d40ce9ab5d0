"""The version of the protocol, apart from the messages so that `hello` need not wait for them."""

from __future__ import annotations

PROTOCOL_VERSION = 1
