"""The credential by which the nodes of one attempt, check or transfer recognise each other.

It is a key with its self-signed certificate, made here, sent to the nodes over SSH, and useless
once the attempt has ended. `agents/rendezvous/credential.py` describes how the nodes use it.
"""

from __future__ import annotations

import datetime
import secrets
import ssl
import tempfile
from pathlib import Path

# The clocks of nodes may be years off, and the key is used once: its age proves nothing.
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


def make_credential() -> str:
    """Return a new private key and its certificate, in PEM."""
    # Imported here: it takes as long as half of the app's start, which does not need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Rackless attempt")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode("ascii")


def make_client_context(credential: str) -> ssl.SSLContext:
    """Return the TLS settings with which this PC connects to a node that has the credential.

    Raises:
        OSError: the folder for temporary files cannot be written to.
    """
    from cryptography.hazmat.primitives import serialization

    # OpenSSL reads keys from files only; the file is encrypted with a password of this call.
    password = secrets.token_bytes(32).hex().encode("ascii")
    private, _, certificate = credential.partition("-----BEGIN CERTIFICATE-----")
    key = serialization.load_pem_private_key(private.encode("ascii"), None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    ).decode("ascii")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The key is the identity: the same certificate stands for every node, at any address.
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=credential)
    with tempfile.TemporaryDirectory(prefix="rackless-") as folder:
        path = Path(folder) / "credential"
        path.write_text(f"{sealed}-----BEGIN CERTIFICATE-----{certificate}", encoding="ascii")
        context.load_cert_chain(path, password=password)
    return context
