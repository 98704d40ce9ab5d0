"""Turn each failure of an SSH login into a message: what, where, what to do next."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Sequence
from typing import Literal

import asyncssh

from app.errors import LoginRefused, NodeUnreachable
from app.nodes.node import DEFAULT_SSH_PORT, SshAddress
from app.nodes.transport.login_keys import DEFAULT_KEY_NAMES, LoginKeys
from app.shell_words import command_here

_NO_MATCH = re.compile(r"No matching (.+) algorithm found, sent .* and received (.*)")
_SSHD_OPTIONS = {"key exchange": "KexAlgorithms", "encryption": "Ciphers", "MAC": "MACs"}
_SHOWN_NAMES = 4
_NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


def tcp_failed(address: SshAddress, error: Exception, timeout_s: float) -> NodeUnreachable:
    """Return the error for a port that could not be opened."""
    host, port = address.host, address.port
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return NodeUnreachable(
            f"The host name {host} is not known here",
            "Check its spelling, or use the PC's IP address, which "
            f"'hostname -I' prints on that PC: {address.user}@IP-ADDRESS",
        )
    if isinstance(error, TimeoutError):
        return NodeUnreachable(
            f"{host} did not answer on port {port} within {timeout_s:.0f} s",
            f"Check that the PC is on, in the same network, and that its firewall lets port {port} "
            f"in: sudo ufw allow {port}/tcp",
        )
    if isinstance(error, ConnectionRefusedError):
        return NodeUnreachable(
            f"{host} is on, but nothing listens on port {port}",
            "On that PC, install and start the SSH server: sudo apt install openssh-server. "
            "If it listens on another port, write USER@HOST:PORT",
        )
    if isinstance(error, OSError) and error.errno in _NO_ROUTE:
        return NodeUnreachable(
            f"There is no route to {host}: {error.strerror}",
            f"Check that the PC is on and in the same network: {command_here('ping', host)}",
        )
    return NodeUnreachable(
        f"{host} cannot be reached on port {port}: {error}",
        "Check the address and try: " + command_here("ssh", "-p", port, f"{address.user}@{host}"),
    )


def jump_failed(address: SshAddress, error: asyncssh.ChannelOpenError) -> NodeUnreachable:
    """Return the error for a host that the jump host before it cannot reach."""
    jump = address.jumps[-1]
    command = command_here("ssh", "-J", jump, f"{address.user}@{address.host}")
    return NodeUnreachable(
        f"{jump.label} lets us in, but cannot reach {address.label} from there: {error.reason}",
        f"Check that the PC is on, and try: {command}. The jump "
        "host must allow it: AllowTcpForwarding in its /etc/ssh/sshd_config",
    )


def ssh_failed(address: SshAddress, error: Exception) -> NodeUnreachable:
    """Return the error for a handshake that failed before authentication."""
    place = address.label
    if address.proxy_command is not None:
        return NodeUnreachable(
            f"The program that leads to {place} gave no SSH connection: {_reason(error)}",
            f"Try it in a terminal: {address.proxy_command}",
        )
    if isinstance(error, TimeoutError):
        return NodeUnreachable(
            f"{place} accepts connections, but no SSH login was possible in time",
            "That PC may be overloaded, another service may use that port, or large packets may be "
            "lost on the way (a VPN, or jumbo frames on one side alone). "
            f"Try: {_ssh_command(address)}",
        )
    if isinstance(error, asyncssh.KeyExchangeFailed):
        return _no_common_algorithm(address, error.reason)
    if isinstance(error, (asyncssh.ProtocolError, asyncssh.ProtocolNotSupported)):
        if "authentication failures" in str(error):
            return _too_many_keys(address)
        return NodeUnreachable(
            f"What answers at {place} does not speak SSH: {_reason(error)}",
            f"Check the port; SSH servers usually listen on {DEFAULT_SSH_PORT}",
        )
    if isinstance(error, asyncssh.DisconnectError) and "authentication failures" in str(error):
        return _too_many_keys(address)
    return NodeUnreachable(
        f"{place} ended the connection during the SSH login: {_reason(error)}",
        f"It may limit logins for a while (MaxStartups, fail2ban). Try: {_ssh_command(address)}",
    )


def no_common_host_key(address: SshAddress, offered: Sequence[str]) -> NodeUnreachable:
    """Return the error for a server that has no host key of an accepted type."""
    return NodeUnreachable(
        f"{address.location} has no host key of a kind that Rackless trusts; it offers only "
        f"{', '.join(offered[:_SHOWN_NAMES])}, wanted is ed25519, ECDSA, or RSA with SHA-2",
        "On that PC, make the missing host keys: sudo ssh-keygen -A && sudo systemctl restart ssh. "
        "If that is not enough, its /etc/ssh/sshd_config limits them: remove HostKeyAlgorithms",
    )


def _no_common_algorithm(address: SshAddress, reason: str) -> NodeUnreachable:
    """Return the error for asyncssh's `reason`, such as `No matching MAC algorithm found, sent a,b
    and received c`.
    """
    match = _NO_MATCH.search(reason)
    if match is None:
        text, option = reason, "KexAlgorithms, Ciphers and MACs"
    else:
        kind, offered = match[1], match[2].split(",")[:_SHOWN_NAMES]
        text = f"no {kind} method is known to both; it offers only {', '.join(offered)}"
        option = _SSHD_OPTIONS.get(kind, "Compression")
    return NodeUnreachable(
        f"{address.location} and Rackless cannot agree on how to talk safely: {text}",
        "On that PC, update the SSH server: sudo apt install --only-upgrade openssh-server. "
        f"If it is new, its /etc/ssh/sshd_config limits it: remove {option}",
    )


def login_refused(address: SshAddress, keys: LoginKeys) -> LoginRefused:
    """Return the error for a login that no key could open."""
    tried, skipped = ", ".join(keys.names), ", ".join(keys.locked)
    locked = f" {skipped} could not be tried: locked." if skipped else ""
    if not keys.pairs:
        return LoginRefused(
            f"There is no key to log in to {address} with: neither an SSH agent with keys "
            f"nor {_key_places(address)}.{locked}",
            f"Unlock the key once for this login session: {command_here('ssh-add', keys.locked[0])}"
            if keys.locked
            else f"Make a key and install it: ssh-keygen -t ed25519 && {_copy_command(address)}",
            account=str(address),
        )
    return LoginRefused(
        f"{address} accepts none of our keys. Tried: {tried}.{locked}",
        f"Install a key there: {_copy_command(address)}, "
        f"and check that the user is called {address.user}",
        account=str(address),
    )


Asked = Literal["nothing", "password", "more"]
"""Authentication that a host asked for besides a key: none, a password, or more, such as a code."""


def password_refused(address: SshAddress, asked: Asked) -> LoginRefused:
    """Return the error for a login by password."""
    if asked == "password":
        return LoginRefused(
            f"{address.label} does not accept this password for {address.user}",
            "Check that the user is right, and try once more",
            account=str(address),
        )
    wants = "wants more than a password" if asked == "more" else "lets nobody in by password"
    return LoginRefused(
        f"{address.label} {wants}",
        f"Log in to that PC another way and add your public key to ~/.ssh/authorized_keys of "
        f"{address.user}, or allow it for a moment: PasswordAuthentication yes in its "
        "/etc/ssh/sshd_config",
    )


def _key_places(address: SshAddress) -> str:
    if address.identity_files:
        return ", ".join(map(str, address.identity_files))
    return f"{', '.join(DEFAULT_KEY_NAMES)} in ~/.ssh"


def _too_many_keys(address: SshAddress) -> NodeUnreachable:
    return NodeUnreachable(
        f"{address} refused the login after too many keys",
        "Name the right one: --key ~/.ssh/id_ed25519",
    )


def _copy_command(address: SshAddress) -> str:
    key = ("-i", address.key) if address.key is not None else ()
    place = f"{address.user}@{address.host}"
    return command_here("ssh-copy-id", *key, *_port_option(address), place)


def _ssh_command(address: SshAddress) -> str:
    return command_here("ssh", *_port_option(address), f"{address.user}@{address.host}")


def _port_option(address: SshAddress) -> tuple[object, ...]:
    return () if address.port == DEFAULT_SSH_PORT else ("-p", address.port)


def _reason(error: Exception) -> str:
    return getattr(error, "reason", "") or str(error) or type(error).__name__
