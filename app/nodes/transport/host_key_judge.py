"""Compare the key that a host shows with the confirmed one: trust on first use."""

from __future__ import annotations

import asyncssh

from app.errors import HostKeyChanged, HostKeyUnknown, UserError
from app.nodes.node import SshAddress
from app.nodes.transport.host_keys import fingerprint_of

HOST_KEY_ALGORITHMS = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    # One RSA key signs in several ways; the one with SHA-1, also called ssh-rsa, is left out.
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
ALL_HOST_KEY_ALGORITHMS = tuple(name for names in HOST_KEY_ALGORITHMS.values() for name in names)


class HostKeyJudge:
    """Comparison of the key that the host shows with the confirmed one."""

    def __init__(
        self, address: SshAddress, known: asyncssh.SSHKey | None, accepted: str | None
    ) -> None:
        self._address = address
        self._known = known
        self._accepted = accepted
        self.to_confirm: asyncssh.SSHKey | None = None
        self.verdict: UserError | None = None

    def algorithms(self) -> tuple[str, ...]:
        """Return the key types to request."""
        # The known key's type, or a host with keys of several types might show another key.
        if self._known is None:
            return ALL_HOST_KEY_ALGORITHMS
        name = self._known.get_algorithm()
        return HOST_KEY_ALGORITHMS.get(name, ALL_HOST_KEY_ALGORITHMS)

    def accepts(self, key: asyncssh.SSHKey) -> bool:
        shown = fingerprint_of(key)
        if self._known is not None:
            if key.public_data == self._known.public_data:
                return True
            self.verdict = HostKeyChanged(self._address.label, fingerprint_of(self._known), shown)
        elif self._accepted is None:
            self.verdict = HostKeyUnknown(self._address.label, shown)
        elif self._accepted != shown:
            self.verdict = UserError(
                f"{self._address.label} shows the host key {shown}, "
                f"but the key to accept is {self._accepted}",
                "Compare both with 'ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub' on that PC. "
                "If neither is its key, another PC may be intercepting the connection",
            )
        else:
            self.to_confirm = key
        return self.verdict is None
