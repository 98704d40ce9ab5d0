"""The credential of an attempt: ranks authenticate each other with it.

It consists of a private key and its self-signed certificate, in PEM. All ranks share it: a caller
that proves possession of the key is a rank, and the handshake fails for any other.
"""

from __future__ import annotations

import os
import ssl


def make_server_context(credential: str) -> ssl.SSLContext:
    """Return the TLS context of the listening side.

    Raises:
        ssl.SSLError: the credential is not a key and its certificate.
    """
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), credential)


def make_client_context(credential: str) -> ssl.SSLContext:
    """Return the TLS context of the connecting side.

    Raises:
        ssl.SSLError: the credential is not a key and its certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The key is the identity: every rank has the same certificate, at any address.
    context.check_hostname = False
    return _load(context, credential)


def _load(context: ssl.SSLContext, credential: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credential)  # the only trusted certificate is its own
    # Python's ssl module loads keys from files only; an anonymous file in memory has no path.
    with os.fdopen(os.memfd_create("credential"), "wb") as file:
        file.write(credential.encode("ascii"))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
