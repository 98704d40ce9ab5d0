"""The credential of an attempt: by it the ranks prove to each other that they belong together.

It is a private key and a certificate that nobody else signed, in PEM. Whoever shows that he holds
the key is a rank; nobody else gets past the handshake, and what follows is encrypted.
"""

from __future__ import annotations

import os
import ssl


def make_server_context(credential: str) -> ssl.SSLContext:
    """Return the settings of the side that listens.

    Raises:
        ssl.SSLError: the credential is not a key and its certificate.
    """
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), credential)


def make_client_context(credential: str) -> ssl.SSLContext:
    """Return the settings of the side that connects.

    Raises:
        ssl.SSLError: the credential is not a key and its certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The key is the identity: the same certificate stands for every rank, at any address.
    context.check_hostname = False
    return _load(context, credential)


def _load(context: ssl.SSLContext, credential: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credential)
    # OpenSSL reads keys from files only; this one never gets a name on any disk.
    with os.fdopen(os.memfd_create("credential"), "wb") as file:
        file.write(credential.encode("ascii"))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
